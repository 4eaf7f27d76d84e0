//! Tokenises long texts piece by piece, so that a text of many megabytes takes memory and time only for the tokens that are kept.
//!
//! For BERT's own tokenizer alone. Its normalizer maps every character by itself; only the order of combining marks depends on
//! neighbours, and those that would differ are removed. Its pre-tokenizer drops spaces and cuts at every space and punctuation
//! mark, and WordPiece knows no word of more than `max_input_chars_per_word` characters. Hence three rules, which change no token:
//!
//! 1. Before a space, a punctuation mark or an ideograph a text may be cut in two, unless an added token (`[SEP]`) reaches across.
//! 2. A word that is certainly too long is the unknown token whatever follows in it: the rest of it is left out.
//! 3. Repetitions without a trace are left out: spaces after a space, and characters that the normalizer removes.
//!
//! The model's own normalizer and pre-tokenizer decide what a character becomes; nothing is listed here.

use std::collections::{HashMap, HashSet};
use std::iter::Peekable;
use std::str::CharIndices;

use tokenizers::normalizers::{BertNormalizer, Lowercase};
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    AddedToken, ModelWrapper, NormalizedString, Normalizer as _, NormalizerWrapper, OffsetReferential,
    OffsetType, PreTokenizedString, PreTokenizer as _, PreTokenizerWrapper, Tokenizer,
};

/// Characters beyond ASCII whose kinds are remembered while a text is read: more than any script has, and little memory.
const KINDS_MAX: usize = 8192;

/// What a character becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Nothing but space.
    Space,
    /// It ends a word, and makes a token or begins one.
    Boundary,
    /// So many characters of a word.
    Word(usize),
    /// Nothing: the normalizer removes it before it looks at its neighbours.
    Nothing,
    /// Nothing: the normalizer removes it when it strips accents.
    Accent,
}

/// BERT's normalizer, and what sentence-transformers puts before it.
#[derive(Clone, Copy)]
struct Normalizer {
    lowercase_first: bool,
    bert: BertNormalizer,
}

/// How long texts are read for one tokenizer.
pub(super) struct LongText {
    normalizer: Normalizer,
    /// The longest word that WordPiece looks up, in normalized characters.
    word_chars_max: usize,
    ascii: [Kind; 128],
    /// Texts that are tokens as they stand, and must not be cut in two.
    whole: Vec<String>,
}

impl LongText {
    /// The rules for a tokenizer; `None` if they do not hold for it. Each added token must be printable ASCII, no longer than a
    /// word may be, begin and end with punctuation, and match the text itself (not its normal form), also inside words. So nothing
    /// that is left out can be part of an added token, or make one. A token that takes the spaces beside it (MPNet's `<mask>`)
    /// takes only what makes no token.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let normalizer = Normalizer::of(tokenizer.get_normalizer()?)?;
        let Some(PreTokenizerWrapper::BertPreTokenizer(_)) = tokenizer.get_pre_tokenizer() else {
            return None;
        };
        let ModelWrapper::WordPiece(model) = tokenizer.get_model() else { return None };
        let word_chars_max = model.max_input_chars_per_word;
        let added = tokenizer.get_added_tokens_decoder();
        let is_plain = |token: &AddedToken| {
            let is_exact = !token.single_word && !token.normalized;
            let is_punctuation = |c: Option<char>| c.is_some_and(|c| c.is_ascii_punctuation());
            let mut chars = token.content.chars();
            let is_enclosed = is_punctuation(chars.next()) && is_punctuation(chars.next_back());
            is_exact
                && is_enclosed
                && token.content.chars().all(|c| c.is_ascii_graphic())
                && token.content.len() <= word_chars_max
        };
        if !added.values().all(is_plain) {
            return None;
        }
        let ascii = std::array::from_fn(|c| kind_of(normalizer, c as u8 as char));
        let whole = added.into_values().map(|token| token.content).collect();
        Some(Self { normalizer, word_chars_max, ascii, whole })
    }

    /// A text in pieces of about so many bytes. The tokens of all pieces, one after the other, are those of the text.
    pub fn pieces<'a>(&'a self, text: &'a str, bytes: usize) -> Pieces<'a> {
        Pieces { of: self, text, bytes, chars: text.char_indices().peekable(), kinds: HashMap::new() }
    }

    /// Whether a cut here would go through an added token.
    fn halves_a_token(&self, text: &str, at: usize) -> bool {
        let (before, after) = text.as_bytes().split_at(at);
        self.whole.iter().map(String::as_bytes).any(|token| {
            (1..token.len()).any(|head| before.ends_with(&token[..head]) && after.starts_with(&token[head..]))
        })
    }
}

/// The pieces of a text, without what changes no token.
pub(super) struct Pieces<'a> {
    of: &'a LongText,
    text: &'a str,
    bytes: usize,
    chars: Peekable<CharIndices<'a>>,
    kinds: HashMap<char, Kind>,
}

impl Pieces<'_> {
    fn kind(&mut self, c: char) -> Kind {
        if let Some(kind) = self.of.ascii.get(c as usize) {
            return *kind;
        }
        if self.kinds.len() >= KINDS_MAX {
            self.kinds.clear();
        }
        *self.kinds.entry(c).or_insert_with(|| kind_of(self.of.normalizer, c))
    }
}

impl Iterator for Pieces<'_> {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        self.chars.peek()?;
        let mut piece = String::with_capacity(self.bytes);
        // Normalized characters of the word so far.
        let mut word = 0;
        let mut after_space = false;
        // Characters without a trace since the last one that leaves one. One of each accent is kept, because the order of the marks
        // that stay may depend on it.
        let mut accents = HashSet::new();
        let mut after_nothing = false;
        while let Some((at, c)) = self.chars.peek().copied() {
            let kind = self.kind(c);
            let is_too_long = word > self.of.word_chars_max;
            match kind {
                Kind::Space | Kind::Boundary => {
                    if piece.len() >= self.bytes && !self.of.halves_a_token(self.text, at) {
                        break;
                    }
                    if kind == Kind::Boundary || !after_space {
                        piece.push(c);
                    }
                    (word, after_space) = (0, kind == Kind::Space);
                }
                Kind::Word(chars) if !is_too_long => {
                    piece.push(c);
                    word += chars;
                    after_space = false;
                }
                Kind::Nothing if !(is_too_long || after_space || after_nothing) => piece.push(c),
                Kind::Accent if !(is_too_long || after_space || accents.contains(&c)) => piece.push(c),
                Kind::Word(_) | Kind::Nothing | Kind::Accent => {}
            }
            match kind {
                Kind::Nothing => after_nothing = true,
                Kind::Accent => drop(accents.insert(c)),
                Kind::Space | Kind::Boundary | Kind::Word(_) => {
                    after_nothing = false;
                    accents.clear();
                }
            }
            self.chars.next();
        }
        Some(piece)
    }
}

impl Normalizer {
    /// `None` if it is another one.
    fn of(normalizer: &NormalizerWrapper) -> Option<Self> {
        match normalizer {
            NormalizerWrapper::BertNormalizer(bert) => Some(Self { lowercase_first: false, bert: *bert }),
            NormalizerWrapper::Sequence(all) => match all.as_ref() {
                [NormalizerWrapper::Lowercase(_), NormalizerWrapper::BertNormalizer(bert)] => {
                    Some(Self { lowercase_first: true, bert: *bert })
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// The same, but it only removes characters.
    fn cleaning(self) -> Self {
        Self { bert: BertNormalizer::new(self.bert.clean_text, false, Some(false), false), ..self }
    }

    fn normalized(self, c: char) -> String {
        let mut text = NormalizedString::from(c.to_string());
        let first = if self.lowercase_first { Lowercase.normalize(&mut text) } else { Ok(()) };
        match first.and_then(|()| self.bert.normalize(&mut text)) {
            Ok(()) => text.get().to_owned(),
            // These normalizers never fail. A punctuation mark is never left out.
            Err(_) => ".".to_owned(),
        }
    }
}

/// What the normalizer makes of a character, and the pre-tokenizer of that.
fn kind_of(normalizer: Normalizer, c: char) -> Kind {
    let text = normalizer.normalized(c);
    if text.is_empty() {
        return if normalizer.cleaning().normalized(c).is_empty() { Kind::Nothing } else { Kind::Accent };
    }
    match &words(&format!("x{text}x"))[..] {
        [_] => Kind::Word(text.chars().count()),
        [x, y] if x == "x" && y == "x" => Kind::Space,
        _ => Kind::Boundary,
    }
}

/// The words and punctuation marks of a normalized text.
fn words(text: &str) -> Vec<String> {
    let mut text = PreTokenizedString::from(text);
    if BertPreTokenizer.pre_tokenize(&mut text).is_err() {
        // The pre-tokenizer never fails. A text without words counts as a boundary, which is never left out.
        return Vec::new();
    }
    let splits = text.get_splits(OffsetReferential::Normalized, OffsetType::None);
    splits.into_iter().map(|(word, ..)| word.to_owned()).collect()
}

#[cfg(test)]
#[path = "long_text_tests.rs"]
pub(super) mod tests;
