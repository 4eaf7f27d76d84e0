//! Cuts texts into words, and remembers the tokens of words, so that a word that comes again is not normalized and split again.
//!
//! For the tokenizers that [`LongText`](super::long_text::LongText) takes, which are BERT's own. A text is cut at spaces, and
//! around each ASCII punctuation mark that is in no added token. The tokens of the parts in order are those of the text, because no
//! step looks across such a place:
//!
//! - The normalizer maps every character by itself, but for the order of combining marks, and no space or ASCII mark is one of those.
//! - The pre-tokenizer drops spaces, and makes a word of each punctuation mark. WordPiece looks at one word at a time.
//! - No added token has a space in it, or one of these marks.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use tokenizers::Tokenizer;

/// Words that are remembered: more than a language has in common use, in about 4 MiB.
const WORDS_MAX: usize = 32_768;

/// The longest word that is remembered. Longer ones are texts without spaces, such as Chinese ones, which hardly come again.
const WORD_BYTES_MAX: usize = 32;

/// Parts of the cache, each with its own lock, so that threads rarely wait for each other.
const SHARDS: usize = 64;

/// What separates words. Other spaces are left to the library.
const SPACES: [char; 4] = [' ', '\t', '\n', '\r'];

type Shard = RwLock<HashMap<Box<str>, Box<[u32]>>>;

/// The words of one tokenizer. Shared by all threads.
pub(super) struct WordCache {
    shards: [Shard; SHARDS],
    /// Bytes that are a word of their own.
    marks: [bool; 256],
    /// Bytes that end a word.
    ends: [bool; 256],
}

impl WordCache {
    /// An empty one, for a tokenizer that `LongText` takes.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let added = tokenizer.get_added_tokens_decoder();
        let is_free = |mark: char| !added.values().any(|token| token.content.contains(mark));
        let is_mark = |byte: u8| byte.is_ascii_punctuation() && is_free(byte.into());
        let marks: [bool; 256] = std::array::from_fn(|byte| is_mark(byte as u8));
        let is_space = |byte: u8| SPACES.contains(&byte.into());
        let ends = std::array::from_fn(|byte| marks[byte] || is_space(byte as u8));
        Self { shards: std::array::from_fn(|_| Shard::default()), marks, ends }
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().unwrap().len()).sum()
    }

    /// The words of a text, in order.
    pub fn words<'a>(&'a self, text: &'a str) -> impl Iterator<Item = &'a str> {
        let mut rest = text;
        std::iter::from_fn(move || {
            rest = rest.trim_start_matches(SPACES);
            if rest.is_empty() {
                return None;
            }
            let (word, behind) = self.first_word(rest);
            rest = behind;
            Some(word)
        })
    }

    /// The first word of a text that begins with one, and what is behind it.
    fn first_word<'a>(&self, text: &'a str) -> (&'a str, &'a str) {
        let mut bytes = text.bytes();
        if bytes.next().is_some_and(|first| self.marks[usize::from(first)]) {
            return text.split_at(1);
        }
        let end = bytes.position(|byte| self.ends[usize::from(byte)]);
        text.split_at(end.map_or(text.len(), |behind_first| behind_first + 1))
    }

    /// Appends the tokens of a word to `content`. `encode` makes them if the word is not remembered.
    ///
    /// # Errors
    /// Those of `encode`.
    pub fn add_tokens(
        &self,
        word: &str,
        content: &mut Vec<u32>,
        encode: impl Fn(&str) -> Result<Vec<u32>, String>,
    ) -> Result<(), String> {
        if word.len() > WORD_BYTES_MAX {
            content.extend(encode(word)?);
            return Ok(());
        }
        let shard = &self.shards[shard_of(word)];
        if let Some(ids) = shard.read().unwrap_or_else(PoisonError::into_inner).get(word) {
            content.extend_from_slice(ids);
            return Ok(());
        }
        let ids = encode(word)?;
        content.extend_from_slice(&ids);
        let mut words = shard.write().unwrap_or_else(PoisonError::into_inner);
        // All words of the part, because that needs no order of use. Common words are back after a few texts.
        if words.len() >= WORDS_MAX / SHARDS {
            words.clear();
        }
        words.insert(word.into(), ids.into());
        Ok(())
    }
}

fn shard_of(word: &str) -> usize {
    word.bytes().fold(word.len(), |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into())) % SHARDS
}

#[cfg(test)]
#[path = "word_cache_tests.rs"]
mod tests;
