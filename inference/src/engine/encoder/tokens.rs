//! Texts to token ids, off the runtime: as the model's own tokenizer says, cut to its own length.

use std::borrow::Cow;
use std::path::Path;

use rayon::prelude::*;
use tokenizers::utils::truncation::TruncationDirection;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, Tokenizer};
use vramq_schemas::{EmbeddingFormat, Input, Params};

use crate::engine::{InvalidInput, Item};

use super::LoadError;
use super::config::{ModelConfig, Prompts};
use super::pairs::PairTemplate;

/// A job of fewer texts is tokenised where it is: waking threads costs more than they save.
const TEXTS_FOR_THREADS: usize = 64;

/// Bytes of text tokenised at first for each token that a model takes: about four times what English needs.
const BYTES_PER_TOKEN: usize = 16;

/// By how much the window grows when the first was too short.
const WINDOW_GROWTH: usize = 4;

/// A model's tokenizer. Shared by all threads.
pub(super) struct Tokens {
    tokenizer: Tokenizer,
    /// Elements of a vector.
    hidden: usize,
    /// Special tokens around every text.
    before: Vec<u32>,
    after: Vec<u32>,
    pub(super) tokens_max: usize,
    pub(super) lowercase: bool,
    prompts: Prompts,
    /// What pairs of texts are made with, if the model takes them.
    pub(super) pair_template: Option<PairTemplate>,
    /// Where a long text may be cut before it is tokenised; `None`: nowhere.
    cut: Option<Cut>,
    pub(super) threads: rayon::ThreadPool,
}

/// Where the tokenizer certainly begins a new word, so that what comes later cannot change what came before.
struct Cut {
    /// Also before an ideograph, which the normalizer sets apart by spaces.
    ideographs: bool,
    /// Texts that are tokens as they stand, and must not be cut in two.
    whole: Vec<String>,
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
        if largest as usize >= config.spec.dims.vocabulary {
            return Err(fault(format!(
                "it has a token {largest}, but the model only {} embeddings",
                config.spec.dims.vocabulary
            )));
        }
        let (before, after) = special_tokens(&tokenizer).map_err(fault)?;
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
            cut: Cut::of(&tokenizer),
            hidden: config.spec.dims.hidden,
            tokenizer,
            before,
            after,
            tokens_max: config.tokens_max,
            lowercase: config.lowercase,
            prompts: config.prompts.clone(),
            pair_template,
            threads,
        })
    }

    /// A job's inputs as items, in order.
    ///
    /// # Errors
    /// Names the first input that is not text.
    pub fn items(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        let mut params = params.clone();
        let prompt = self.prompts.of(params.0.remove("prompt_name"))?;
        let format = EmbeddingFormat::from_params(&params).map_err(InvalidInput)?;
        if let Some(dimensions) = format.dimensions.filter(|wanted| *wanted as usize > self.hidden) {
            return Err(InvalidInput(format!(
                "params.dimensions is {dimensions}; this model has {}",
                self.hidden
            )));
        }
        let texts = inputs
            .iter()
            .enumerate()
            .map(|(at, input)| match input {
                Input::Text(text) => Ok(text.as_str()),
                other => {
                    Err(InvalidInput(format!("inputs[{at}] is {}; this model takes text", other.kind())))
                }
            })
            .collect::<Result<Vec<_>, _>>()?;
        let item = |(at, text): (usize, &&str)| match self.ids(prompt, text) {
            Ok(ids) => Ok(Item::Tokens { ids, format }),
            Err(reason) => Err(InvalidInput(format!("inputs[{at}]: {reason}"))),
        };
        if texts.len() < TEXTS_FOR_THREADS {
            return texts.iter().enumerate().map(item).collect();
        }
        let items: Vec<_> =
            self.threads.install(|| texts.par_iter().enumerate().with_min_len(16).map(item).collect());
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
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(e.to_string()),
        };
        let Some(cut) = &self.cut else {
            return encode(text);
        };
        let mut window = self.tokens_max * BYTES_PER_TOKEN;
        while window < text.len() {
            if let Some(at) = cut.last_before(text, window) {
                let content = encode(&text[..at])?;
                if content.len() >= room {
                    return Ok(content);
                }
            }
            window *= WINDOW_GROWTH;
        }
        encode(text)
    }
}

impl Cut {
    /// The rule for this tokenizer, if there is one. For BERT's own there is: its normalizer maps characters one by
    /// one, spaces to spaces; accents, which it may strip, follow their base character; its pre-tokenizer ends every
    /// word at a space or punctuation. So tokens before one of these depend on nothing from there on, unless an
    /// added token reaches across: that is looked for, as long as those match the text itself (and not its
    /// normal form) and take no notice of their neighbours.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let Some(NormalizerWrapper::BertNormalizer(normalizer)) = tokenizer.get_normalizer() else {
            return None;
        };
        let Some(PreTokenizerWrapper::BertPreTokenizer(_)) = tokenizer.get_pre_tokenizer() else {
            return None;
        };
        let added = tokenizer.get_added_tokens_decoder();
        let plain = added
            .values()
            .all(|token| !token.lstrip && !token.rstrip && !token.single_word && !token.normalized);
        plain.then(|| Self {
            ideographs: normalizer.handle_chinese_chars,
            whole: added.into_values().map(|token| token.content).collect(),
        })
    }

    /// The last place in the first `window` bytes where a text may be cut.
    fn last_before(&self, text: &str, window: usize) -> Option<usize> {
        text[..text.floor_char_boundary(window)]
            .char_indices()
            .rev()
            .filter(|(_, c)| {
                let space = matches!(c, ' ' | '\t' | '\n' | '\r');
                space || c.is_ascii_punctuation() || self.ideographs && is_ideograph(*c)
            })
            .map(|(at, _)| at)
            .find(|at| !self.halves_a_token(text, *at))
    }

    fn halves_a_token(&self, text: &str, at: usize) -> bool {
        let (before, after) = text.as_bytes().split_at(at);
        self.whole.iter().map(String::as_bytes).any(|token| {
            (1..token.len()).any(|head| before.ends_with(&token[..head]) && after.starts_with(&token[head..]))
        })
    }
}

/// The largest block of those that BERT's normalizer sets apart. Others only mean fewer places to cut.
fn is_ideograph(c: char) -> bool {
    ('\u{4E00}'..='\u{9FFF}').contains(&c)
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
            let started = std::time::Instant::now();
            assert_eq!(tokens.ids("", &flood.repeat(1 << 20)).unwrap().len(), tokens.tokens_max);
            assert!(started.elapsed().as_secs() < 2, "a flood of {flood} is tokenised whole");
        }
    }

    #[test]
    fn a_text_without_a_place_to_cut_is_taken_whole() {
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
