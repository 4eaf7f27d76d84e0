//! Tokens that transformers finds in texts, but `tokenizer.json` lacks: other files name them, or transformers' class has them by
//! default. Texts with such a token are refused, because their token ids would differ.

use std::collections::HashSet;
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::{NormalizedString, Normalizer as _, Tokenizer};

use super::LoadError;
use super::config::optional;
use super::text_config::TOKENIZER_CONFIG;

/// Older files that name tokens. transformers reads them if `tokenizer_config.json` has no [`DECODER`].
pub(super) const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
pub(super) const ADDED_TOKENS: &str = "added_tokens.json";

/// The key with all added tokens, by their ids.
const DECODER: &str = "added_tokens_decoder";

/// Keys with several tokens. Others name one, and end in `_token`.
const ADDITIONAL: &str = "additional_special_tokens";
const EXTRA: &str = "extra_special_tokens";

/// The content of the older files.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenFiles {
    special: Map<String, Value>,
    added: Map<String, Value>,
}

impl TokenFiles {
    /// Those of a folder with this `tokenizer_config.json`, if they count.
    ///
    /// # Errors
    /// A file is there and malformed.
    pub fn read(folder: &Path, tokenizer_config: &Map<String, Value>) -> Result<Self, LoadError> {
        if tokenizer_config.contains_key(DECODER) {
            return Ok(Self::default());
        }
        let read = |name: &str| optional(&folder.join(name)).map(Option::unwrap_or_default);
        Ok(Self { special: read(SPECIAL_TOKENS_MAP)?, added: read(ADDED_TOKENS)? })
    }
}

/// The tokens to look for.
#[derive(Debug, Default)]
pub(super) struct TokensBeside {
    as_written: Vec<Token>,
    /// Tokens that are searched in the normalized text, for example also in lower case.
    normalized: Vec<Token>,
}

#[derive(Debug)]
struct Token {
    content: String,
    /// What a text with it contains.
    seen: String,
    /// Completes the sentence "the token is …".
    source: String,
}

impl TokensBeside {
    /// Those of transformers' class, the keys of `tokenizer_config.json` and the older files.
    ///
    /// # Errors
    /// The tokenizer cannot normalize a token.
    pub fn of(
        class: &str,
        config: &Map<String, Value>,
        files: &TokenFiles,
        tokenizer: &Tokenizer,
    ) -> Result<Self, String> {
        let mut tokens = Self::default();
        let mut known: HashSet<String> =
            tokenizer.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
        let mut add = |content: &str, is_normalized: bool, source: String| -> Result<(), String> {
            if content.is_empty() || !known.insert(content.to_owned()) {
                return Ok(());
            }
            let content = content.to_owned();
            if is_normalized {
                let seen = normalized(tokenizer, &content)?;
                // Every text contains an empty one.
                if !seen.is_empty() {
                    tokens.normalized.push(Token { content, seen, source });
                }
            } else {
                tokens.as_written.push(Token { seen: content.clone(), content, source });
            }
            Ok(())
        };
        for (file, keys) in [(TOKENIZER_CONFIG, config), (SPECIAL_TOKENS_MAP, &files.special)] {
            for (key, value) in keys.iter().filter(|(key, _)| names_tokens(key)) {
                for (content, is_normalized) in named(key, value) {
                    add(content, is_normalized, format!("in {file}"))?;
                }
            }
        }
        for content in files.added.keys() {
            add(content, true, format!("in {ADDED_TOKENS}"))?;
        }
        let is_named = |key: &str| config.contains_key(key) || files.special.contains_key(key);
        for (key, content) in defaults(class) {
            let is_given = is_named(key) || (*key == ADDITIONAL && is_named(EXTRA));
            if !is_given {
                add(content, false, format!("one of transformers' class {class}"))?;
            }
        }
        Ok(tokens)
    }

    /// Whether a text has none of them.
    ///
    /// # Errors
    /// Names the first one.
    pub fn check(&self, tokenizer: &Tokenizer, text: &str) -> Result<(), String> {
        find(&self.as_written, text)?;
        // Most tokenizers have none of these, and normalizing takes time.
        if self.normalized.is_empty() {
            return Ok(());
        }
        find(&self.normalized, &normalized(tokenizer, text)?)
    }
}

fn find(tokens: &[Token], text: &str) -> Result<(), String> {
    match tokens.iter().find(|token| text.contains(token.seen.as_str())) {
        None => Ok(()),
        Some(Token { content, source, .. }) => {
            Err(format!("the token `{content}` is {source}, but not in tokenizer.json"))
        }
    }
}

fn normalized(tokenizer: &Tokenizer, text: &str) -> Result<String, String> {
    let mut text = NormalizedString::from(text);
    if let Some(normalizer) = tokenizer.get_normalizer() {
        normalizer.normalize(&mut text).map_err(|error| error.to_string())?;
    }
    Ok(text.get().to_owned())
}

fn names_tokens(key: &str) -> bool {
    key.ends_with("_token") || [DECODER, ADDITIONAL, EXTRA].contains(&key)
}

/// The tokens that such a key names, each with whether it is searched in the normalized text. The value is a text, an object with
/// the content, or several of these in a list or by name.
fn named<'a>(key: &str, value: &'a Value) -> Vec<(&'a str, bool)> {
    match value {
        Value::String(token) => vec![(token, false)],
        Value::Array(all) => all.iter().flat_map(|one| named(key, one)).collect(),
        Value::Object(own) => match own.get("content").and_then(Value::as_str) {
            Some(token) => {
                let flag = |name| own.get(name).and_then(Value::as_bool);
                let is_special = key != DECODER || flag("special") == Some(true);
                vec![(token, flag("normalized").unwrap_or(!is_special))]
            }
            None => own.values().flat_map(|one| named(key, one)).collect(),
        },
        Value::Null | Value::Bool(_) | Value::Number(_) => Vec::new(),
    }
}

/// The default tokens of transformers' classes, each with the key that would override it.
fn defaults(class: &str) -> &'static [(&'static str, &'static str)] {
    match class {
        "BertTokenizer" | "DistilBertTokenizer" | "ElectraTokenizer" => &[
            ("unk_token", "[UNK]"),
            ("sep_token", "[SEP]"),
            ("pad_token", "[PAD]"),
            ("cls_token", "[CLS]"),
            ("mask_token", "[MASK]"),
        ],
        "MPNetTokenizer" => &[
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("unk_token", "[UNK]"),
            ("pad_token", "<pad>"),
            ("mask_token", "<mask>"),
        ],
        "RobertaTokenizer" | "XLMRobertaTokenizer" => &[
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("unk_token", "<unk>"),
            ("pad_token", "<pad>"),
            ("mask_token", "<mask>"),
        ],
        "CamembertTokenizer" => &[
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("unk_token", "<unk>"),
            ("pad_token", "<pad>"),
            ("mask_token", "<mask>"),
            (ADDITIONAL, "<s>NOTUSED"),
            (ADDITIONAL, "</s>NOTUSED"),
            (ADDITIONAL, "<unk>NOTUSED"),
        ],
        "GemmaTokenizer" => &[
            ("bos_token", "<bos>"),
            ("eos_token", "<eos>"),
            ("unk_token", "<unk>"),
            ("pad_token", "<pad>"),
            ("mask_token", "<mask>"),
        ],
        "Qwen2Tokenizer" => {
            &[("unk_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")]
        }
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::encoder::tokenizer_class::TokenizerConfig;
    use serde_json::json;

    /// The tokenizer of a fixture, with or without its own added tokens, as transformers changes it for a model.
    fn tokenizer(fixture: &str, is_whole: bool, config: &TokenizerConfig) -> Tokenizer {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture).join("tokenizer.json");
        let mut file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        if !is_whole {
            file["added_tokens"] = json!([]);
        }
        let mut tokenizer = Tokenizer::from_bytes(file.to_string()).unwrap();
        config.apply(&mut tokenizer);
        tokenizer
    }

    fn config(model_type: &str, keys: Value) -> TokenizerConfig {
        let mut config: TokenizerConfig = serde_json::from_value(keys).unwrap();
        model_type.clone_into(&mut config.model_type);
        config
    }

    fn map(value: Value) -> Map<String, Value> {
        serde_json::from_value(value).unwrap()
    }

    /// Seen with transformers 5.23.
    #[test]
    fn a_class_has_tokens_that_no_file_names() {
        let cases = [
            ("tiny-mean", "bert", json!({}), "a [MASK]", Some("one of transformers' class BertTokenizer")),
            ("tiny-mean", "bert", json!({"mask_token": null}), "a [MASK]", None),
            ("tiny-mean", "bert", json!({"mask_token": null}), "a [SEP]", Some("BertTokenizer")),
            ("tiny-mean", "bert", json!({"tokenizer_class": "ElectraTokenizer"}), "[CLS]", Some("Electra")),
            ("tiny-mean", "bert", json!({"tokenizer_class": "TokenizersBackend"}), "a [MASK]", None),
            ("tiny-mpnet", "mpnet", json!({}), "<mask>", Some("MPNetTokenizer")),
            ("tiny-xlm-roberta", "xlm-roberta", json!({}), "</s>", Some("XLMRobertaTokenizer")),
            ("tiny-camembert", "camembert", json!({}), "<s>NOTUSED", Some("CamembertTokenizer")),
            ("tiny-qwen3", "qwen3", json!({}), "<|endoftext|>", Some("Qwen2Tokenizer")),
            ("tiny-gemma", "gemma3_text", json!({}), "<mask>", Some("GemmaTokenizer")),
            ("tiny-modernbert", "modernbert", json!({}), "[MASK]", None),
        ];
        for (fixture, model_type, keys, text, source) in cases {
            let what = format!("{fixture} {keys} {text}");
            let config = config(model_type, keys);
            let bare = tokenizer(fixture, false, &config);
            let found = config.tokens_beside(&bare).unwrap().check(&bare, text).err();
            match (&found, source) {
                (Some(found), Some(source)) => assert!(found.contains(source), "{what}: {found}"),
                _ => assert_eq!(found.as_deref(), source, "{what}"),
            }
            // Those of the file are found there.
            let whole = tokenizer(fixture, true, &config);
            config.tokens_beside(&whole).unwrap().check(&whole, text).expect(&what);
        }
    }

    #[test]
    fn the_older_files_name_tokens() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, content: Value| {
            std::fs::write(folder.path().join(name), content.to_string()).unwrap();
        };
        write(SPECIAL_TOKENS_MAP, json!({"mask_token": "[MASK]", "image_token": {"content": "<img>"}}));
        write(ADDED_TOKENS, json!({"[FOO]": 50, "<img>": 51}));
        let mut config = config("bert", json!({}));
        config.files = TokenFiles::read(folder.path(), &Map::new()).unwrap();
        let tokenizer = tokenizer("tiny-mean", true, &config);
        let beside = config.tokens_beside(&tokenizer).unwrap();
        let error = |text| beside.check(&tokenizer, text).err();
        assert_eq!(
            error("an <img>").as_deref(),
            Some("the token `<img>` is in special_tokens_map.json, but not in tokenizer.json")
        );
        // It is special, and others of the second file are not.
        assert_eq!(error("an <IMG>"), None);
        for text in ["a [FOO]", "a [foo]"] {
            let expected = "the token `[FOO]` is in added_tokens.json, but not in tokenizer.json";
            assert_eq!(error(text).as_deref(), Some(expected), "{text}");
        }
        assert_eq!(error("a [MASK] or foo"), None);
        // transformers reads neither then.
        let with_decoder = map(json!({"added_tokens_decoder": {}}));
        config.files = TokenFiles::read(folder.path(), &with_decoder).unwrap();
        let beside = config.tokens_beside(&tokenizer).unwrap();
        beside.check(&tokenizer, "an <img> [FOO]").unwrap();
        write(ADDED_TOKENS, json!(["[FOO]"]));
        assert!(TokenFiles::read(folder.path(), &Map::new()).is_err(), "a list is no such file");
    }

    /// Seen with transformers 5.23.
    #[test]
    fn a_token_behind_the_normalizer_is_found_in_lower_case_too() {
        let cases = [
            (json!({"added_tokens_decoder": {"9": {"content": "[FOO]", "normalized": true}}}), true),
            (json!({"added_tokens_decoder": {"9": {"content": "[FOO]"}}}), true),
            (json!({"added_tokens_decoder": {"9": {"content": "[FOO]", "special": true}}}), false),
            (
                json!({"added_tokens_decoder": {"9": {"content": "[FOO]", "special": true, "normalized": true}}}),
                true,
            ),
            (json!({"additional_special_tokens": ["[FOO]"]}), false),
            (json!({"extra_special_tokens": [{"content": "[FOO]", "normalized": true}]}), true),
            (json!({"mask_token": {"content": "[FOO]"}}), false),
        ];
        for (keys, is_normalized) in cases {
            let what = keys.to_string();
            let config = config("bert", keys);
            let tokenizer = tokenizer("tiny-mean", true, &config);
            let beside = config.tokens_beside(&tokenizer).unwrap();
            assert!(beside.check(&tokenizer, "a [FOO]").is_err(), "{what}");
            assert_eq!(beside.check(&tokenizer, "a [foo]").is_err(), is_normalized, "{what}");
            beside.check(&tokenizer, "a foo").expect(&what);
        }
    }
}
