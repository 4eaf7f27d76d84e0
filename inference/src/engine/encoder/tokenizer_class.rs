//! What transformers changes in a `tokenizer.json` when it loads one. Some of its classes build the normalizer or the pre-tokenizer again,
//! from keys of `tokenizer_config.json` and from their own defaults. Without these changes the token ids would differ from those of
//! transformers.

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::normalizers::{BertNormalizer, Lowercase, Sequence};
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence as Words;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

use super::tokens_beside::{TokenFiles, TokensBeside};

/// The keys of `tokenizer_config.json` that count.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct TokenizerConfig {
    /// Written as a float of 1e30 when unlimited.
    pub model_max_length: Option<f64>,
    pub truncation_side: Option<String>,
    /// Special tokens in a text are read as ordinary text.
    pub split_special_tokens: Option<bool>,
    pub tokenizer_class: Option<String>,
    do_lower_case: Option<bool>,
    strip_accents: Option<bool>,
    tokenize_chinese_chars: Option<bool>,
    add_prefix_space: Option<bool>,
    /// All other keys, including those that name tokens.
    #[serde(flatten)]
    others: Map<String, Value>,
    /// That of `config.json`.
    #[serde(skip)]
    pub model_type: String,
    #[serde(skip)]
    pub files: TokenFiles,
}

/// Classes that put special tokens around texts where `tokenizer.json` says nothing of them.
const WITH_SPECIAL_TOKENS: [&str; 7] = [
    "BertTokenizer",
    "CamembertTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "MPNetTokenizer",
    "RobertaTokenizer",
    "XLMRobertaTokenizer",
];

impl TokenizerConfig {
    /// transformers' class, without the suffix of one generation (`BertTokenizer`, `BertTokenizerFast`).
    fn class(&self) -> &str {
        match (self.model_type.as_str(), &self.tokenizer_class) {
            // Folders of this family name classes that do not fit them; transformers takes their `tokenizer.json` as it is.
            ("modernbert", _) => "TokenizersBackend",
            (_, Some(class)) => class.strip_suffix("Fast").unwrap_or(class),
            ("bert" | "distilbert" | "nomic_bert", None) => "BertTokenizer",
            ("mpnet", None) => "MPNetTokenizer",
            ("roberta", None) => "RobertaTokenizer",
            ("gte" | "xlm-roberta", None) => "XLMRobertaTokenizer",
            ("camembert", None) => "CamembertTokenizer",
            ("qwen3", None) => "Qwen2Tokenizer",
            ("gemma3_text", None) => "GemmaTokenizer",
            (_, None) => "TokenizersBackend",
        }
    }

    /// Refuses a file without special tokens around texts if transformers' class adds its own.
    ///
    /// # Errors
    /// Says so.
    pub fn check(&self, tokenizer: &Tokenizer) -> Result<(), String> {
        let class = self.class();
        if tokenizer.get_post_processor().is_none() && WITH_SPECIAL_TOKENS.contains(&class) {
            return Err(format!(
                "it has no post-processor, which says where special tokens are. transformers puts those of its class \
                 {class} around texts; save the tokenizer with it once, so that they are in the file"
            ));
        }
        Ok(())
    }

    /// Tokens that transformers looks for in texts, and that the file does not have.
    ///
    /// # Errors
    /// As for [`TokensBeside::of`].
    pub fn tokens_beside(&self, tokenizer: &Tokenizer) -> Result<TokensBeside, String> {
        TokensBeside::of(self.class(), &self.others, &self.files, tokenizer)
    }

    /// Changes a tokenizer in the way that transformers changes it when it loads the file.
    pub fn apply(&self, tokenizer: &mut Tokenizer) {
        match (self.class(), tokenizer.get_model()) {
            (
                "BertTokenizer" | "DistilBertTokenizer" | "ElectraTokenizer" | "MPNetTokenizer",
                ModelWrapper::WordPiece(_),
            ) => {
                let ideographs = self.tokenize_chinese_chars.unwrap_or(true);
                let lowercase = self.do_lower_case.unwrap_or(true);
                let normalizer = BertNormalizer::new(true, ideographs, self.strip_accents, lowercase);
                tokenizer.with_normalizer(Some(normalizer)).with_pre_tokenizer(Some(BertPreTokenizer));
            }
            ("RobertaTokenizer" | "Qwen2Tokenizer", ModelWrapper::BPE(_)) => {
                let space = self.add_prefix_space.unwrap_or(false);
                if let Some(words) = tokenizer.get_pre_tokenizer().cloned() {
                    tokenizer.with_pre_tokenizer(Some(with_space(words, space)));
                }
            }
            // The normalizer of published files reduces several spaces to one, and they have no `WhitespaceSplit`. So a text of
            // spaces, and spaces at a text's end, would have a token.
            ("XLMRobertaTokenizer" | "CamembertTokenizer", ModelWrapper::Unigram(_)) => {
                let parts = normalizers(tokenizer);
                let table = parts.into_iter().find(|part| matches!(part, NormalizerWrapper::Precompiled(_)));
                let prepend = match self.add_prefix_space {
                    Some(false) => PrependScheme::Never,
                    Some(true) | None => PrependScheme::Always,
                };
                let spaces = Metaspace::new('▁', prepend, true);
                let words = Words::new(vec![WhitespaceSplit.into(), spaces.into()]);
                tokenizer.with_normalizer(table).with_pre_tokenizer(Some(words));
            }
            _ => {}
        }
    }
}

/// Byte-level words with a space in front of each text, or without.
fn with_space(words: PreTokenizerWrapper, space: bool) -> PreTokenizerWrapper {
    match words {
        PreTokenizerWrapper::ByteLevel(bytes) => bytes.add_prefix_space(space).into(),
        PreTokenizerWrapper::Sequence(all) => {
            Words::new(all.into_iter().map(|one| with_space(one, space)).collect()).into()
        }
        other => other,
    }
}

/// The parts of a tokenizer's normalizer.
fn normalizers(tokenizer: &Tokenizer) -> Vec<NormalizerWrapper> {
    match tokenizer.get_normalizer() {
        None => Vec::new(),
        Some(NormalizerWrapper::Sequence(all)) => all.as_ref().to_vec(),
        Some(one) => vec![one.clone()],
    }
}

/// Puts texts into lower case first, as sentence-transformers does, unless the normalizer already does.
pub(super) fn lowercase_first(tokenizer: &mut Tokenizer) {
    let parts = normalizers(tokenizer);
    if parts.iter().any(|part| matches!(part, NormalizerWrapper::Lowercase(_))) {
        return;
    }
    let all = std::iter::once(Lowercase.into()).chain(parts).collect();
    tokenizer.with_normalizer(Some(Sequence::new(all)));
}
