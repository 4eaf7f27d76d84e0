//! Finds where a long text can be cut so that the tokens before the cut are those of the whole text: for BPE and Unigram.
//!
//! Both models have a property in common: if no token reaches across a place, the text before it has the same tokens as if nothing
//! followed. BPE merges neighbours, so nothing behind such a place takes part in a merge before it. Unigram's best path leads through the
//! place, and is also the best path up to it. So a place is safe if
//!
//! 1. the normalizer makes the same of the text before it, whatever follows,
//! 2. no piece of text around it is a token of the vocabulary or an added token, and
//! 3. the pre-tokenizer's words before it are the same, whatever follows: regular expressions look ahead behind spaces, and take
//!    contractions such as `'re` as a whole.
//!
//! This holds for the normalizers, pre-tokenizers and models that this file lists. Texts of other tokenizers are not cut.

use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{
    AddedToken, Model as _, ModelWrapper, NormalizedString, Normalizer as _, NormalizerWrapper,
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, PreTokenizerWrapper, Tokenizer,
};

/// Places of a kind that one search looks at. A place takes as many look-ups as the square of the longest token's characters at most.
const PLACES_MAX: usize = 64;

/// Regular expressions that the third rule was made for: Llama 3's and Qwen's. `ByteLevel` has GPT-2's built in.
const REGEXES: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    QWEN,
];
/// Qwen's, which its class in transformers has, too.
pub(super) const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// How the texts of one tokenizer are cut.
pub(super) struct SafeSplit {
    /// Characters of the longest token, as the vocabulary writes it.
    token_chars_max: usize,
    words: Words,
    /// Tokens that are looked for in the text itself, and those that are looked for in the normalized text.
    added: Vec<Added>,
    added_normalized: Vec<Added>,
}

/// A text that is a token as it stands.
struct Added {
    content: String,
    single_word: bool,
}

/// What the pre-tokenizer does.
#[derive(Default)]
struct Words {
    has_regex: bool,
    /// Writes each byte as a character.
    is_byte_level: bool,
    /// Writes a space as this character.
    space: Option<char>,
    /// Words begin behind whitespace of every kind, which all become that character.
    splits_whitespace: bool,
}

impl SafeSplit {
    /// `None` if the rules do not hold for the tokenizer.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let mut words = Words::default();
        let is_known = is_exact(tokenizer.get_model())
            && tokenizer.get_normalizer().is_none_or(is_local)
            && tokenizer.get_pre_tokenizer().is_none_or(|pre_tokenizer| words.read(pre_tokenizer));
        if !is_known {
            return None;
        }
        let (normalized, raw): (Vec<AddedToken>, Vec<AddedToken>) =
            tokenizer.get_added_tokens_decoder().into_values().partition(|token| token.normalized);
        let added = |token: AddedToken| Added { content: token.content, single_word: token.single_word };
        let added_normalized = normalized.into_iter().map(|token| {
            let content = normal_form(tokenizer, &token.content)?;
            Some(added(AddedToken { content, ..token }))
        });
        let added_normalized: Vec<Added> = added_normalized.collect::<Option<_>>()?;
        let added: Vec<Added> = raw.into_iter().map(added).collect();
        let vocabulary = tokenizer.get_vocab(false);
        let all = vocabulary.keys().chain(added.iter().chain(&added_normalized).map(|added| &added.content));
        let token_chars_max = all.map(|token| token.chars().count()).max()?;
        Some(Self { token_chars_max, words, added, added_normalized })
    }

    /// A safe place in the second half of the first `limit` bytes of a longer text: at the end of a word if possible. `None` if
    /// none was found.
    pub fn find(&self, tokenizer: &Tokenizer, text: &str, limit: usize) -> Option<usize> {
        let places = || (limit / 2..=limit).rev().filter(move |at: &usize| text.is_char_boundary(*at));
        let is_safe = |at: &usize| self.is_safe(tokenizer, text, *at);
        let mut ends = places().filter(|at| {
            let is_space = |c: Option<char>| c.is_some_and(char::is_whitespace);
            is_space(text[*at..].chars().next()) && !is_space(text[..*at].chars().next_back())
        });
        ends.by_ref().take(PLACES_MAX).find(is_safe).or_else(|| places().take(PLACES_MAX).find(is_safe))
    }

    fn is_safe(&self, tokenizer: &Tokenizer, text: &str, at: usize) -> bool {
        // Twice the longest token, because a normalizer may shorten the text.
        let (before, after) = (last_chars(&text[..at], 2 * self.token_chars_max), &text[at..]);
        let after = first_chars(after, 2 * self.token_chars_max);
        // Spaces belong to the text behind them, or to an added token there. A mark belongs to a character that may be far before
        // it.
        let ends_in_space = before.ends_with(char::is_whitespace);
        if ends_in_space
            || after.chars().next().is_some_and(is_mark)
            || self.added.iter().any(|added| added.is_halved(before, after))
        {
            return false;
        }
        // The normalizer and later steps get the text between two added tokens. What looks like an added token may be part of
        // another one, so the text before it is checked too.
        let section = behind_last(&self.added, before);
        let is_begin = section.len() < before.len() || before.len() == at;
        if section.len() < before.len() && !self.is_untouched(tokenizer, before, after) {
            return false;
        }
        let Some((normal, follows)) = parts(tokenizer, section, after) else { return false };
        if self.added_normalized.iter().any(|added| added.is_halved(&normal, &follows)) {
            return false;
        }
        let words = behind_last(&self.added_normalized, &normal);
        if words.is_empty() {
            return section.is_empty() || !normal.is_empty();
        }
        let is_begin = is_begin || words.len() < normal.len();
        let shows_all = |part: &str, is_whole: bool| is_whole || part.chars().count() >= self.token_chars_max;
        shows_all(words, is_begin)
            && shows_all(&follows, at + after.len() == text.len())
            && self.words.may_end(words, &follows)
            && !self.token_reaches_across(tokenizer, &normal, &follows, false)
            && !self.token_reaches_across(tokenizer, words, &follows, is_begin)
    }

    /// Whether no token reaches from `before` into `after`, wherever words begin.
    fn is_untouched(&self, tokenizer: &Tokenizer, before: &str, after: &str) -> bool {
        parts(tokenizer, before, after)
            .is_some_and(|(normal, follows)| !self.token_reaches_across(tokenizer, &normal, &follows, false))
    }

    /// Whether a piece of text around the place between two parts is a token. At the begin of a text or behind an added token
    /// the pre-tokenizer may put a space before the first part.
    fn token_reaches_across(&self, tokenizer: &Tokenizer, before: &str, after: &str, is_begin: bool) -> bool {
        let begin = if is_begin { " " } else { "" };
        let before = self.words.in_vocabulary(&format!("{begin}{before}"));
        let after = self.words.in_vocabulary(after);
        let place = before.len();
        let around = before + &after;
        let ends = |from: usize| {
            let ends = around[place..].char_indices().map(move |(at, c)| place + at + c.len_utf8());
            ends.take(self.token_chars_max.saturating_sub(from))
        };
        let starts = around[..place].char_indices().rev().map(|(at, _)| at);
        starts.take(self.token_chars_max).enumerate().any(|(chars, start)| {
            ends(chars + 1).any(|end| tokenizer.get_model().token_to_id(&around[start..end]).is_some())
        })
    }
}

impl Added {
    /// Whether the place between two parts of a text is inside the token, or what follows decides whether it is one.
    fn is_halved(&self, before: &str, after: &str) -> bool {
        let content = &self.content;
        let mut places = content.char_indices().map(|(at, _)| at).skip(1);
        places.any(|at| before.ends_with(&content[..at]) && after.starts_with(&content[at..]))
            || self.single_word && before.ends_with(content.as_str())
    }
}

/// Whether a character is combined with one before it (its canonical combining class is not 0): normalizers sort such marks by their
/// classes, of which U+0334 has the lowest.
fn is_mark(c: char) -> bool {
    const LOWEST: char = '\u{334}';
    const HIGH: char = '\u{301}';
    let decomposed = |text: String| NormalizedString::from(text).nfd().get().to_owned();
    let Some(c) = decomposed(c.to_string()).chars().next() else { return false };
    matches!(c, LOWEST | HIGH)
        || decomposed(format!("{HIGH}{c}")).starts_with(c)
        || decomposed(format!("{c}{LOWEST}")).starts_with(LOWEST)
}

/// What is behind the last added token of a text.
fn behind_last<'a>(added: &[Added], text: &'a str) -> &'a str {
    let ends = added.iter().filter_map(|added| Some(text.rfind(&added.content)? + added.content.len()));
    &text[ends.max().unwrap_or(0)..]
}

impl Words {
    /// Records what a pre-tokenizer does; `false` if it is not one of the known ones.
    fn read(&mut self, pre_tokenizer: &PreTokenizerWrapper) -> bool {
        match pre_tokenizer {
            PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().all(|one| self.read(one)),
            PreTokenizerWrapper::ByteLevel(bytes) => {
                self.is_byte_level = true;
                // Behind a regular expression it would put a space before each word, and a token might include that space.
                let is_known = !(bytes.add_prefix_space && self.has_regex);
                self.has_regex |= bytes.use_regex;
                is_known
            }
            PreTokenizerWrapper::Metaspace(metaspace) => {
                self.space = Some(metaspace.get_replacement());
                true
            }
            PreTokenizerWrapper::WhitespaceSplit(_) => {
                self.splits_whitespace = true;
                true
            }
            PreTokenizerWrapper::Split(split) => match &split.pattern {
                SplitPattern::String(delimiter) => delimiter.chars().count() == 1,
                SplitPattern::Regex(regex) => {
                    self.has_regex = true;
                    REGEXES.contains(&regex.as_str())
                }
            },
            _ => false,
        }
    }

    /// Whether the words of the first part are the same, whatever follows. Spaces belong to what follows them. Within a run of three
    /// characters of a kind no regular expression looks ahead, and no contraction is cut.
    fn may_end(&self, before: &str, after: &str) -> bool {
        let mut back = before.chars().rev();
        let (Some(last), Some(next)) = (back.next(), after.chars().next()) else { return false };
        if last.is_whitespace() {
            return false;
        }
        let kind = |c: char| (c.is_whitespace(), c.is_alphabetic(), c.is_numeric());
        let mut is_in_run = || back.next().map(kind) == Some(kind(last)) && kind(last) == kind(next);
        !self.has_regex || next.is_whitespace() || is_in_run()
    }

    /// A normalized text as the vocabulary writes it.
    fn in_vocabulary(&self, text: &str) -> String {
        let text = match self.space {
            Some(space) => {
                let is_space = |c: char| c == ' ' || self.splits_whitespace && c.is_whitespace();
                text.chars().map(|c| if is_space(c) { space } else { c }).collect()
            }
            None => text.to_owned(),
        };
        let mut bytes = PreTokenizedString::from(text.as_str());
        if !self.is_byte_level || ByteLevel::new(false, false, false).pre_tokenize(&mut bytes).is_err() {
            return text;
        }
        let splits = bytes.get_splits(OffsetReferential::Normalized, OffsetType::None);
        splits.into_iter().map(|(split, ..)| split).collect()
    }
}

/// Whether the model has the property above.
fn is_exact(model: &ModelWrapper) -> bool {
    // A character outside the vocabulary becomes all its bytes, or the unknown token. If the vocabulary has only some bytes, the
    // result depends on neighbouring characters.
    let has_bytes = || (0..=255).all(|byte| model.token_to_id(&format!("<0x{byte:02X}>")).is_some());
    match model {
        ModelWrapper::BPE(bpe) => {
            let is_none = |part: &Option<String>| part.as_ref().is_none_or(String::is_empty);
            !bpe.ignore_merges
                && bpe.dropout.is_none_or(|share| share == 0.0)
                && is_none(&bpe.continuing_subword_prefix)
                && is_none(&bpe.end_of_word_suffix)
                && (!bpe.byte_fallback || has_bytes())
        }
        ModelWrapper::Unigram(unigram) => !unigram.byte_fallback() || has_bytes(),
        _ => false,
    }
}

/// Whether the normalizer's result for a character depends only on characters that combine with it, or on runs of spaces.
fn is_local(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().all(is_local),
        NormalizerWrapper::NFC(_)
        | NormalizerWrapper::NFD(_)
        | NormalizerWrapper::NFKC(_)
        | NormalizerWrapper::NFKD(_)
        | NormalizerWrapper::Nmt(_)
        | NormalizerWrapper::Precompiled(_)
        | NormalizerWrapper::Lowercase(_)
        | NormalizerWrapper::StripNormalizer(_)
        | NormalizerWrapper::Prepend(_) => true,
        NormalizerWrapper::Replace(replace) => replaces_spaces(replace),
        _ => false,
    }
}

/// Whether it replaces one character, or runs of spaces.
fn replaces_spaces(replace: &Replace) -> bool {
    // The pattern is private, so it is read from JSON.
    let Ok(replace) = serde_json::to_value(replace) else { return false };
    let pattern = |kind: &str| replace["pattern"][kind].as_str().map(str::to_owned);
    pattern("String").is_some_and(|text| text.chars().count() == 1)
        || pattern("Regex").is_some_and(|regex| regex == " {2,}")
}

/// The normal forms of two parts of a text; `None` if the first one's depends on the second part.
fn parts(tokenizer: &Tokenizer, before: &str, after: &str) -> Option<(String, String)> {
    let normal = normal_form(tokenizer, before)?;
    let whole = normal_form(tokenizer, &format!("{before}{after}"))?;
    let follows = whole.strip_prefix(&normal)?.to_owned();
    Some((normal, follows))
}

/// What the tokenizer's normalizer makes of a text.
fn normal_form(tokenizer: &Tokenizer, text: &str) -> Option<String> {
    let Some(normalizer) = tokenizer.get_normalizer() else { return Some(text.to_owned()) };
    let mut text = NormalizedString::from(text);
    normalizer.normalize(&mut text).ok()?;
    Some(text.get().to_owned())
}

fn last_chars(text: &str, count: usize) -> &str {
    let start = text.char_indices().rev().map(|(at, _)| at).take(count).last();
    &text[start.unwrap_or(text.len())..]
}

fn first_chars(text: &str, count: usize) -> &str {
    text.char_indices().nth(count).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
#[path = "safe_split_tests.rs"]
mod tests;
