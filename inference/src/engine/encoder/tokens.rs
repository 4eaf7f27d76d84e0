//! Turns texts into token ids with the model's own tokenizer, and cuts them to the model's length. Runs off the async runtime.

use std::borrow::Cow;

use rayon::prelude::*;
use tokenizers::Tokenizer;
use tokenizers::utils::truncation::TruncationDirection;
use vramq_schemas::{EmbeddingFormat, Input, Params};

use crate::engine::{InvalidInput, Item};

use super::LoadError;
use super::class_parts::open;
use super::config::ModelConfig;
use super::long_text::LongText;
use super::pairs::PairTemplate;
use super::safe_split::SafeSplit;
use super::saved_config::Prompts;
use super::tokenizer_class::lowercase_first;
use super::word_cache::WordCache;
use super::word_piece::PlainWords;

/// Jobs with fewer texts are tokenised on the calling thread: waking other threads costs more than they save.
const TEXTS_FOR_THREADS: usize = 64;

/// Bytes of text for each token that a model takes: about four times what English needs. A longer text is tokenised in pieces of
/// so many, until there are enough tokens.
const BYTES_PER_TOKEN: usize = 16;

/// For tokenizers that cannot take a text in pieces: the bytes per wanted token that are tokenised first. The number doubles while
/// the tokens are too few.
const BYTES_PER_TOKEN_FIRST: usize = 8;

/// The bytes to begin with at least, because a place to cut is looked for in half of them.
const PREFIX_BYTES_MIN: usize = 8 << 10;

/// The most bytes of a text that are tokenised at once: some 80 MiB of memory and a second where every byte is a token.
const PREFIX_BYTES_MAX: usize = 256 << 10;

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
    pub(super) prompts: Prompts,
    /// What pairs of texts are made with, if the model takes them.
    pub(super) pair_template: Option<PairTemplate>,
    /// The token that does not count at the end of a text to score.
    pub(super) padding: Option<u32>,
    /// Whether [`TOKEN_FILES`](super::token_keys::TOKEN_FILES) have a part in the ids.
    pub(super) uses_older_files: bool,
    /// Added tokens that the model has no embedding of: EmbeddingGemma's tokenizer has one for images.
    added_beyond: Vec<u32>,
    long: LongTexts,
    pub(super) threads: rayon::ThreadPool,
}

/// How to tokenise a text when only its first tokens are wanted.
enum LongTexts {
    /// Word by word, and a long one piece by piece, until there are enough tokens.
    Words(Box<Words>),
    /// Tokenises a beginning of the text that has enough tokens.
    Prefix(SafeSplit),
    /// As a whole.
    Whole,
}

/// What finds the tokens of words.
struct Words {
    long: LongText,
    /// `None`: all words are left to the library.
    plain: Option<PlainWords>,
    /// Words that are not plain.
    cache: WordCache,
}

impl LongTexts {
    fn of(tokenizer: &Tokenizer) -> Self {
        match LongText::of(tokenizer) {
            Some(long) => {
                let (plain, cache) = (PlainWords::of(tokenizer), WordCache::of(tokenizer));
                Self::Words(Box::new(Words { long, plain, cache }))
            }
            None => SafeSplit::of(tokenizer).map_or(Self::Whole, Self::Prefix),
        }
    }
}

impl Tokens {
    /// # Errors
    /// When `tokenizer.json` is missing, malformed, or does not fit the model.
    pub fn load(config: &ModelConfig, threads: usize) -> Result<Self, LoadError> {
        // The library panics over some malformed files.
        std::panic::catch_unwind(|| Self::read(config, threads)).unwrap_or_else(|panic| {
            let text =
                panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
            let reason =
                format!("the library for tokenizers cannot use it: {}", text.unwrap_or("it panicked"));
            Err(LoadError::Tokenizer { path: config.transformer.join("tokenizer.json"), reason })
        })
    }

    fn read(config: &ModelConfig, threads: usize) -> Result<Self, LoadError> {
        let path = config.transformer.join("tokenizer.json");
        let fault = |reason: String| LoadError::Tokenizer { path: path.clone(), reason };
        let (mut tokenizer, parts) = open(&path)?;
        // The side in the other file wins, and was checked.
        if let Some(truncation) = tokenizer.get_truncation()
            && truncation.direction == TruncationDirection::Left
            && config.texts.tokenizer.truncation_side.is_none()
        {
            return Err(fault(
                "it truncates on the left; this engine does on the right, and transformers does so with \
                 `\"truncation_side\": \"right\"` in tokenizer_config.json"
                    .into(),
            ));
        }
        // The file's own truncation and padding are those of some training run; the model's length is in its config,
        // and the engine pads nothing. The library would also keep all that it cuts off.
        tokenizer.with_truncation(None).map_err(|e| fault(e.to_string()))?.with_padding(None);
        let (vocabulary, tokens_max) = (config.spec.dims.vocabulary, config.texts.tokens_max);
        let uses_older_files =
            config.texts.tokenizer.apply(&mut tokenizer, &parts, vocabulary).map_err(fault)?;
        if config.texts.lowercase {
            lowercase_first(&mut tokenizer);
        }
        let is_beyond = |id: &u32| *id as usize >= vocabulary;
        let (before, after) = special_tokens(&tokenizer).map_err(fault)?;
        let around = before.iter().chain(&after).copied();
        if let Some(id) = tokenizer.get_vocab(false).into_values().chain(around).find(is_beyond) {
            return Err(fault(format!("it has a token {id}, but the model only {vocabulary} embeddings")));
        }
        let added_beyond = tokenizer.get_added_tokens_decoder().into_keys().filter(is_beyond).collect();
        if before.len() + after.len() >= tokens_max {
            return Err(fault(format!("a length of {tokens_max} leaves no room beside the special tokens")));
        }
        let gives_types = config.texts.tokenizer.gives_types();
        if gives_types && config.spec.dims.token_types > 1 && has_second_type(&tokenizer).map_err(fault)? {
            return Err(fault("its post-processor gives single texts another token type than 0".into()));
        }
        let pair_template = match &config.spec.classifier {
            None => None,
            Some(_) => {
                let typed = gives_types && config.spec.segments() > 1;
                Some(PairTemplate::of(&tokenizer, typed).map_err(fault)?)
            }
        };
        if pair_template.as_ref().is_some_and(|template| template.len() >= tokens_max) {
            return Err(fault(format!("a length of {tokens_max} leaves no room for pairs")));
        }
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|at| format!("tokens-{at}"))
            .build()
            .map_err(|e| fault(format!("start threads: {e}")))?;
        Ok(Self {
            long: LongTexts::of(&tokenizer),
            width: config.width(),
            tokenizer,
            before,
            after,
            tokens_max,
            prompts: config.prompts.clone(),
            pair_template,
            uses_older_files,
            padding: config.spec.classifier.as_ref().and_then(|classifier| classifier.head.padding),
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
        let text =
            if prompt.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(format!("{prompt}{text}")) };
        let room = self.tokens_max - self.before.len() - self.after.len();
        let content = self.content(&text, room)?;
        let kept = &content[..content.len().min(room)];
        self.check_embeddings(kept)?;
        Ok([&self.before, kept, &self.after].concat().into())
    }

    /// The text's tokens, at least the first `room` of them.
    pub(super) fn content(&self, text: &str, room: usize) -> Result<Vec<u32>, String> {
        match &self.long {
            LongTexts::Words(words) => self.of_words(words, text, room),
            LongTexts::Prefix(split) => self.prefix(Some(split), text, room),
            LongTexts::Whole => self.prefix(None, text, room),
        }
    }

    fn of_words(&self, words: &Words, text: &str, room: usize) -> Result<Vec<u32>, String> {
        let bytes = self.tokens_max * BYTES_PER_TOKEN;
        let mut content = Vec::with_capacity(room.min(text.len()));
        if text.len() <= bytes {
            self.add_words(words, text, room, &mut content)?;
            return Ok(content);
        }
        for piece in words.long.pieces(text, bytes) {
            self.add_words(words, &piece, room, &mut content)?;
            if content.len() >= room {
                break;
            }
        }
        Ok(content)
    }

    /// Appends the tokens of a text to `content`, until that has `room` of them or more.
    fn add_words(
        &self,
        Words { plain, cache, .. }: &Words,
        text: &str,
        room: usize,
        content: &mut Vec<u32>,
    ) -> Result<(), String> {
        for word in cache.words(text) {
            if content.len() >= room {
                break;
            }
            let is_done =
                plain.as_ref().is_some_and(|plain| plain.add_tokens(&self.tokenizer, word, content));
            if !is_done {
                cache.add_tokens(word, content, |word| self.encode(word))?;
            }
        }
        Ok(())
    }

    /// The tokens of the text, or of a part of it that has enough of them.
    ///
    /// # Errors
    /// The text is too long to be tokenised as a whole, and there is no such part.
    fn prefix(&self, split: Option<&SafeSplit>, text: &str, room: usize) -> Result<Vec<u32>, String> {
        let bytes_max = PREFIX_BYTES_MAX.max(self.tokens_max * BYTES_PER_TOKEN);
        let mut bytes = PREFIX_BYTES_MIN.max(room * BYTES_PER_TOKEN_FIRST).min(bytes_max);
        loop {
            if text.len() <= bytes {
                return self.encode(text);
            }
            let found = match split.and_then(|split| split.find(&self.tokenizer, text, bytes)) {
                Some(end) => Some(self.encode(&text[..end])?),
                None => None,
            };
            match found {
                Some(content) if content.len() >= room => return Ok(content),
                found if bytes == bytes_max => return Err(too_long(text.len(), bytes_max, found, room)),
                _ => bytes = (2 * bytes).min(bytes_max),
            }
        }
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        match self.tokenizer.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Whether the model has embeddings of all tokens.
    pub(super) fn check_embeddings(&self, ids: &[u32]) -> Result<(), String> {
        // Most tokenizers have no such tokens.
        match self.added_beyond.iter().find(|id| ids.contains(id)) {
            None => Ok(()),
            Some(id) => {
                let token = self.tokenizer.id_to_token(*id).unwrap_or_default();
                Err(format!("the model has no embedding of the token `{token}`"))
            }
        }
    }
}

/// Why a text of `bytes` bytes is refused, of which at most `bytes_max` are examined. `found`: the first tokens of the text, if it
/// could be cut at all.
fn too_long(bytes: usize, bytes_max: usize, found: Option<Vec<u32>>, room: usize) -> String {
    let why = match found {
        Some(content) => format!("have {} tokens, fewer than the {room} that the model keeps", content.len()),
        None => "have no space or other place where the text can be cut between two tokens".to_owned(),
    };
    format!("a text of {bytes} bytes is too long for this tokenizer: the first {bytes_max} bytes {why}")
}

fn text_of(at: usize, input: &Input) -> Result<&str, InvalidInput> {
    match input {
        Input::Text(text) => Ok(text),
        other => Err(InvalidInput(format!("inputs[{at}] is {}; this model takes text", other.kind()))),
    }
}

/// What the post-processor puts before and after a text, seen on one.
fn special_tokens(tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>), String> {
    let encode = |special| tokenizer.encode("a", special).map_err(|e| e.to_string());
    let (bare, whole) = (encode(false)?, encode(true)?);
    let (bare, ids) = (bare.get_ids(), whole.get_ids());
    // One of the special tokens may be that of the text.
    let mask = whole.get_special_tokens_mask();
    let at = mask.iter().position(|mask| *mask == 0).unwrap_or_default();
    let (begin, end) = (&ids[..at], at + bare.len());
    match ids.get(at..end) {
        Some(text) if !bare.is_empty() && text == bare && mask[end..].iter().all(|mask| *mask == 1) => {
            Ok((begin.to_vec(), ids[end..].to_vec()))
        }
        _ => Err("its post-processor does more than put special tokens around a text".into()),
    }
}

/// Whether the post-processor gives tokens of a single text another type than 0.
fn has_second_type(tokenizer: &Tokenizer) -> Result<bool, String> {
    let encoding = tokenizer.encode("a", true).map_err(|e| e.to_string())?;
    Ok(encoding.get_type_ids().iter().any(|kind| *kind != 0))
}

#[cfg(test)]
#[path = "tokens_tests.rs"]
mod tests;
