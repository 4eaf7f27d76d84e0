//! Describes a body by its shape. Inputs may be personal data, so only their beginnings are shown. Pure.

use vramq_schemas::{DecodeError, Encoding, Input, Job, Outputs, codec};

use crate::dead_letter::DeadLetter;
use crate::text::{bytes, counted, safe};

/// Inputs that are shown, and characters of each.
const INPUTS: usize = 3;
const CHARS: usize = 32;

/// Bytes that are shown of a body that cannot be decoded.
const BYTES: usize = 64;

/// The lines of the description.
pub fn preview(letter: &DeadLetter) -> Vec<String> {
    let content_type = letter.properties.content_type().as_ref().map(|named| named.as_str());
    let named = content_type.map_or("no content type, so JSON".to_owned(), safe);
    let mut lines = vec![format!("{}, {named}", bytes(letter.body.len() as u64))];
    let encoding = Encoding::of(content_type);
    if letter.results().is_some() {
        match encoding.and_then(|encoding| codec::decode::<Outputs>(&letter.body, encoding)) {
            Ok(outputs) => lines.push(format!(
                "{} of model {}; their values are not shown",
                counted(outputs.outputs.len() as u64, "output"),
                safe(&outputs.model)
            )),
            Err(error) => lines.extend(undecodable(&letter.body, &error)),
        }
        return lines;
    }
    match encoding.and_then(|encoding| codec::decode::<Job>(&letter.body, encoding)) {
        Ok(job) => lines.extend(of_job(&job)),
        Err(error) => lines.extend(undecodable(&letter.body, &error)),
    }
    lines
}

fn of_job(job: &Job) -> Vec<String> {
    let params: Vec<_> = job.params.0.keys().map(|key| safe(key)).collect();
    let params = if params.is_empty() { String::new() } else { format!(", params {}", params.join(", ")) };
    let mut lines =
        vec![format!("model {}, {}{params}", safe(&job.model), counted(job.inputs.len() as u64, "input"))];
    lines.extend(
        job.inputs.iter().take(INPUTS).enumerate().map(|(at, input)| format!("  [{at}] {}", of_input(input))),
    );
    let more = job.inputs.len().saturating_sub(INPUTS);
    if more > 0 {
        lines.push(format!("  … {more} more"));
    }
    lines
}

fn of_input(input: &Input) -> String {
    match input {
        Input::Bytes(all) => format!("bytes, {}", bytes(all.len() as u64)),
        // A URI may contain a person's name or a signature.
        Input::Uri(text) => format!("uri, {}", beginning(text)),
        Input::Text(text) => format!("text, {}", beginning(text)),
        Input::Json(value) => format!("json, {}", beginning(value.as_str())),
    }
}

fn beginning(text: &str) -> String {
    let chars = text.chars().count();
    let shown: String = text.chars().take(CHARS).collect();
    let dots = if chars > CHARS { "…" } else { "" };
    format!("{}: {}{dots}", counted(chars as u64, "character"), safe(&shown))
}

fn undecodable(body: &[u8], error: &DecodeError) -> Vec<String> {
    // A parser's message quotes the input, which is shown below.
    let error: String = error.to_string().chars().take(120).collect();
    let shown = String::from_utf8_lossy(&body[..body.len().min(BYTES)]).into_owned();
    let dots = if body.len() > BYTES { "…" } else { "" };
    vec![format!("cannot be decoded: {}", safe(&error)), format!("  {}{dots}", safe(&shown))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letter::tests::written;
    use vramq_schemas::{Params, Reason};

    fn of(body: Vec<u8>) -> String {
        let letter = written("a", Reason::EngineFailed, |_| {});
        preview(&DeadLetter { body, ..letter }).join("\n")
    }

    #[test]
    fn a_job_is_described_by_its_shape_and_the_beginnings_of_its_inputs() {
        let secret = "My name is Ada Lovelace and I live at 12 St James's Square";
        let inputs = vec![
            Input::Text(secret.to_owned()),
            Input::Bytes(vec![0; 2048]),
            Input::Uri("s3://bucket/key".to_owned()),
            Input::Text("fourth".to_owned()),
        ];
        let job = Job { model: "minilm".to_owned(), inputs, params: Params::default() };
        let shown = of(codec::encode(&job, Encoding::Json).unwrap());
        assert!(
            shown.contains(
                "model minilm, 4 inputs\n  [0] text, 58 characters: My name is Ada Lovelace and I li…"
            ),
            "{shown}"
        );
        assert!(
            shown.contains("[1] bytes, 2.0 KiB\n  [2] uri, 15 characters: s3://bucket/key\n  … 1 more"),
            "{shown}"
        );
        assert!(!shown.contains("Square") && !shown.contains("fourth"));
    }

    #[test]
    fn an_undecodable_body_is_cut_and_escaped() {
        let shown = of(b"\x1b[2J\xff{".repeat(30));
        assert!(
            shown.contains("cannot be decoded")
                && shown.contains("\\u{1b}[2J\u{fffd}{")
                && shown.ends_with('…'),
            "{shown}"
        );
    }
}
