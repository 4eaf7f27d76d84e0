//! Turns texts into token ids with the model's own tokenizer, and cuts them to the model's length. Runs off the async runtime.

use std::borrow::Cow;
use std::path::Path;

use rayon::prelude::*;
use tokenizers::Tokenizer;
use tokenizers::utils::truncation::TruncationDirection;
use vramq_schemas::{EmbeddingFormat, Input, Params};

use crate::engine::{InvalidInput, Item};

use super::LoadError;
use super::config::{ModelConfig, Prompts};
use super::long_text::LongText;
use super::pairs::PairTemplate;

/// A job of fewer texts is tokenised where it is: waking threads costs more than they save.
const TEXTS_FOR_THREADS: usize = 64;

/// Bytes of text for each token that a model takes: about four times what English needs. A longer text is tokenised in pieces of
/// so many, until there are enough tokens.
const BYTES_PER_TOKEN: usize = 16;

/// The parameter that names one of the model's prompts.
pub(super) const PROMPT_NAME: &str = "prompt_name";

/// A model's tokenizer. Shared by all threads.
pub(super) struct Tokens {
    tokenizer: Tokenizer,
    /// Elements of a vector.
    width: usize,
    /// Special tokens around every text.
    before: Vec<u32>,
    after: Vec<u32>,
    pub(super) tokens_max: usize,
    pub(super) lowercase: bool,
    prompts: Prompts,
    /// What pairs of texts are made with, if the model takes them.
    pub(super) pair_template: Option<PairTemplate>,
    /// Added tokens that the model has no embedding of: EmbeddingGemma's tokenizer has one for images.
    added_beyond: Vec<u32>,
    /// How a long text is cut before it is tokenised; `None`: it is not.
    long: Option<LongText>,
    pub(super) threads: rayon::ThreadPool,
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
        let vocabulary = config.spec.dims.vocabulary;
        let is_beyond = |id: &u32| *id as usize >= vocabulary;
        let (before, after) = special_tokens(&tokenizer).map_err(fault)?;
        let around = before.iter().chain(&after).copied();
        if let Some(id) = tokenizer.get_vocab(false).into_values().chain(around).find(is_beyond) {
            return Err(fault(format!("it has a token {id}, but the model only {vocabulary} embeddings")));
        }
        let added_beyond = tokenizer.get_added_tokens_decoder().into_keys().filter(is_beyond).collect();
        if before.len() + after.len() >= config.tokens_max {
            return Err(fault(format!(
                "a length of {} leaves no room beside the special tokens",
                config.tokens_max
            )));
        }
        let pair_template = match &config.spec.classifier {
            None => None,
            Some(_) => Some(PairTemplate::of(&tokenizer, config.spec.segments() > 1).map_err(fault)?),
        };
        if pair_template.as_ref().is_some_and(|template| template.len() >= config.tokens_max) {
            return Err(fault(format!("a length of {} leaves no room for pairs", config.tokens_max)));
        }
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|at| format!("tokens-{at}"))
            .build()
            .map_err(|e| fault(format!("start threads: {e}")))?;
        Ok(Self {
            long: LongText::of(&tokenizer),
            width: config.width(),
            tokenizer,
            before,
            after,
            tokens_max: config.tokens_max,
            lowercase: config.lowercase,
            prompts: config.prompts.clone(),
            pair_template,
            added_beyond,
            threads,
        })
    }

    /// Whether inputs are text, and parameters known.
    ///
    /// # Errors
    /// Names the first input that is not text.
    pub fn check(&self, inputs: &[Input], params: &Params) -> Result<(), InvalidInput> {
        self.format(params)?;
        self.check_texts(inputs, params)
    }

    /// Whether inputs are text, and there is the prompt that parameters name.
    ///
    /// # Errors
    /// Names the first input that is not text.
    pub fn check_texts(&self, inputs: &[Input], params: &Params) -> Result<(), InvalidInput> {
        self.prompts.of(params.0.get(PROMPT_NAME))?;
        inputs.iter().enumerate().try_for_each(|(at, input)| text_of(at, input).map(drop))
    }

    /// How vectors are wanted.
    ///
    /// # Errors
    /// Names the parameter that is unknown or malformed.
    pub fn format(&self, params: &Params) -> Result<EmbeddingFormat, InvalidInput> {
        let mut params = Cow::Borrowed(params);
        if params.0.contains_key(PROMPT_NAME) {
            params.to_mut().0.remove(PROMPT_NAME);
        }
        let format = EmbeddingFormat::from_params(&params).map_err(InvalidInput)?;
        match format.dimensions {
            Some(dimensions) if dimensions as usize > self.width => {
                Err(InvalidInput(format!("params.dimensions is {dimensions}; this model has {}", self.width)))
            }
            _ => Ok(format),
        }
    }

    /// Inputs as items, in order.
    ///
    /// # Errors
    /// Names the first input that is not text.
    pub fn items(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        let format = self.format(params)?;
        self.items_of(inputs, params, |ids| Item::Tokens { ids, format })
    }

    /// Texts as items, in order: `make` makes one of its token ids.
    ///
    /// # Errors
    /// Names the first input that is not text.
    pub fn items_of(
        &self,
        inputs: &[Input],
        params: &Params,
        make: impl Fn(Box<[u32]>) -> Item + Sync,
    ) -> Result<Vec<Item>, InvalidInput> {
        let prompt = self.prompts.of(params.0.get(PROMPT_NAME))?;
        let item = |(at, input): (usize, &Input)| match self.ids(prompt, text_of(at, input)?) {
            Ok(ids) => Ok(make(ids)),
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
    pub(super) fn ids(&self, prompt: &str, text: &str) -> Result<Box<[u32]>, String> {
        let mut text =
            if prompt.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(format!("{prompt}{text}")) };
        if self.lowercase {
            text = Cow::Owned(text.to_lowercase());
        }
        let room = self.tokens_max - self.before.len() - self.after.len();
        let content = self.content(&text, room)?;
        let kept = &content[..content.len().min(room)];
        Ok([&self.before, kept, &self.after].concat().into())
    }

    /// The text's tokens, at least the first `room` of them.
    pub(super) fn content(&self, text: &str, room: usize) -> Result<Vec<u32>, String> {
        let encode = |text: &str| match self.tokenizer.encode_fast(text, false) {
            Ok(encoding) => self.with_embeddings(encoding.get_ids().to_vec()),
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

    /// Tokens, if the model has embeddings of all.
    fn with_embeddings(&self, ids: Vec<u32>) -> Result<Vec<u32>, String> {
        // Most tokenizers have none to look for.
        match self.added_beyond.iter().find(|id| ids.contains(id)) {
            None => Ok(ids),
            Some(id) => {
                let token = self.tokenizer.id_to_token(*id).unwrap_or_default();
                Err(format!("the model has no embedding of the token `{token}`"))
            }
        }
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
            assert_eq!(tokens.ids("", &text).unwrap().len(), tokens.tokens_max, "a flood of {flood}");
            assert!(tokens.content(&text, 8).unwrap().len() < 1000, "a flood of {flood} is tokenised whole");
        }
    }

    #[test]
    fn a_text_of_one_word_is_one_token() {
        let tokens = tokens();
        assert_eq!(tokens.ids("", &"x".repeat(100_000)).unwrap().len(), 3);
        assert_eq!(tokens.ids("", "").unwrap().len(), 2);
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
