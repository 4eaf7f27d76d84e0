//! The tokens that are looked for in texts as they stand, as transformers' class has them. It takes them from `tokenizer.json`, or from
//! `added_tokens_decoder` of `tokenizer_config.json` if that is there, and adds those that other keys, older files and the class's
//! defaults name. The steps are those of transformers 5.23, in its order, because ids of new tokens and flags of old ones depend on it.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};
use tokenizers::{AddedToken, AddedVocabulary, Model as _, Tokenizer};

use super::token_keys::{
    ADDITIONAL, DECODER, EXTRA, FileToken, Flagged, NAMES, Named, TokenFiles, keys_of, listed, merge,
    of_model, older_listed,
};
use super::tokenizer_class::Class;

/// The tokens of one tokenizer.
#[derive(Debug)]
pub(super) struct ClassTokens {
    class: Class,
    /// Those with ids, in their order.
    listed: Vec<Flagged>,
    /// Those that keys name.
    named: Vec<(String, Named)>,
    extra: Vec<Named>,
}

impl ClassTokens {
    /// Those of transformers' class, the keys of `tokenizer_config.json`, the older files, and `tokenizer.json`.
    ///
    /// # Errors
    /// Names what transformers would not take either.
    pub fn of(
        class: Class,
        config: &Map<String, Value>,
        files: &TokenFiles,
        own: Vec<FileToken>,
    ) -> Result<Self, String> {
        let mut keys = keys_of(config);
        let listed = match config.get(DECODER) {
            Some(all) => listed(all)?,
            None => {
                merge(&mut keys, &files.special);
                older_listed(&keys, files, own)
            }
        };
        let flags: HashMap<&str, &Flagged> =
            listed.values().map(|token| (token.content.as_str(), token)).collect();
        let mut named = Vec::new();
        for name in NAMES {
            let token = match keys.get(name) {
                Some(value) => Named::read(name, value)?.map(|token| match flags.get(token.content()) {
                    Some(with_flags) => Named::Flagged((*with_flags).clone()),
                    None => token,
                }),
                None => class.default_token(name).map(|content| Named::Bare(content.to_owned())),
            };
            named.extend(token.map(|token| (name.to_owned(), of_class(class, name, token))));
        }
        for (key, token) in of_model(&keys)? {
            match named.iter_mut().find(|(name, _)| *name == key) {
                Some((_, known)) => *known = token,
                None => named.push((key, token)),
            }
        }
        Ok(Self { extra: extra(class, &keys)?, listed: listed.into_values().collect(), class, named })
    }

    /// Whether these make the same tokenizer.
    pub fn same_as(&self, other: &Self) -> bool {
        let named = |all: &Self| -> Vec<(String, String)> {
            all.named.iter().map(|(key, token)| (key.clone(), token.content().to_owned())).collect()
        };
        let new = |all: &Self| -> Vec<Named> {
            let tokens = all.named.iter().map(|(_, token)| token).chain(&all.extra);
            let is_listed = |token: &&Named| all.listed.iter().any(|known| known.content == token.content());
            tokens.filter(|token| !is_listed(token)).cloned().collect()
        };
        self.listed == other.listed && named(self) == named(other) && new(self) == new(other)
    }

    /// The token that a key names, which the class needs.
    ///
    /// # Errors
    /// There is none.
    pub fn needed(&self, name: &str) -> Result<&str, String> {
        let found = self.named.iter().find(|(key, _)| key == name);
        found
            .map(|(_, token)| token.content())
            .ok_or_else(|| format!("the class {} needs a `{name}`, but it is `null`", self.class))
    }

    /// Gives the tokens to a tokenizer whose other parts, but for the post-processor, are the class's already.
    ///
    /// `embeddings`: how many tokens the model has embeddings of.
    ///
    /// # Errors
    /// Ids of those would depend on their order in the file.
    pub fn give_to(&self, tokenizer: &mut Tokenizer, embeddings: usize) -> Result<(), String> {
        let mut of_file: Vec<(u32, AddedToken)> = match self.class {
            Class::AsFile => tokenizer.get_added_tokens_decoder().into_iter().collect(),
            _ => Vec::new(),
        };
        of_file.sort_unstable_by_key(|(id, _)| *id);
        let of_file: Vec<AddedToken> = of_file.into_iter().map(|(_, token)| token).collect();
        let new = self.not_in(&of_file);
        let of_model = self.without_order(tokenizer, &new);
        let added = self.added(&new);
        // The class of Qwen adds them once more.
        let again = if self.class == Class::Qwen2 { self.all_special() } else { Vec::new() };
        tokenizer.with_added_vocabulary(AddedVocabulary::new());
        tokenizer.add_tokens(&last_of_each(of_file.into_iter().chain(added).chain(again)));
        let has_embedding =
            |token: &&str| tokenizer.token_to_id(token).is_some_and(|id| (id as usize) < embeddings);
        if of_model.len() > 1 && of_model.iter().any(has_embedding) {
            return Err(format!(
                "it does not have the tokens {}, which other files name; {SAVE}",
                of_model.join(", ")
            ));
        }
        Ok(())
    }

    /// Tokens that are neither in the file nor listed with ids.
    fn not_in(&self, of_file: &[AddedToken]) -> Vec<&Named> {
        let mut known: HashSet<&str> = of_file.iter().map(|token| token.content.as_str()).collect();
        known.extend(self.listed.iter().map(|token| token.content.as_str()));
        let mut new: Vec<&Named> = Vec::new();
        for token in self.named.iter().map(|(_, token)| token).chain(&self.extra) {
            if !known.contains(token.content()) && !new.contains(&token) {
                new.push(token);
            }
        }
        new
    }

    /// What transformers adds to the tokens of the file.
    fn added(&self, new: &[&Named]) -> Vec<AddedToken> {
        let names: HashSet<&str> = self.named.iter().map(|(_, token)| token.content()).collect();
        let listed = self.listed.iter().cloned().map(Named::Flagged);
        let added = listed.chain(new.iter().copied().cloned()).map(|token| match token {
            Named::Bare(content) => AddedToken::from(content, true),
            Named::Flagged(mut token) => {
                token.special |= names.contains(token.content.as_str());
                token.added()
            }
        });
        added.collect()
    }

    /// New tokens under the model's own names. transformers numbers them in the order of the file, which is lost here.
    fn without_order(&self, tokenizer: &Tokenizer, new: &[&Named]) -> Vec<&str> {
        let of_model = self.named.iter().filter(|(name, _)| !NAMES.contains(&name.as_str()));
        let of_model = of_model.map(|(_, token)| token).filter(|token| new.contains(token));
        let is_unknown = |content: &&str| tokenizer.get_model().token_to_id(content).is_none();
        let mut contents: Vec<&str> = of_model.map(Named::content).filter(is_unknown).collect();
        contents.dedup();
        contents
    }

    fn all_special(&self) -> Vec<AddedToken> {
        let mut seen = HashSet::new();
        let all = self.named.iter().map(|(_, token)| token).chain(&self.extra).map(Named::content);
        all.filter(|content| seen.insert(*content)).map(|content| AddedToken::from(content, true)).collect()
    }
}

/// Each token once, in the place of its first version, with the flags of the last one. The library that transformers 5.23 uses (tokenizers
/// 0.23) does so; the one here would mix the flags.
fn last_of_each(tokens: impl Iterator<Item = AddedToken>) -> Vec<AddedToken> {
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut all: Vec<AddedToken> = Vec::new();
    for token in tokens {
        match places.get(&token.content) {
            Some(at) => all[*at] = token,
            None => {
                places.insert(token.content.clone(), all.len());
                all.push(token);
            }
        }
    }
    all
}

/// What to do with files that do not say all.
pub(super) const SAVE: &str = "save the tokenizer once, in Python: \
                               `AutoTokenizer.from_pretrained(\"FOLDER\").save_pretrained(\"FOLDER\")`";

/// Flags that a class gives a token without flags.
fn of_class(class: Class, name: &str, token: Named) -> Named {
    let is_mask = name == "mask_token";
    match (class, token) {
        (Class::MpNet, Named::Bare(content)) => {
            Named::Flagged(Flagged { content, lstrip: is_mask, ..Flagged::default() })
        }
        (Class::Camembert, Named::Bare(content)) if is_mask => {
            Named::Flagged(Flagged { content, lstrip: true, special: true, ..Flagged::default() })
        }
        (_, token) => token,
    }
}

/// Tokens without names.
fn extra(class: Class, keys: &Map<String, Value>) -> Result<Vec<Named>, String> {
    if keys.contains_key(EXTRA) {
        return Named::read_all(EXTRA, keys.get(EXTRA));
    }
    match keys.get(ADDITIONAL) {
        None | Some(Value::Null) => {
            Ok(class.extra_tokens().iter().map(|content| Named::Bare((*content).to_owned())).collect())
        }
        given => Named::read_all(ADDITIONAL, given),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn new_tokens_without_an_order_are_an_error_if_the_model_has_embeddings_of_them() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-modernbert");
        let keys = json!({"a_token": "<a>", "b_token": "<b>"});
        let give = |keys: &Value, embeddings| {
            let mut tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
            let entries = tokenizer.get_vocab_size(true);
            let keys = keys.as_object().unwrap();
            let tokens = ClassTokens::of(Class::AsFile, keys, &TokenFiles::default(), Vec::new()).unwrap();
            tokens.give_to(&mut tokenizer, entries + embeddings)
        };
        assert_eq!(give(&keys, 0), Ok(()));
        assert_eq!(give(&json!({"a_token": "<a>"}), 1), Ok(()));
        let error = give(&keys, 1).unwrap_err();
        assert!(error.starts_with("it does not have the tokens <a>, <b>, which other files name"), "{error}");
    }
}
