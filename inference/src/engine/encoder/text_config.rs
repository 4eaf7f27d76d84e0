//! Reads how texts of a model folder are tokenised: the most tokens of a text, and whether texts are put into lower case.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::config::{null_as_default, optional, unsupported};
use super::families::{Positions, Spec};
use super::token_keys::TokenFiles;
use super::tokenizer_class::{Class, TokenizerConfig};
use super::{LoadError, json};

/// The files in which sentence-transformers configures a transformer. The first one that exists and is not empty counts, as there.
pub(super) const SENTENCE_FILES: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

/// The file of what transformers adds to `tokenizer.json`.
pub(super) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The file of a tokenizer's chat template, if it is not in [`TOKENIZER_CONFIG`].
pub(super) const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// All that a folder says of its texts but the tokenizer itself.
#[derive(Clone, Debug)]
pub(super) struct TextConfig {
    /// The most tokens of one item, special tokens included.
    pub tokens_max: usize,
    /// Whether sentence-transformers puts texts into lower case.
    pub lowercase: bool,
    pub tokenizer: TokenizerConfig,
}

/// The first of [`SENTENCE_FILES`].
pub(super) struct SentenceFile {
    pub path: PathBuf,
    pub content: SentenceConfig,
}

#[derive(Default, Deserialize)]
pub(super) struct SentenceConfig {
    max_seq_length: Option<usize>,
    #[serde(default, deserialize_with = "null_as_default")]
    do_lower_case: bool,
    /// What the transformer is loaded for, from sentence-transformers 6 on.
    pub transformer_task: Option<String>,
    /// Overrides the same keys of `tokenizer_config.json`.
    processor_kwargs: Option<Map<String, Value>>,
    /// Its older name, which counts where both are there.
    tokenizer_args: Option<Map<String, Value>>,
    /// Parameters with which the model and its configuration are loaded, each with its older name.
    model_kwargs: Option<Map<String, Value>>,
    model_args: Option<Map<String, Value>>,
    config_kwargs: Option<Map<String, Value>>,
    config_args: Option<Map<String, Value>>,
    processing_kwargs: Option<Processing>,
    query_length: Option<usize>,
    document_length: Option<usize>,
    /// Tokens that are put behind queries, and another folder's tokenizer.
    query_expansion: Option<Value>,
    tokenizer_name_or_path: Option<Value>,
    /// What kinds of inputs the model takes, and how.
    modality_config: Option<Map<String, Value>>,
}

/// A kind of inputs that sentence-transformers turns into texts by the chat template. A model that takes this kind treats texts the
/// same way.
const MESSAGES: &str = "message";

/// What is taken of classes of tokenizers.
const CLASSES_TAKEN: &str = "classes whose tokenizers it builds as transformers does. If transformers makes the same of tokenizer.json with \
                             `\"tokenizer_class\": \"PreTrainedTokenizerFast\"`, set that in tokenizer_config.json";

/// If such a folder's tokenizer is byte-level, transformers does not use this class, but takes tokenizer.json as it is.
const LLAMA: &str = "LlamaTokenizer";

/// Whether transformers takes a folder's tokenizer for one: it looks for this word.
fn is_byte_level(transformer: &Path) -> bool {
    std::fs::read_to_string(transformer.join("tokenizer.json"))
        .is_ok_and(|text| text.contains("\"ByteLevel\""))
}

/// What of the transformer's outputs counts.
const OUTPUTS: [&str; 2] = ["last_hidden_state", "logits"];

/// Parameters of each call of the tokenizer.
#[derive(Clone, Default, Deserialize)]
struct Processing {
    common: Option<ProcessingTexts>,
    text: Option<ProcessingTexts>,
}

#[derive(Clone, Default, Deserialize)]
struct ProcessingTexts {
    max_length: Option<usize>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Parameters for loading a model or its configuration that change no vector, except for rounding.
const LOADING: [&str; 15] = [
    "add_pooling_layer",
    "attn_implementation",
    "cache_dir",
    "device_map",
    "dtype",
    "local_files_only",
    "low_cpu_mem_usage",
    "revision",
    "token",
    "torch_dtype",
    "trust_remote_code",
    "unpad_inputs",
    "use_cache",
    "use_memory_efficient_attention",
    "use_safetensors",
];

/// Parameters with which transformers puts other special tokens around texts than `tokenizer.json` does.
const SPECIAL_AROUND: [&str; 2] = ["add_bos_token", "add_eos_token"];

/// Parameters of the tokenizer's calls that change no token of a text.
const CALLS: [&str; 4] = ["padding", "pad_to_multiple_of", "return_attention_mask", "return_tensors"];

impl SentenceFile {
    /// # Errors
    /// The file is malformed.
    pub fn read(transformer: &Path) -> Result<Self, LoadError> {
        for name in SENTENCE_FILES {
            let path = transformer.join(name);
            if optional::<Map<String, Value>>(&path)?.is_some_and(|content| !content.is_empty()) {
                let content = optional(&path)?.unwrap_or_default();
                let file = Self { path, content };
                file.check()?;
                return Ok(file);
            }
        }
        Ok(Self::absent(transformer))
    }

    /// That of a folder in which no such file counts.
    pub fn absent(transformer: &Path) -> Self {
        Self { path: transformer.join(SENTENCE_FILES[0]), content: SentenceConfig::default() }
    }

    /// Refuses parameters that would give other vectors.
    fn check(&self) -> Result<(), LoadError> {
        let own = &self.content;
        if own.modality_config.as_ref().is_some_and(|all| all.contains_key(MESSAGES)) {
            let found = format!("modality_config.{MESSAGES}, texts in a chat template");
            return Err(unsupported(&self.path, found, "models that take texts as they are"));
        }
        let output = own.modality_config.as_ref().and_then(|all| all.get("text")?.get("method_output_name"));
        if let Some(name) = output.filter(|name| !OUTPUTS.contains(&name.as_str().unwrap_or_default())) {
            let found = format!("modality_config.text.method_output_name {name}");
            return Err(unsupported(&self.path, found, &OUTPUTS.join(", ")));
        }
        let others = [
            ("query_expansion", &own.query_expansion),
            ("tokenizer_name_or_path", &own.tokenizer_name_or_path),
        ];
        if let Some((key, Some(value))) = others.iter().find(|(_, value)| value.is_some()) {
            return Err(unsupported(&self.path, format!("{key} {value}"), "models without it"));
        }
        let loading = [
            ("model_kwargs", &own.model_kwargs),
            ("model_args", &own.model_args),
            ("config_kwargs", &own.config_kwargs),
            ("config_args", &own.config_args),
        ];
        for (name, all) in loading {
            self.takes_only(name, all.iter().flatten(), &LOADING)?;
        }
        let processing = own.processing_kwargs.iter();
        for (name, of) in processing.flat_map(|all| [("common", &all.common), ("text", &all.text)]) {
            let others = of.iter().flat_map(|texts| &texts.others);
            // This is also the behaviour without the key.
            let cuts =
                |value: &Value| value.as_bool() == Some(true) || value.as_str() == Some("longest_first");
            let others = others.filter(|(key, value)| *key != "truncation" || !cuts(value));
            self.takes_only(&format!("processing_kwargs.{name}"), others, &CALLS)?;
        }
        Ok(())
    }

    fn takes_only<'a>(
        &self,
        name: &str,
        mut given: impl Iterator<Item = (&'a String, &'a Value)>,
        known: &[&str],
    ) -> Result<(), LoadError> {
        match given.find(|(key, value)| !value.is_null() && !known.contains(&key.as_str())) {
            None => Ok(()),
            Some((key, value)) => {
                let found = format!("{name}.{key} {value}");
                Err(unsupported(&self.path, found, &known.join(", ")))
            }
        }
    }

    /// The file's name.
    pub fn name(&self) -> String {
        self.path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    }
}

/// Refuses a tokenizer with a chat template. In a folder without `modules.json` sentence-transformers 6 puts every text into it. With
/// that file it does so only for [`MESSAGES`].
///
/// # Errors
/// There is one, or the file of the tokenizer is malformed.
pub(super) fn refuse_chat_template(transformer: &Path) -> Result<(), LoadError> {
    const TAKES: &str = "folders without modules.json if their tokenizer has none, because sentence-transformers 6 puts texts into it. If \
                         the model was trained on texts as they are, remove the template";
    let (file, config) = (transformer.join(CHAT_TEMPLATE), transformer.join(TOKENIZER_CONFIG));
    if file.exists() {
        return Err(unsupported(&file, "a chat template".into(), TAKES));
    }
    let own: Map<String, Value> = optional(&config)?.unwrap_or_default();
    match own.get("chat_template") {
        None | Some(Value::Null) => Ok(()),
        Some(_) => Err(unsupported(&config, "a `chat_template`".into(), TAKES)),
    }
}

impl TextConfig {
    /// As the transformer's folder says, for the model of its `config.json`.
    ///
    /// # Errors
    /// Names the file and what in it is malformed or not supported.
    pub fn read(transformer: &Path, sentence: &SentenceFile, spec: &Spec) -> Result<Self, LoadError> {
        let path = transformer.join(TOKENIZER_CONFIG);
        let own: Map<String, Value> = optional(&path)?.unwrap_or_default();
        let SentenceFile { path: sentence_path, content: sentence } = sentence;
        let kwargs =
            sentence.tokenizer_args.clone().or_else(|| sentence.processor_kwargs.clone()).unwrap_or_default();
        // transformers ignores these keys in its own file, but not in this one.
        if let Some(key) =
            SPECIAL_AROUND.iter().find(|key| kwargs.get(**key).is_some_and(|value| !value.is_null()))
        {
            let found = format!("processor_kwargs.{key} {}", kwargs[*key]);
            return Err(unsupported(
                sentence_path,
                found,
                "special tokens as tokenizer.json puts them around texts",
            ));
        }
        let files = TokenFiles::read(transformer, &own, &kwargs)?;
        let own: Map<String, Value> = own.into_iter().chain(kwargs.clone()).collect();
        let mut tokenizer: TokenizerConfig = json::of_keys(&path, &own)?;
        if let Some(side) = tokenizer.truncation_side.as_ref().filter(|side| *side != "right") {
            return Err(unsupported(&path, format!("truncation_side `{side}`"), "`right`"));
        }
        if tokenizer.split_special_tokens == Some(true) {
            let takes = "tokenizers that find special tokens in texts";
            return Err(unsupported(&path, "`split_special_tokens`".into(), takes));
        }
        let own_length = tokenizer.model_max_length.map(|tokens| tokens as usize);
        // The cast saturates, which is what "unlimited" should do.
        let most = match sentence.max_seq_length {
            Some(tokens) if !kwargs.contains_key("model_max_length") => Some(tokens),
            _ => own_length,
        };
        let is_set = sentence.max_seq_length.is_some() || kwargs.contains_key("model_max_length");
        if let Some(tokens) = most.filter(|tokens| is_set && *tokens > spec.dims.positions)
            && spec.positions == Positions::Rotary
        {
            let takes = format!(
                "at most {}, its positions (max_position_embeddings or n_positions). Rotary positions have no end, so \
                 sentence-transformers takes longer texts: raise that number in config.json, in a copy of the folder",
                spec.dims.positions
            );
            return Err(unsupported(sentence_path, format!("a length of {tokens} tokens"), &takes));
        }
        let tokens_max = most.map_or(spec.dims.positions, |tokens| tokens.min(spec.dims.positions));
        let processing = sentence.processing_kwargs.clone().unwrap_or_default();
        let others = [
            ("processing_kwargs.common.max_length", processing.common.unwrap_or_default().max_length),
            ("processing_kwargs.text.max_length", processing.text.unwrap_or_default().max_length),
            ("query_length", sentence.query_length),
            ("document_length", sentence.document_length),
        ];
        for (key, length) in others {
            if let Some(length) = length.filter(|length| *length != tokens_max) {
                let takes = format!("one length for all texts, here {tokens_max}");
                return Err(unsupported(sentence_path, format!("{key} {length}"), &takes));
            }
        }
        let class = tokenizer.tokenizer_class.as_ref().or(spec.tokenizer_class.as_ref());
        tokenizer.class = match Class::of(&spec.model_type, class.map(String::as_str)) {
            Ok(class) => class,
            Err(name) if name == LLAMA && is_byte_level(transformer) => Class::AsFile,
            Err(name) => return Err(unsupported(&path, format!("the class `{name}`"), CLASSES_TAKEN)),
        };
        tokenizer.files = files;
        Ok(Self { tokens_max, lowercase: sentence.do_lower_case, tokenizer })
    }
}
