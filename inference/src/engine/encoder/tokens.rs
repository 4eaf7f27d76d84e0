//! Texts to token ids, off the runtime: as the model's own tokenizer says, cut to its own length.

use std::borrow::Cow;
use std::path::Path;

use rayon::prelude::*;
use tokenizers::Tokenizer;
use tokenizers::utils::truncation::TruncationDirection;
use vramq_schemas::{EmbeddingFormat, Input, Params};

use crate::engine::{InvalidInput, Item};

use super::LoadError;
use super::config::ModelConfig;
use super::long_text::LongText;

/// A job of fewer texts is tokenised where it is: waking threads costs more than they save.
const TEXTS_FOR_THREADS: usize = 64;

/// Bytes of text for each token that a model takes: about four times what English needs. A longer text is tokenised in pieces of
/// so many, until there are enough tokens.
const BYTES_PER_TOKEN: usize = 16;

/// A model's tokenizer. Shared by all threads.
pub(super) struct Tokens {
    tokenizer: Tokenizer,
    /// Special tokens around every text.
    before: Vec<u32>,
    after: Vec<u32>,
    tokens_max: usize,
    lowercase: bool,
    prompt: String,
    /// How a long text is cut before it is tokenised; `None`: it is not.
    long: Option<LongText>,
    threads: rayon::ThreadPool,
}

impl Tokens {
    /// # Errors
    /// When `tokenizer.json` is missing, malformed, or does not fit the model.
    pub fn load(config: &ModelConfig, threads: usize) -> Result<Self, LoadError> {
        let path = config.transformer.join("tokenizer.json");
        let fault = |reason: String| LoadError::Tokenizer { path: path.clone(), reason };
        let mut tokenizer = open(&path)?;
        if let Some(truncation) = tokenizer.get_truncation()
            && truncation.direction == TruncationDirection::Left
        {
            return Err(fault("it truncates on the left; this engine does on the right".into()));
        }
        // The file's own truncation and padding are those of some training run; the model's length is in its config,
        // and the engine pads nothing. The library would also keep all that it cuts off.
        tokenizer.with_truncation(None).map_err(|e| fault(e.to_string()))?.with_padding(None);
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or_default();
        if largest as usize >= config.dims.vocabulary {
            return Err(fault(format!(
                "it has a token {largest}, but the model only {} embeddings",
                config.dims.vocabulary
            )));
        }
        let (before, after) = special_tokens(&tokenizer).map_err(fault)?;
        if before.len() + after.len() >= config.tokens_max {
            return Err(fault(format!(
                "a length of {} leaves no room beside the special tokens",
                config.tokens_max
            )));
        }
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|at| format!("tokens-{at}"))
            .build()
            .map_err(|e| fault(format!("start threads: {e}")))?;
        Ok(Self {
            long: LongText::of(&tokenizer),
            tokenizer,
            before,
            after,
            tokens_max: config.tokens_max,
            lowercase: config.lowercase,
            prompt: config.prompt.clone(),
            threads,
        })
    }

    /// Whether inputs are text, and parameters known.
    ///
    /// # Errors
    /// Names the first input that is not text.
    pub fn check(inputs: &[Input], params: &Params) -> Result<(), InvalidInput> {
        EmbeddingFormat::from_params(params).map_err(InvalidInput)?;
        inputs.iter().enumerate().try_for_each(|(at, input)| text_of(at, input).map(drop))
    }

    /// Inputs as items, in order.
    ///
    /// # Errors
    /// Names the first input that is not text.
    pub fn items(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        let format = EmbeddingFormat::from_params(params).map_err(InvalidInput)?;
        let item = |(at, input): (usize, &Input)| match self.ids(text_of(at, input)?) {
            Ok(ids) => Ok(Item::Tokens { ids, format }),
            Err(reason) => Err(InvalidInput(format!("inputs[{at}]: {reason}"))),
        };
        if inputs.len() < TEXTS_FOR_THREADS {
            return inputs.iter().enumerate().map(item).collect();
        }
        let items: Vec<_> =
            self.threads.install(|| inputs.par_iter().enumerate().with_min_len(16).map(item).collect());
        items.into_iter().collect()
    }

    /// The ids of one text, special tokens included.
    fn ids(&self, text: &str) -> Result<Box<[u32]>, String> {
        let mut text = if self.prompt.is_empty() {
            Cow::Borrowed(text)
        } else {
            Cow::Owned(format!("{}{text}", self.prompt))
        };
        if self.lowercase {
            text = Cow::Owned(text.to_lowercase());
        }
        let room = self.tokens_max - self.before.len() - self.after.len();
        let content = self.content(&text, room)?;
        let kept = &content[..content.len().min(room)];
        Ok([&self.before, kept, &self.after].concat().into())
    }

    /// The text's tokens, at least the first `room` of them.
    fn content(&self, text: &str, room: usize) -> Result<Vec<u32>, String> {
        let encode = |text: &str| match self.tokenizer.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(e.to_string()),
        };
        let bytes = self.tokens_max * BYTES_PER_TOKEN;
        let Some(long) = self.long.as_ref().filter(|_| text.len() > bytes) else {
            return encode(text);
        };
        let mut content = Vec::with_capacity(room);
        for piece in long.pieces(text, bytes) {
            content.extend(encode(&piece)?);
            if content.len() >= room {
                break;
            }
        }
        Ok(content)
    }
}

fn text_of(at: usize, input: &Input) -> Result<&str, InvalidInput> {
    match input {
        Input::Text(text) => Ok(text),
        other => Err(InvalidInput(format!("inputs[{at}] is {}; this model takes text", other.kind()))),
    }
}

fn open(path: &Path) -> Result<Tokenizer, LoadError> {
    let text = std::fs::read(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    Tokenizer::from_bytes(text)
        .map_err(|e| LoadError::Tokenizer { path: path.to_owned(), reason: e.to_string() })
}

/// What the post-processor puts before and after a text, seen on one.
fn special_tokens(tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>), String> {
    let ids = |special| match tokenizer.encode_fast("a", special) {
        Ok(encoding) => Ok(encoding.get_ids().to_vec()),
        Err(e) => Err(e.to_string()),
    };
    let (bare, whole) = (ids(false)?, ids(true)?);
    let at = (0..whole.len()).find(|at| !bare.is_empty() && whole[*at..].starts_with(&bare));
    match at {
        Some(at) => Ok((whole[..at].to_vec(), whole[at + bare.len()..].to_vec())),
        None => Err("its post-processor does more than put special tokens around a text".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens() -> Tokens {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-mean");
        Tokens::load(&ModelConfig::read(&folder).unwrap(), 2).unwrap()
    }

    #[test]
    fn a_cut_text_has_the_tokens_of_the_whole() {
        let tokens = tokens();
        let room = tokens.tokens_max - 2;
        let mut pieces =
            ["the cat sat ", "[SEP]", "漢字", "e\u{301}\u{327} ", "\u{200b}\t", "x", "![CLS] ", "ß"]
                .iter()
                .cycle();
        for first in 1..40 {
            let text: String = pieces.by_ref().take(300 + first * 7).copied().collect();
            let whole = tokens.tokenizer.encode_fast(text.as_str(), false).unwrap();
            let content = tokens.content(&text, room).unwrap();
            assert!(content.len() < whole.len(), "was not cut");
            assert_eq!(content[..room], whole.get_ids()[..room]);
        }
    }

    #[test]
    fn a_flood_of_one_character_is_cut() {
        let tokens = tokens();
        for flood in [".", "]", "[SEP]", "漢"] {
            let text = flood.repeat(1 << 20);
            assert_eq!(tokens.ids(&text).unwrap().len(), tokens.tokens_max, "a flood of {flood}");
            assert!(tokens.content(&text, 8).unwrap().len() < 1000, "a flood of {flood} is tokenised whole");
        }
    }

    #[test]
    fn a_text_of_one_word_is_one_token() {
        let tokens = tokens();
        assert_eq!(tokens.ids(&"x".repeat(100_000)).unwrap().len(), 3);
        assert_eq!(tokens.ids("").unwrap().len(), 2);
    }

    #[test]
    fn inputs_that_are_no_text_are_named() {
        let inputs = [Input::Text("a".into()), Input::Uri("s3://x".into())];
        let refused = tokens().items(&inputs, &Params::default()).unwrap_err();
        assert_eq!(refused.0, "inputs[1] is uri; this model takes text");
        let mut params = Params::default();
        params.0.insert("dtype".into(), "f64".into());
        assert!(tokens().items(&inputs[..1], &params).unwrap_err().0.contains("params.dtype"));
    }
}
