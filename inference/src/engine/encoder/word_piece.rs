//! WordPiece for plain words, which need no knowledge of Unicode: ASCII letters and digits, or one ASCII mark. Other words are left to the
//! `tokenizers` library.
//!
//! For the tokenizers that [`LongText`](super::long_text::LongText) takes, which are BERT's own. The library does little with such a word:
//!
//! - No added token is in it, because each of those begins with a mark, and ends with another.
//! - The normalizer puts letters into lower case, or changes nothing. The pre-tokenizer leaves the word whole.
//! - The model takes the longest token that the word begins with. Of the rest it takes the longest token again, which begins with the
//!   prefix of continued words. If there is none, the whole word is unknown. So is a word that is too long.
//!
//! The vocabulary is the library's own.

use std::borrow::Cow;

use tokenizers::models::wordpiece::WordPiece;
use tokenizers::{Model as _, ModelWrapper, NormalizedString, Normalizer as _, Tokenizer};

/// What plain words need to know of one tokenizer.
pub(super) struct PlainWords {
    unknown: u32,
    /// Bytes of the longest token.
    token_bytes_max: usize,
    is_lowercasing: bool,
}

impl PlainWords {
    /// Those of a tokenizer that `LongText` takes; `None` if its vocabulary has no token for unknown words.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let model = word_piece(tokenizer)?;
        let mut letter = NormalizedString::from("A");
        tokenizer.get_normalizer()?.normalize(&mut letter).ok()?;
        Some(Self {
            unknown: model.token_to_id(&model.unk_token)?,
            token_bytes_max: model.get_vocab().keys().map(String::len).max()?,
            is_lowercasing: letter.get() == "a",
        })
    }

    /// Appends the tokens of a plain word to `content`. Returns whether the word is one.
    pub fn add_tokens(&self, tokenizer: &Tokenizer, word: &str, content: &mut Vec<u32>) -> bool {
        let Some(model) = word_piece(tokenizer).filter(|_| is_plain(word)) else { return false };
        let before = content.len();
        if self.add_known(model, word, content).is_none() {
            content.truncate(before);
            content.push(self.unknown);
        }
        true
    }

    /// `None` if the word is unknown. Some tokens may be appended then.
    fn add_known(&self, model: &WordPiece, word: &str, content: &mut Vec<u32>) -> Option<()> {
        if word.len() > model.max_input_chars_per_word {
            return None;
        }
        let is_changed = self.is_lowercasing && word.bytes().any(|byte| byte.is_ascii_uppercase());
        // From the second token on: the prefix, and the rest of the word.
        let mut rest = if is_changed { Cow::Owned(word.to_ascii_lowercase()) } else { Cow::Borrowed(word) };
        let mut prefix = "";
        loop {
            let end_max = rest.len().min(self.token_bytes_max);
            let token = |end: usize| Some((end, model.token_to_id(&rest[..end])?));
            let (end, id) = (prefix.len() + 1..=end_max).rev().find_map(token)?;
            content.push(id);
            if end == rest.len() {
                return Some(());
            }
            prefix = &model.continuing_subword_prefix;
            rest.to_mut().replace_range(..end, prefix);
        }
    }
}

fn word_piece(tokenizer: &Tokenizer) -> Option<&WordPiece> {
    match tokenizer.get_model() {
        ModelWrapper::WordPiece(model) => Some(model),
        _ => None,
    }
}

fn is_plain(word: &str) -> bool {
    match word.as_bytes() {
        [] => false,
        [mark] if mark.is_ascii_punctuation() => true,
        bytes => bytes.iter().all(u8::is_ascii_alphanumeric),
    }
}

#[cfg(test)]
#[path = "word_piece_tests.rs"]
mod tests;
