//! What a tokenizer's files say of tokens that are found in texts as they stand: `tokenizer_config.json`, older files, and
//! `tokenizer.json`. The steps are those of transformers 5.23, in its order.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::LoadError;
use super::config::optional;

/// Older files that name tokens. transformers reads them if `tokenizer_config.json` has no [`DECODER`].
pub(super) const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
pub(super) const ADDED_TOKENS: &str = "added_tokens.json";

pub(super) const TOKEN_FILES: [&str; 2] = [SPECIAL_TOKENS_MAP, ADDED_TOKENS];

/// The key with all added tokens, by their ids.
pub(super) const DECODER: &str = "added_tokens_decoder";

/// Keys with several tokens, in a list or by their names. Other keys name one, and end in [`SUFFIX`].
pub(super) const ADDITIONAL: &str = "additional_special_tokens";
pub(super) const EXTRA: &str = "extra_special_tokens";
const OF_MODEL: &str = "model_specific_special_tokens";
const SUFFIX: &str = "_token";

/// The tokens that every class knows by name, in the order in which transformers adds them.
pub(super) const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Marks an object that is a token with flags.
const TYPE: &str = "__type";
const TOKEN_TYPE: &str = "AddedToken";

/// The content of the older files.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenFiles {
    pub special: Map<String, Value>,
    added: BTreeMap<String, u32>,
}

impl TokenFiles {
    /// Those of a folder with this `tokenizer_config.json`, if they count. `kwargs` override the keys of the first one.
    ///
    /// # Errors
    /// A file is there and malformed.
    pub fn read(
        folder: &Path,
        tokenizer_config: &Map<String, Value>,
        kwargs: &Map<String, Value>,
    ) -> Result<Self, LoadError> {
        if tokenizer_config.contains_key(DECODER) || kwargs.contains_key(DECODER) {
            return Ok(Self::default());
        }
        let special: Option<Map<String, Value>> = optional(&folder.join(SPECIAL_TOKENS_MAP))?;
        let counts = |key: &String| !kwargs.get(key).is_some_and(is_something);
        Ok(Self {
            special: special.into_iter().flatten().filter(|(key, _)| counts(key)).collect(),
            added: optional(&folder.join(ADDED_TOKENS))?.unwrap_or_default(),
        })
    }
}

/// A token of `added_tokens` in `tokenizer.json`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct FileToken {
    id: u32,
    #[serde(flatten)]
    token: Flagged,
}

/// A token with flags.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Flagged {
    pub content: String,
    pub single_word: bool,
    pub lstrip: bool,
    pub rstrip: bool,
    /// By default special tokens are not.
    pub normalized: Option<bool>,
    pub special: bool,
}

/// What follows from other flags counts as if it were given, as in the library.
impl PartialEq for Flagged {
    fn eq(&self, other: &Self) -> bool {
        self.added() == other.added()
    }
}

impl Flagged {
    pub fn added(&self) -> AddedToken {
        AddedToken {
            content: self.content.clone(),
            single_word: self.single_word,
            lstrip: self.lstrip,
            rstrip: self.rstrip,
            normalized: self.normalized.unwrap_or(!self.special),
            special: self.special,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Named {
    Bare(String),
    Flagged(Flagged),
}

impl Named {
    pub fn content(&self) -> &str {
        match self {
            Self::Bare(content) => content,
            Self::Flagged(token) => &token.content,
        }
    }

    /// `None` if there is no token.
    pub fn read(key: &str, value: &Value) -> Result<Option<Self>, String> {
        match value {
            Value::Null => Ok(None),
            Value::String(content) => Ok(Some(Self::Bare(content.clone()))),
            Value::Object(_) if is_flagged(value) => Ok(Some(Self::Flagged(flagged(key, value)?))),
            _ => Err(format!(
                "{key} has {value}, which transformers does not take: a token is a text, or an object with `\"__type\": \"AddedToken\"`"
            )),
        }
    }

    pub fn read_all(key: &str, value: Option<&Value>) -> Result<Vec<Self>, String> {
        match value {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(all)) => {
                all.iter().filter_map(|one| Self::read(key, one).transpose()).collect()
            }
            Some(other) => Err(format!("{key} has {other}, and no list of tokens")),
        }
    }
}

/// Python's truth of a value.
fn is_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(is_true) => *is_true,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(all) => !all.is_empty(),
        Value::Object(all) => !all.is_empty(),
    }
}

fn is_flagged(value: &Value) -> bool {
    value.get(TYPE).is_some_and(|kind| kind == TOKEN_TYPE)
}

fn flagged(key: &str, value: &Value) -> Result<Flagged, String> {
    Flagged::deserialize(value).map_err(|error| format!("a token of {key}: {error}"))
}

/// The keys of `tokenizer_config.json` that name tokens, as transformers sorts them first.
pub(super) fn keys_of(config: &Map<String, Value>) -> Map<String, Value> {
    let names_tokens = |key: &str| key.ends_with(SUFFIX) || [ADDITIONAL, EXTRA, OF_MODEL].contains(&key);
    let mut keys: Map<String, Value> =
        config.clone().into_iter().filter(|(key, _)| names_tokens(key)).collect();
    if !keys.get(EXTRA).is_some_and(is_something)
        && let Some(all) = keys.remove(ADDITIONAL)
    {
        keys.insert(EXTRA.to_owned(), all);
    }
    let is_own = |key: &String, value: &Value| {
        key.ends_with(SUFFIX) && !NAMES.contains(&key.as_str()) && value.is_string()
    };
    let (mut own, mut keys): (Map<_, _>, Map<_, _>) =
        keys.into_iter().partition(|(key, value)| is_own(key, value));
    if let Some(Value::Object(all)) = keys.get(EXTRA).cloned() {
        keys.remove(EXTRA);
        own.extend(all);
    }
    if !own.is_empty() {
        keys.insert(OF_MODEL.to_owned(), Value::Object(own));
    }
    keys
}

/// Takes the keys of the older file.
pub(super) fn merge(keys: &mut Map<String, Value>, special: &Map<String, Value>) {
    let typed = |value: &Value| match value {
        Value::Object(own) => {
            let mut own = own.clone();
            own.insert(TYPE.to_owned(), TOKEN_TYPE.into());
            own.insert("special".to_owned(), true.into());
            Value::Object(own)
        }
        other => other.clone(),
    };
    for (key, value) in special {
        let value = match value {
            Value::Array(new) if key == EXTRA => {
                let mut all = keys.get(EXTRA).and_then(Value::as_array).cloned().unwrap_or_default();
                for token in new.iter().map(typed) {
                    if !all.contains(&token) {
                        all.push(token);
                    }
                }
                Value::Array(all)
            }
            value if key == EXTRA => value.clone(),
            value => typed(value),
        };
        keys.insert(key.clone(), value);
    }
    if let Some(Value::Object(all)) = keys.get(EXTRA).cloned() {
        keys.remove(EXTRA);
        let own = keys.entry(OF_MODEL).or_insert_with(|| Value::Object(Map::new()));
        if let Value::Object(own) = own {
            own.extend(all);
        }
    }
}

/// The tokens of [`DECODER`], by their ids.
pub(super) fn listed(all: &Value) -> Result<BTreeMap<u32, Flagged>, String> {
    let all = all.as_object().ok_or_else(|| format!("{DECODER} is no object"))?;
    let token = |(id, token): (&String, &Value)| match id.parse() {
        Ok(id) => Ok((id, flagged(DECODER, token)?)),
        Err(_) => Err(format!("{DECODER} has the id `{id}`")),
    };
    all.iter().map(token).collect()
}

/// Where there is no [`DECODER`]: the tokens of the older file and of `tokenizer.json`, by their ids.
pub(super) fn older_listed(
    keys: &Map<String, Value>,
    files: &TokenFiles,
    own: Vec<FileToken>,
) -> BTreeMap<u32, Flagged> {
    // An object with flags counts only if it is in the older file.
    let named = |keys: &Map<String, Value>, read: fn(&Value) -> Option<&str>| -> Vec<String> {
        let extra = keys.get(EXTRA).and_then(Value::as_array).into_iter().flatten();
        let all = NAMES.iter().filter_map(|name| keys.get(*name)).chain(extra);
        all.filter_map(read).map(str::to_owned).collect()
    };
    let mut special = named(keys, Value::as_str);
    special.extend(named(&files.special, |value| value.get("content")?.as_str()));
    let older = files.added.iter().map(|(content, id)| {
        let special = special.contains(content);
        (*id, Flagged { content: content.clone(), special, normalized: Some(!special), ..Flagged::default() })
    });
    older.chain(own.into_iter().map(|token| (token.id, token.token))).collect()
}

/// Tokens under names of the model's own.
pub(super) fn of_model(keys: &Map<String, Value>) -> Result<Vec<(String, Named)>, String> {
    let is_own = |key: &str, value: &Value| {
        key.ends_with(SUFFIX) && !NAMES.contains(&key) && (value.is_string() || is_flagged(value))
    };
    let mut all: Vec<(&String, &Value)> = keys.iter().filter(|(key, value)| is_own(key, value)).collect();
    all.extend(keys.get(OF_MODEL).and_then(Value::as_object).into_iter().flatten());
    let token = |(key, value): (&String, &Value)| {
        Named::read(key, value)?.map(|token| (key.clone(), token)).ok_or_else(|| format!("{key} is null"))
    };
    all.into_iter().map(token).collect()
}
