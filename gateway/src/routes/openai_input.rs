//! The `input` of a request for embeddings in OpenAI's API: a text or a list of texts, each of which may be given as token ids.

use axum::http::StatusCode;
use serde_json::Value;
use vramq_producer::Input;

use crate::config::Limits;
use crate::problem::Problem;
use crate::vocabulary::{NoText, Vocabulary};

/// About what decoding a token costs, in bytes of a body.
const TOKEN_BYTES: usize = 16;

/// About what decoding the token ids in `input` costs, in bytes of a body.
pub fn decoding_bytes(input: &Value) -> usize {
    let list = input.as_array().map(Vec::as_slice).unwrap_or_default();
    TOKEN_BYTES * list.iter().map(|item| item.as_array().map_or(1, Vec::len)).sum::<usize>()
}

/// The texts of `input`: one, or a list. Each may be a list of token ids, if there is a vocabulary for them.
///
/// # Errors
/// `input` is something else, has too many texts, or holds token ids that have no text.
pub fn texts(input: Value, limits: &Limits, vocabulary: Option<&Vocabulary>) -> Result<Vec<Input>, Problem> {
    let invalid = |message: String| Err(Problem::invalid(message).about("input"));
    let list = match input {
        Value::String(text) => return Ok(vec![Input::Text(text)]),
        Value::Array(list) => list,
        _ => return invalid("`input` must be a text or a list of texts".to_owned()),
    };
    if list.is_empty() {
        return invalid("`input` is an empty list".to_owned());
    }
    // The decoded texts together are no larger than a body may be.
    let mut room = limits.body_bytes;
    if list[0].is_number() {
        return Ok(vec![Input::Text(decoded(&list, vocabulary, &mut room)?)]);
    }
    let most = limits.items;
    if list.len() > most {
        return invalid(format!("`input` has {} items, at most {most} are allowed", list.len()));
    }
    let mut inputs = Vec::with_capacity(list.len());
    for (at, item) in list.into_iter().enumerate() {
        match item {
            Value::String(text) => inputs.push(Input::Text(text)),
            Value::Array(ids) => inputs.push(Input::Text(decoded(&ids, vocabulary, &mut room)?)),
            _ => return invalid(format!("`input[{at}]` is not a text")),
        }
    }
    Ok(inputs)
}

/// The bytes of these texts.
pub fn text_bytes(inputs: &[Input]) -> usize {
    let bytes = |input: &Input| match input {
        Input::Text(text) => text.len(),
        _ => 0,
    };
    inputs.iter().map(bytes).sum()
}

/// The text of token ids. Its bytes are taken from `room`.
fn decoded(ids: &[Value], vocabulary: Option<&Vocabulary>, room: &mut usize) -> Result<String, Problem> {
    const INSTEAD: &str = "send texts (with LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)";
    let invalid = |message: String| Err(Problem::invalid(message).about("input"));
    if !ids.iter().all(Value::is_number) {
        return invalid(
            "an item of `input` is a list, and not of token ids: each item must be a text".to_owned(),
        );
    }
    let Some(vocabulary) = vocabulary else {
        return invalid(format!(
            "`input` holds token ids, which mean something to OpenAI's own models only; {INSTEAD}"
        ));
    };
    if ids.is_empty() {
        return invalid("`input` holds an empty list of token ids".to_owned());
    }
    match vocabulary.text(ids, *room) {
        Ok(text) => {
            *room = room.saturating_sub(text.len());
            Ok(text)
        }
        Err(NoText::Unknown(id)) => {
            invalid(format!("`input` holds {id}, which is not a token id of openai.vocabulary; {INSTEAD}"))
        }
        Err(NoText::TooLong) => {
            let message = "the texts of these token ids are larger than a body may be: send fewer at a time";
            Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message).about("input"))
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
    use serde_json::json;

    use super::*;
    use crate::config::Config;

    /// Two texts at most.
    fn limits() -> Limits {
        Config::read("[http]\nitems_max = 2\nbody_mib_max = 1", Vec::new()).unwrap().limits
    }

    #[test]
    fn inputs_are_texts_and_token_ids_are_refused_by_name() {
        let texts = |input: Value| texts(input, &limits(), None);
        assert_eq!(texts(json!("a")).unwrap(), [Input::Text("a".to_owned())]);
        assert_eq!(texts(json!(["a", "b"])).unwrap().len(), 2);
        for tokens in [json!([1, 2, 3]), json!([[1, 2], [3]]), json!([[]])] {
            assert!(texts(tokens).unwrap_err().message.contains("check_embedding_ctx_length=False"));
        }
        assert!(texts(json!([["a"]])).unwrap_err().message.contains("each item must be a text"));
        for wrong in [
            json!([]),
            json!(["a", "b", "c"]),
            json!({}),
            json!([null]),
            json!(1),
            json!(null),
            json!(["a", 1]),
            json!([1, "a"]),
        ] {
            let problem = texts(wrong.clone()).unwrap_err();
            assert_eq!((problem.status.as_u16(), problem.param), (400, Some("input")), "{wrong}");
        }
    }

    #[test]
    fn token_ids_of_a_vocabulary_are_texts() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // `a`, `b`, and a token of half a MiB.
        let long = BASE64.encode("c".repeat(1 << 19));
        std::fs::write(file.path(), format!("YQ== 0\nYg== 1\n{long} 2\n")).unwrap();
        let vocabulary = Vocabulary::read(file.path()).unwrap();
        let texts = |input: Value| texts(input, &limits(), Some(&vocabulary));
        let text = |text: &str| Input::Text(text.to_owned());
        assert_eq!(texts(json!([0, 1, 0])).unwrap(), [text("aba")]);
        assert_eq!(texts(json!([[0], [1, 1]])).unwrap(), [text("a"), text("bb")]);
        assert_eq!(texts(json!(["x", [0]])).unwrap(), [text("x"), text("a")]);
        for (wrong, status) in [
            (json!([0, 3]), 400),
            (json!([[0], []]), 400),
            (json!([[0], [0], [0]]), 400),
            (json!([[2], [2, 0]]), 413),
            (json!([2, 2, 0]), 413),
        ] {
            let problem = texts(wrong.clone()).unwrap_err();
            assert_eq!((problem.status.as_u16(), problem.param), (status, Some("input")), "{wrong}");
        }
    }
}
