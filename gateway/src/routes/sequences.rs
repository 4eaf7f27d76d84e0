//! Parses the inputs of `/predict`, value by value. Anything else than texts in lists ends the parse: many small objects or lists would take a
//! hundred times the memory of their text.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, SeqAccess, Visitor};
use vramq_schemas::ITEMS_MAX;

/// What text-embeddings-inference takes: a text, alone or in a list, a pair of texts, or a list of lists of one text or two.
#[derive(Debug, PartialEq)]
pub enum PredictInputs {
    One(Sequence),
    Batch(Vec<Sequence>),
}

/// A text, or a pair of texts.
#[derive(Debug, PartialEq)]
pub struct Sequence(pub String, pub Option<String>);

impl<'de> Deserialize<'de> for PredictInputs {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        value.deserialize_any(Inputs)
    }
}

impl<'de> Deserialize<'de> for Sequence {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        match value.deserialize_any(Element)? {
            Read::Sequence(sequence) => Ok(sequence),
            Read::Text(_) => Err(D::Error::custom(EXPECTED)),
        }
    }
}

const EXPECTED: &str = "`inputs` must be a text, a list of one text or of two, or a list of such lists";

struct Inputs;

impl<'de> Visitor<'de> for Inputs {
    type Value = PredictInputs;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PredictInputs, E> {
        Ok(PredictInputs::One(Sequence(text.to_owned(), None)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PredictInputs, A::Error> {
        let mut list = match items.next_element::<Read>()? {
            None => return Ok(PredictInputs::Batch(Vec::new())),
            Some(Read::Text(first)) => return sequence(first, items).map(PredictInputs::One),
            Some(Read::Sequence(first)) => vec![first],
        };
        while let Some(next) = items.next_element::<Sequence>()? {
            if list.len() == ITEMS_MAX {
                return Err(A::Error::custom(format!("`inputs` has more than {ITEMS_MAX} inputs")));
            }
            list.push(next);
        }
        Ok(PredictInputs::Batch(list))
    }
}

/// The rest of a list that begins with a text.
fn sequence<'de, A: SeqAccess<'de>>(first: String, mut items: A) -> Result<Sequence, A::Error> {
    let second = match items.next_element::<Read>()? {
        None => return Ok(Sequence(first, None)),
        Some(Read::Text(second)) => second,
        Some(Read::Sequence(_)) => return Err(A::Error::custom(EXPECTED)),
    };
    match items.next_element::<IgnoredAny>()? {
        None => Ok(Sequence(first, Some(second))),
        Some(_) => Err(A::Error::custom(EXPECTED)),
    }
}

/// A text, or a list of one text or two.
enum Read {
    Text(String),
    Sequence(Sequence),
}

struct Element;

impl<'de> Deserialize<'de> for Read {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        value.deserialize_any(Element)
    }
}

impl<'de> Visitor<'de> for Element {
    type Value = Read;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Read, E> {
        Ok(Read::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Read, A::Error> {
        match items.next_element::<Read>()? {
            Some(Read::Text(first)) => sequence(first, items).map(Read::Sequence),
            _ => Err(A::Error::custom(EXPECTED)),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn inputs_are_read_as_text_embeddings_inference_reads_them() {
        let read = |inputs: Value| serde_json::from_str::<PredictInputs>(&inputs.to_string());
        let text = |text: &str| Sequence(text.to_owned(), None);
        let pair = |first: &str, second: &str| Sequence(first.to_owned(), Some(second.to_owned()));
        assert_eq!(read(json!("a")).unwrap(), PredictInputs::One(text("a")));
        assert_eq!(read(json!(["a"])).unwrap(), PredictInputs::One(text("a")));
        assert_eq!(read(json!(["a", "b"])).unwrap(), PredictInputs::One(pair("a", "b")));
        let batch = vec![text("a"), pair("b", "c")];
        assert_eq!(read(json!([["a"], ["b", "c"]])).unwrap(), PredictInputs::Batch(batch));
        assert_eq!(read(json!([])).unwrap(), PredictInputs::Batch(Vec::new()));
        for wrong in [
            json!(["a", "b", "c"]),
            json!([["a", "b", "c"]]),
            json!(["a", ["b"]]),
            json!([["a"], "b"]),
            json!([["a"], []]),
            json!([[]]),
            json!([[["a"]]]),
            json!([{"a": "b"}]),
            json!(1),
            json!(null),
        ] {
            assert!(read(wrong.clone()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_list_that_is_too_long_is_not_kept() {
        let list = |count: usize| format!("[{}[\"\"]]", "[\"\"],".repeat(count - 1));
        assert!(serde_json::from_str::<PredictInputs>(&list(ITEMS_MAX)).is_ok());
        let error = serde_json::from_str::<PredictInputs>(&list(ITEMS_MAX + 1)).unwrap_err();
        assert!(error.to_string().contains("more than"), "{error}");
    }
}
