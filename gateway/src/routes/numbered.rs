//! Reads the inputs of `/v1/jobs` one by one, so that a fault names its index.

use std::fmt;

use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use vramq_producer::Input;

/// Reads the inputs, for `deserialize_with`. Their number is checked later, because too many get another status than a malformed body.
///
/// # Errors
/// One of them is not an input.
pub fn inputs<'de, D: Deserializer<'de>>(inputs: D) -> Result<Vec<Input>, D::Error> {
    inputs.deserialize_seq(Inputs)
}

struct Inputs;

impl<'de> Visitor<'de> for Inputs {
    type Value = Vec<Input>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of inputs")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<Input>, A::Error> {
        let mut inputs = Vec::new();
        loop {
            let at = inputs.len();
            let input =
                seq.next_element().map_err(|e| A::Error::custom(format_args!("inputs[{at}]: {e}")))?;
            match input {
                Some(input) => inputs.push(input),
                None => return Ok(inputs),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::jobs::JobRequest;

    #[test]
    fn a_fault_of_an_input_names_its_index_and_its_place_in_the_body() {
        let body = "{\"model\": \"m\",\n\"inputs\": [\"a\", \"b\",\n{\"json\": {\"x\":\n1e999}}]}";
        let fault = serde_json::from_str::<JobRequest>(body).unwrap_err().to_string();
        assert!(
            fault.starts_with("inputs[2]: number out of range") && fault.contains(" at line 4 "),
            "{fault}"
        );
        let body = r#"{"model": "m", "inputs": ["a", 5]}"#;
        let fault = serde_json::from_str::<JobRequest>(body).unwrap_err().to_string();
        assert!(fault.starts_with("inputs[1]: invalid type: integer `5`"), "{fault}");
        assert!(serde_json::from_str::<JobRequest>(r#"{"model": "m", "inputs": "a"}"#).is_err());
        serde_json::from_str::<JobRequest>(r#"{"model": "m", "inputs": ["a", "b"]}"#).unwrap();
    }
}
