//! Which tokenizer transformers makes of a `tokenizer.json`. Some of its classes take only the vocabulary and the merges of the file, and
//! build the rest from keys of `tokenizer_config.json` and from their own defaults. Without that the token ids would differ from those of
//! transformers.

use std::fmt;

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::normalizers::{Lowercase, Sequence};
use tokenizers::{NormalizerWrapper, Tokenizer};

use super::class_parts::{FileParts, rebuild};
use super::class_tokens::ClassTokens;
use super::token_keys::TokenFiles;

/// The keys of `tokenizer_config.json` that count.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct TokenizerConfig {
    /// Written as a float of 1e30 when unlimited.
    pub model_max_length: Option<f64>,
    pub truncation_side: Option<String>,
    /// Special tokens in a text are read as ordinary text.
    pub split_special_tokens: Option<bool>,
    pub tokenizer_class: Option<String>,
    pub(super) do_lower_case: Option<bool>,
    pub(super) strip_accents: Option<bool>,
    pub(super) tokenize_chinese_chars: Option<bool>,
    pub(super) add_prefix_space: Option<bool>,
    /// What transformers' tokenizer gives the model.
    model_input_names: Option<Vec<String>>,
    /// All other keys, including those that name tokens.
    #[serde(flatten)]
    others: Map<String, Value>,
    /// What [`Class::of`] says for the class and the model.
    #[serde(skip)]
    pub class: Class,
    #[serde(skip)]
    pub files: TokenFiles,
}

/// transformers' classes whose tokenizers this engine builds as they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Class {
    /// `PreTrainedTokenizerFast` and names that transformers does not know: it takes `tokenizer.json` as it is.
    #[default]
    AsFile,
    Bert,
    DistilBert,
    /// Both encoders of DPR: BERT's, always with lower case.
    Dpr,
    MpNet,
    Roberta,
    XlmRoberta,
    Camembert,
    Qwen2,
    Gemma,
    Gpt2,
    Herbert,
}

/// Other classes of transformers 5.23. Some build a tokenizer from the vocabulary in ways of their own, and others do not read
/// `tokenizer.json`.
const OTHERS: [&str; 82] = [
    "AlbertTokenizer",
    "BarthezTokenizer",
    "BartphoTokenizer",
    "BertGenerationTokenizer",
    "BertJapaneseTokenizer",
    "BertweetTokenizer",
    "BigBirdTokenizer",
    "BioGptTokenizer",
    "BlenderbotSmallTokenizer",
    "BlenderbotTokenizer",
    "ByT5Tokenizer",
    "CLIPTokenizer",
    "CTRLTokenizer",
    "CanineTokenizer",
    "ClvpTokenizer",
    "CodeGenTokenizer",
    "CodeLlamaTokenizer",
    "CohereTokenizer",
    "ConvBertTokenizer",
    "CpmAntTokenizer",
    "CpmTokenizer",
    "DPRReaderTokenizer",
    "DebertaTokenizer",
    "DebertaV2Tokenizer",
    "DiaTokenizer",
    "EsmTokenizer",
    "EsmcTokenizer",
    "FNetTokenizer",
    "FSMTTokenizer",
    "FastSpeech2ConformerTokenizer",
    "FlaubertTokenizer",
    "FunnelTokenizer",
    "GPTNeoXJapaneseTokenizer",
    "GPTNeoXTokenizer",
    "GPTSw3Tokenizer",
    "LasrTokenizer",
    "LayoutLMv2Tokenizer",
    "LayoutLMv3Tokenizer",
    "LayoutXLMTokenizer",
    "LlamaTokenizer",
    "LukeTokenizer",
    "M2M100Tokenizer",
    "MBart50Tokenizer",
    "MBartTokenizer",
    "MLukeTokenizer",
    "MarianTokenizer",
    "MarkupLMTokenizer",
    "MgpstrTokenizer",
    "MyT5Tokenizer",
    "NllbTokenizer",
    "NougatTokenizer",
    "OpenAIGPTTokenizer",
    "PLBartTokenizer",
    "ParakeetTokenizer",
    "PegasusTokenizer",
    "PerceiverTokenizer",
    "PhobertTokenizer",
    "ProphetNetTokenizer",
    "Qwen3_5Tokenizer",
    "RagTokenizer",
    "ReformerTokenizer",
    "RemBertTokenizer",
    "RoCBertTokenizer",
    "RoFormerTokenizer",
    "SeamlessM4TTokenizer",
    "Siglip2Tokenizer",
    "SiglipTokenizer",
    "Speech2TextTokenizer",
    "SpeechT5Tokenizer",
    "SplinterTokenizer",
    "T5Tokenizer",
    "TapasTokenizer",
    "Tipsv2Tokenizer",
    "UdopTokenizer",
    "VideoPrismTokenizer",
    "VitsTokenizer",
    "Wav2Vec2CTCTokenizer",
    "Wav2Vec2PhonemeCTCTokenizer",
    "WhisperTokenizer",
    "XGLMTokenizer",
    "XLMTokenizer",
    "XLNetTokenizer",
];

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AsFile => "PreTrainedTokenizerFast",
            Self::Bert => "BertTokenizer",
            Self::DistilBert => "DistilBertTokenizer",
            Self::Dpr => "DPRContextEncoderTokenizer",
            Self::MpNet => "MPNetTokenizer",
            Self::Roberta => "RobertaTokenizer",
            Self::XlmRoberta => "XLMRobertaTokenizer",
            Self::Camembert => "CamembertTokenizer",
            Self::Qwen2 => "Qwen2Tokenizer",
            Self::Gemma => "GemmaTokenizer",
            Self::Gpt2 => "GPT2Tokenizer",
            Self::Herbert => "HerbertTokenizer",
        })
    }
}

impl Class {
    /// That of a family's model whose files name a class, or none.
    ///
    /// # Errors
    /// Returns the name of a class that this engine does not build.
    pub fn of(model_type: &str, name: Option<&str>) -> Result<Self, String> {
        let Some(name) = name else { return Ok(Self::of_family(model_type)) };
        // The suffix of one generation.
        let name = name.strip_suffix("Fast").unwrap_or(name);
        Ok(match name {
            // Folders of this family name classes that do not fit them; transformers takes their `tokenizer.json` as it is.
            _ if model_type == "modernbert" => Self::AsFile,
            "BertTokenizer"
            | "ElectraTokenizer"
            | "LayoutLMTokenizer"
            | "LxmertTokenizer"
            | "MobileBertTokenizer"
            | "SqueezeBertTokenizer" => Self::Bert,
            "DistilBertTokenizer" => Self::DistilBert,
            "DPRContextEncoderTokenizer" | "DPRQuestionEncoderTokenizer" => Self::Dpr,
            "MPNetTokenizer" => Self::MpNet,
            "RobertaTokenizer"
            | "BartTokenizer"
            | "LEDTokenizer"
            | "LongformerTokenizer"
            | "MvpTokenizer" => Self::Roberta,
            "XLMRobertaTokenizer" => Self::XlmRoberta,
            "CamembertTokenizer" => Self::Camembert,
            "Qwen2Tokenizer" => Self::Qwen2,
            "GemmaTokenizer" => Self::Gemma,
            "GPT2Tokenizer" => Self::Gpt2,
            "HerbertTokenizer" => Self::Herbert,
            name if OTHERS.contains(&name) => return Err(name.to_owned()),
            _ => Self::AsFile,
        })
    }

    fn of_family(model_type: &str) -> Self {
        match model_type {
            "bert" | "distilbert" | "nomic_bert" => Self::Bert,
            "mpnet" => Self::MpNet,
            "roberta" => Self::Roberta,
            "gte" | "xlm-roberta" => Self::XlmRoberta,
            "camembert" => Self::Camembert,
            "qwen3" => Self::Qwen2,
            "gemma3_text" => Self::Gemma,
            _ => Self::AsFile,
        }
    }

    /// The token that the class has under a name that no file gives.
    pub fn default_token(self, name: &str) -> Option<&'static str> {
        let all: &[(&str, &str)] = match self {
            Self::AsFile => &[],
            Self::Bert | Self::DistilBert | Self::Dpr => &[
                ("unk_token", "[UNK]"),
                ("sep_token", "[SEP]"),
                ("pad_token", "[PAD]"),
                ("cls_token", "[CLS]"),
                ("mask_token", "[MASK]"),
            ],
            Self::MpNet => &[
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("unk_token", "[UNK]"),
                ("sep_token", "</s>"),
                ("pad_token", "<pad>"),
                ("cls_token", "<s>"),
                ("mask_token", "<mask>"),
            ],
            Self::Roberta | Self::XlmRoberta | Self::Camembert => &[
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("unk_token", "<unk>"),
                ("sep_token", "</s>"),
                ("pad_token", "<pad>"),
                ("cls_token", "<s>"),
                ("mask_token", "<mask>"),
            ],
            Self::Herbert => &[
                ("unk_token", "<unk>"),
                ("sep_token", "</s>"),
                ("pad_token", "<pad>"),
                ("cls_token", "<s>"),
                ("mask_token", "<mask>"),
            ],
            Self::Gemma => &[
                ("bos_token", "<bos>"),
                ("eos_token", "<eos>"),
                ("unk_token", "<unk>"),
                ("pad_token", "<pad>"),
                ("mask_token", "<mask>"),
            ],
            Self::Qwen2 => &[
                ("eos_token", "<|endoftext|>"),
                ("unk_token", "<|endoftext|>"),
                ("pad_token", "<|endoftext|>"),
            ],
            Self::Gpt2 => &[
                ("bos_token", "<|endoftext|>"),
                ("eos_token", "<|endoftext|>"),
                ("unk_token", "<|endoftext|>"),
            ],
        };
        all.iter().find(|(key, _)| *key == name).map(|(_, token)| *token)
    }

    /// The tokens without names that the class has where no file gives any.
    pub fn extra_tokens(self) -> &'static [&'static str] {
        match self {
            Self::Camembert => &["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"],
            _ => &[],
        }
    }
}

impl TokenizerConfig {
    /// Whether transformers gives the model token types. Without them all tokens of a pair are of the first type.
    pub fn gives_types(&self) -> bool {
        match &self.model_input_names {
            Some(names) => names.iter().any(|name| name == "token_type_ids"),
            None => matches!(self.class, Class::Bert | Class::Dpr),
        }
    }

    /// Changes the tokenizer of `tokenizer.json` into the one that transformers makes of the file. Returns whether the
    /// older files have a part in it. `embeddings`: how many tokens the model has embeddings of.
    ///
    /// # Errors
    /// The files do not fit the class.
    pub fn apply(
        &self,
        tokenizer: &mut Tokenizer,
        file: &FileParts,
        embeddings: usize,
    ) -> Result<bool, String> {
        let tokens =
            |files: &TokenFiles| ClassTokens::of(self.class, &self.others, files, file.added_tokens.clone());
        let (all, without) = (tokens(&self.files)?, tokens(&TokenFiles::default())?);
        rebuild(tokenizer, self, &all, &file.model, embeddings)?;
        Ok(!all.same_as(&without))
    }
}

/// The parts of a tokenizer's normalizer.
pub(super) fn normalizers(tokenizer: &Tokenizer) -> Vec<NormalizerWrapper> {
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
    // Normalizes the added tokens again, as the library that transformers uses does by itself.
    tokenizer.add_tokens(&[]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As transformers 5.23 does.
    #[test]
    fn token_types_are_those_of_the_class_or_of_the_input_names() {
        let gives_types = |model_type: &str, text: &str| {
            let mut config: TokenizerConfig = serde_json::from_str(text).unwrap();
            config.class = Class::of(model_type, config.tokenizer_class.as_deref()).unwrap();
            config.gives_types()
        };
        let cases = [
            (r#"{"tokenizer_class": "BertTokenizerFast"}"#, true),
            (r#"{"tokenizer_class": "MobileBertTokenizer"}"#, true),
            (r#"{"tokenizer_class": "DPRQuestionEncoderTokenizer"}"#, true),
            (r#"{"tokenizer_class": "DistilBertTokenizer"}"#, false),
            (r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#, false),
            (r#"{"tokenizer_class": "XLMRobertaTokenizer"}"#, false),
            (
                r#"{"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}"#,
                false,
            ),
            (
                r#"{"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}"#,
                true,
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(gives_types("bert", text), expected, "{text}");
        }
        // Where no file names a class, the family's counts.
        assert_eq!(["bert", "roberta", "gte"].map(|family| gives_types(family, "{}")), [true, false, false]);
    }

    #[test]
    fn a_class_that_transformers_has_and_this_engine_has_not_is_an_error() {
        assert_eq!(Class::of("bert", Some("BertJapaneseTokenizer")), Err("BertJapaneseTokenizer".into()));
        assert_eq!(Class::of("xlm-roberta", Some("T5TokenizerFast")), Err("T5Tokenizer".into()));
        // transformers looks at neither name.
        assert_eq!(Class::of("modernbert", Some("LlamaTokenizer")), Ok(Class::AsFile));
        assert_eq!(Class::of("bert", Some("OurTokenizer")), Ok(Class::AsFile));
        assert!(OTHERS.is_sorted());
    }
}
