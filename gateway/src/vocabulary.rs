//! A vocabulary of OpenAI's tokenizers (tiktoken). OpenAI's clients may send token ids instead of texts; the vocabulary turns these ids
//! back into texts.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::Value;

/// The longest file. OpenAI's largest, `o200k_base.tiktoken`, has 3.6 MB.
const FILE_BYTES_MAX: u64 = 32 * 1024 * 1024;

/// The largest id; OpenAI's are below 200,064. Without a bound, one line with a huge id would take memory for all ids below it.
const ID_MAX: usize = 1 << 20;

/// What is shown of something that is no id, in characters.
const SHOWN_CHARS_MAX: usize = 32;

/// The bytes of tokens, by id.
#[derive(Clone)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    /// The range of each id's bytes. Empty: there is no such token.
    tokens: Vec<Range<usize>>,
}

/// Why ids have no text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoText {
    /// This is no id of the vocabulary.
    Unknown(String),
    TooLong,
}

/// Omits the thousands of tokens.
impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Reads a `.tiktoken` file: for each token a line with its bytes in base64, a blank, and its id.
    ///
    /// # Errors
    /// In words: it cannot be read, or is no such file.
    pub fn read(file: &Path) -> Result<Self, String> {
        let unreadable = |error: std::io::Error| format!("which cannot be read: {error}");
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() {
            return Err("which is no regular file".to_owned());
        }
        let bytes = metadata.len();
        if bytes > FILE_BYTES_MAX {
            return Err(format!("which has {bytes} bytes; at most {FILE_BYTES_MAX} are read"));
        }
        Self::parse(&std::fs::read_to_string(file).map_err(unreadable)?)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut vocabulary = Self { bytes: Vec::new(), tokens: Vec::new() };
        for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
            let token = line.split_once(' ').and_then(|(bytes, id)| {
                let (bytes, id) = (BASE64.decode(bytes).ok()?, id.trim().parse::<usize>().ok()?);
                (!bytes.is_empty() && id <= ID_MAX).then_some((bytes, id))
            });
            let Some((bytes, id)) = token else {
                return Err(format!(
                    "whose line {} is not a token: bytes in base64, a blank, and an id",
                    at + 1
                ));
            };
            if vocabulary.tokens.len() <= id {
                vocabulary.tokens.resize(id + 1, 0..0);
            }
            if !vocabulary.tokens[id].is_empty() {
                return Err(format!("whose line {} has the id {id}, which another line has", at + 1));
            }
            let start = vocabulary.bytes.len();
            vocabulary.bytes.extend_from_slice(&bytes);
            vocabulary.tokens[id] = start..vocabulary.bytes.len();
        }
        if vocabulary.tokens.is_empty() { Err("which has no tokens".to_owned()) } else { Ok(vocabulary) }
    }

    /// The text of tokens. Where tokens begin or end within a character, for example after a cut, the text has U+FFFD.
    ///
    /// # Errors
    /// One of them is no id of the vocabulary, or the text has more than `bytes_max` bytes.
    pub fn text(&self, ids: &[Value], bytes_max: usize) -> Result<String, NoText> {
        let mut bytes = Vec::new();
        for id in ids {
            let index = id.as_u64().and_then(|id| usize::try_from(id).ok());
            let token = index.and_then(|index| self.tokens.get(index)).filter(|token| !token.is_empty());
            let token = token
                .ok_or_else(|| NoText::Unknown(id.to_string().chars().take(SHOWN_CHARS_MAX).collect()))?;
            if bytes.len() + token.len() > bytes_max {
                return Err(NoText::TooLong);
            }
            bytes.extend_from_slice(&self.bytes[token.clone()]);
        }
        let text = String::from_utf8(bytes);
        Ok(text.unwrap_or_else(|odd| String::from_utf8_lossy(odd.as_bytes()).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Five tokens as `cl100k_base` has them, and the two bytes of an é.
    const LINES: &str = "IQ== 0\nIg== 1\nIHRoZQ== 279\nSGVsbG8= 9906\nIHdvcmxk 1917\nww== 10\nqQ== 11\n";

    fn text(ids: Value, bytes_max: usize) -> Result<String, NoText> {
        Vocabulary::parse(LINES).unwrap().text(ids.as_array().unwrap(), bytes_max)
    }

    #[test]
    fn ids_become_the_text_that_they_were() {
        assert_eq!(text(json!([9906, 279, 1917, 0]), 100).unwrap(), "Hello the world!");
        assert_eq!(text(json!([10, 11]), 2).unwrap(), "é");
        assert_eq!(text(json!([9906, 10]), 100).unwrap(), "Hello\u{fffd}");
    }

    #[test]
    fn an_invalid_id_is_named() {
        for (ids, shown) in [
            (json!([0, 2]), "2"),
            (json!([1918]), "1918"),
            (json!([-1]), "-1"),
            (json!([0.5]), "0.5"),
            (json!(["Hello"]), "\"Hello\""),
            (json!([null]), "null"),
            (json!([u64::MAX]), "18446744073709551615"),
        ] {
            assert_eq!(text(ids, 100), Err(NoText::Unknown(shown.to_owned())));
        }
        let Err(NoText::Unknown(shown)) = text(json!(["x".repeat(1000)]), 100) else {
            panic!("it has a text")
        };
        assert_eq!(shown.len(), SHOWN_CHARS_MAX);
    }

    #[test]
    fn a_few_ids_are_no_huge_text() {
        assert_eq!(text(json!([9906, 1917]), 11).unwrap().len(), 11);
        assert_eq!(text(json!([9906, 1917]), 10), Err(NoText::TooLong));
    }

    #[test]
    fn other_files_are_no_vocabularies() {
        for (other, why) in [
            ("", "no tokens"),
            ("\n\n", "no tokens"),
            ("IQ== 0\n{\"model\": 1}\n", "line 2"),
            ("IQ==\n", "line 1"),
            (" 0\n", "line 1"),
            ("IQ== -1\n", "line 1"),
            ("IQ== 99999999999\n", "line 1"),
            ("IQ== 0\nIg== 0\n", "another line"),
        ] {
            let error = Vocabulary::parse(other).unwrap_err();
            assert!(error.contains(why), "{other:?}: {error}");
        }
        assert!(Vocabulary::read(Path::new("/no/such/file")).unwrap_err().contains("cannot be read"));
    }
}
