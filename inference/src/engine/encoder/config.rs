//! Reads the configuration files of a model folder, and checks that the engine supports everything in them.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use super::dense::DenseConfig;
use super::families::{self, MlmHead, SCORE_MODULES, ScoreFunction, Spec};
use super::modules::{MODULES, MODULES_TAKEN, Module, Pooling, Task};
use super::saved_config::{OF_VECTORS, PROMPTS, Prompts, SavedConfig};
use super::shards::{INDEX, Index, WEIGHTS};
use super::sparse::SparseConfig;
use super::text_config::{SENTENCE_FILES, SentenceFile, TOKENIZER_CONFIG, TextConfig, refuse_chat_template};
use super::token_keys::TOKEN_FILES;
use super::{LoadError, json};
use crate::revision::RevisionHash;

/// The sizes that the forward pass depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    /// Heads of keys and values; each is shared by as many heads of queries.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head: usize,
    pub feed_forward: usize,
    /// The upper map of the feed-forward makes two halves of that width, which become one by a product.
    pub is_gated: bool,
    pub vocabulary: usize,
    /// The most tokens that the position embeddings have rows for.
    pub positions: usize,
    /// Of the checkpoint; zero in families without them.
    pub token_types: usize,
    /// An item's vector has an element for each token of the vocabulary.
    pub is_sparse: bool,
}

impl Dims {
    /// Width of the queries, and of what attention makes.
    pub fn attention_columns(&self) -> usize {
        self.heads * self.head
    }

    /// Width of the keys; values have the same.
    pub fn kv_columns(&self) -> usize {
        self.kv_heads * self.head
    }

    /// Width of queries, keys and values.
    pub fn qkv_columns(&self) -> usize {
        self.attention_columns() + 2 * self.kv_columns()
    }

    /// Elements of the vector that a pass makes of an item.
    pub fn vector_columns(&self) -> usize {
        if self.is_sparse { self.vocabulary } else { self.hidden }
    }

    /// Width of what the upper map of the feed-forward makes.
    pub fn up_columns(&self) -> usize {
        if self.is_gated { 2 * self.feed_forward } else { self.feed_forward }
    }
}

/// All of a model folder but weights and vocabulary.
#[derive(Clone, Debug)]
pub(super) struct ModelConfig {
    /// Where `config.json`, `tokenizer.json` and the weights are.
    pub transformer: PathBuf,
    pub spec: Spec,
    /// The file of the weights, or the index of several.
    pub weights: PathBuf,
    pub pooling: Pooling,
    /// Whether pooling makes vectors of length 1.
    pub normalize: bool,
    /// Layers behind pooling, in order. If there are any, `dense_normalize` counts instead of `normalize`.
    pub dense: Vec<DenseConfig>,
    pub dense_normalize: bool,
    /// How many elements of a vector are kept, where the folder says so. What is left need not have length 1, as in sentence-transformers.
    kept: Option<NonZeroUsize>,
    /// How scores of the vocabulary become the output; `None`: the model's vectors are not sparse.
    pub sparse: Option<SparseConfig>,
    pub texts: TextConfig,
    pub prompts: Prompts,
    /// What the outputs depend on: each file's name in the revision's hash, and where it is, if it is there.
    files: Vec<(String, PathBuf)>,
}

/// PyTorch's own files of weights. They are not read, because reading one runs what is in it.
const PICKLES: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// The file of an adapter (LoRA), which transformers adds to the weights beside it, or to those of another model.
pub(super) const ADAPTER: &str = "adapter_config.json";

/// What to do with one.
pub(super) const MERGE: &str = "weights in which the adapter is merged. Merge it once in Python: load the model with the package `peft`, \
                                call `merge_and_unload()` of its transformer, and save it";

/// What to do with pickles.
pub(super) const CONVERT: &str = "model.safetensors. Convert it once in Python, where you trust its author: \
                                  `SentenceTransformer(\"FOLDER\").save(\"OUT\")`, or for a model of transformers \
                                  `AutoModel.from_pretrained(\"FOLDER\").save_pretrained(\"OUT\")` with the class of its task, \
                                  and the same of its AutoTokenizer";

impl ModelConfig {
    /// Reads a folder in the Sentence-Transformers layout. One without `modules.json` is a classifier if `config.json` says so;
    /// else it is taken as sentence-transformers takes it: mean pooling over the transformer's tokens, no normalisation, and none of
    /// the other files of sentence-transformers.
    ///
    /// # Errors
    /// Names the file and what in it is missing, malformed, or not supported.
    pub fn read(folder: &Path) -> Result<Self, LoadError> {
        let (transformer, task) = match Module::list(&folder.join(MODULES))? {
            None => (folder.to_owned(), Task::Unsaid),
            Some(modules) => Task::read(folder, &modules)?,
        };
        refuse_adapter(&transformer)?;
        refuse_pickles(&transformer)?;
        let with_head = matches!(task, Task::Unsaid | Task::Score);
        let mut spec = families::read(&transformer.join("config.json"), with_head)?;
        let has_modules = !matches!(task, Task::Unsaid);
        let (own, sentence) = saved_files(folder, &transformer, has_modules)?;
        if task.leaves_prompts_out()? && own.has_prompts() {
            let found = "`include_prompt: false` in a model with prompts".into();
            return Err(unsupported(&own.path, found, "pooling over the prompt's tokens, too"));
        }
        // Of other classifiers sentence-transformers does not read the prompts.
        let is_cross_encoder = matches!(task, Task::Score) && own.is_cross_encoder();
        let mut files = known_files(folder, &transformer, has_modules.then_some(&sentence));
        let (mut dense, mut kept, mut sparse) = (Vec::new(), None, None);
        let (pooling, normalize) = match task {
            Task::Embed { pooling, dense: layers, normalize } => {
                needs_vectors_of_tokens(&sentence)?;
                files.push(("pooling".to_owned(), pooling.clone()));
                dense = read_dense(layers, spec.dims.hidden, &mut files)?;
                kept = own.kept();
                (Pooling::read(&pooling, spec.dims.hidden)?, normalize)
            }
            Task::Sparse { pooling, says_so } => {
                needs_mlm(&sentence, says_so)?;
                spec.set_mlm(MlmHead::read(&transformer.join("config.json"))?);
                files.push(("pooling".to_owned(), pooling.clone()));
                sparse = Some(SparseConfig::read(&pooling, spec.dims.vocabulary, own.elements_max())?);
                (Pooling::Max, false)
            }
            Task::Unsaid if spec.generates.is_some() => return Err(generates(&transformer, &spec)),
            task @ (Task::Unsaid | Task::Score) => match (&spec.classifier, task) {
                (Some(classifier), _) => (classifier.head.pooling, false),
                (None, Task::Unsaid) => {
                    refuse_chat_template(&transformer)?;
                    (Pooling::Mean, false)
                }
                (None, _) => {
                    let found = "the module Transformer alone, and not the head of a classifier".into();
                    return Err(unsupported(&folder.join(MODULES), found, MODULES_TAKEN));
                }
            },
        };
        let weights = weights(&transformer, &mut files)?;
        set_score_function(&mut spec, &own)?;
        let texts = TextConfig::read(&transformer, &sentence, &spec)?;
        Ok(Self {
            weights,
            pooling,
            normalize: normalize && dense.is_empty(),
            dense_normalize: normalize && !dense.is_empty(),
            kept,
            dense,
            sparse,
            texts,
            prompts: match spec.classifier {
                Some(_) if !is_cross_encoder => Prompts::default(),
                Some(_) => own.prompts(&[])?,
                None => own.prompts(&OF_VECTORS)?,
            },
            spec,
            transformer,
            files,
        })
    }

    /// Elements of the vectors that are the model's outputs.
    pub fn width(&self) -> usize {
        let made = self.dense.last().map_or(self.spec.dims.vector_columns(), |layer| layer.outputs);
        self.kept.map_or(made, |kept| made.min(kept.get()))
    }

    /// The model's revision: the content of all files that the outputs depend on, and the type that it computes in.
    /// `with_token_files`: also of [`TOKEN_FILES`].
    ///
    /// # Errors
    /// A file is there and cannot be read.
    pub fn revision(&self, element: &str, with_token_files: bool) -> Result<String, LoadError> {
        let mut hash = RevisionHash::default();
        let of_tokens = TOKEN_FILES.map(|name| (name.to_owned(), self.transformer.join(name)));
        for (name, path) in self.files.iter().chain(of_tokens.iter().filter(|_| with_token_files)) {
            hash.add_file(name, path).map_err(|source| LoadError::Read { path: path.clone(), source })?;
        }
        Ok(hash.finish(element))
    }
}

/// The files of every model that its outputs depend on, with the names under which they count for its revision. `sentence`: the file
/// that counts in a folder with `modules.json`.
fn known_files(folder: &Path, transformer: &Path, sentence: Option<&SentenceFile>) -> Vec<(String, PathBuf)> {
    let own = sentence.map(|_| [MODULES, PROMPTS].map(|name| (name.to_owned(), folder.join(name))));
    let of_sentence = sentence.map(SentenceFile::name);
    let names = [
        Some("config.json"),
        of_sentence.as_deref(),
        Some(TOKENIZER_CONFIG),
        Some("tokenizer.json"),
        Some(WEIGHTS),
    ];
    let in_transformer = names.into_iter().flatten().map(|name| (name.to_owned(), transformer.join(name)));
    own.into_iter().flatten().chain(in_transformer).collect()
}

/// What sentence-transformers has saved of a model and of its transformer. Without `modules.json` it ignores both files (seen with 6.2),
/// and so does this engine.
///
/// # Errors
/// A file that counts is malformed, or asks for what is not supported.
fn saved_files(
    folder: &Path,
    transformer: &Path,
    has_modules: bool,
) -> Result<(SavedConfig, SentenceFile), LoadError> {
    if has_modules {
        return Ok((SavedConfig::read(folder)?, SentenceFile::read(transformer)?));
    }
    let mut files = SENTENCE_FILES.into_iter().chain([PROMPTS]);
    if let Some(file) = files.find(|name| folder.join(name).exists()) {
        let folder = folder.display();
        tracing::warn!(%folder, file, "ignored a file of the model, because there is no modules.json beside it");
    }
    Ok((SavedConfig::absent(folder), SentenceFile::absent(transformer)))
}

/// The file with the weights, or with the index of several files, which are added to `files`.
fn weights(transformer: &Path, files: &mut Vec<(String, PathBuf)>) -> Result<PathBuf, LoadError> {
    let Some(index) = Index::of_folder(transformer)? else { return Ok(transformer.join(WEIGHTS)) };
    let path = transformer.join(INDEX);
    files.push((INDEX.to_owned(), path.clone()));
    files.extend(index.files().into_iter().map(|name| (name.to_owned(), transformer.join(name))));
    Ok(path)
}

/// Refuses a folder with an adapter: its weights alone are those of another model.
fn refuse_adapter(transformer: &Path) -> Result<(), LoadError> {
    let path = transformer.join(ADAPTER);
    if path.exists() { Err(unsupported(&path, "an adapter (LoRA)".into(), MERGE)) } else { Ok(()) }
}

/// Refuses the folder of a transformer or a layer with weights in PyTorch's own format alone, before anything else in it is read.
fn refuse_pickles(folder: &Path) -> Result<(), LoadError> {
    let has = |name: &str| folder.join(name).exists();
    match PICKLES.iter().find(|name| has(name)) {
        Some(name) if !has(WEIGHTS) && !has(INDEX) => {
            Err(unsupported(&folder.join(name), "weights as a pickle".into(), CONVERT))
        }
        _ => Ok(()),
    }
}

/// A language model without `modules.json` is refused, although its tokens could be pooled: it chats, or ranks by a word that it
/// generates.
fn generates(transformer: &Path, spec: &Spec) -> LoadError {
    const TAKES: &str = "models for embeddings with their modules.json, and rerankers with a head (`…ForSequenceClassification`). If \
                         it is an embedding model, take the folder as sentence-transformers saved it. A chat model or a reranker \
                         of generated words (Qwen3-Reranker) can run as a program: see docs/process-models.md";
    let architecture = spec.generates.as_deref().unwrap_or_default();
    let found = format!("the architecture `{architecture}`, which generates text, and no {MODULES}");
    unsupported(&transformer.join("config.json"), found, TAKES)
}

/// Refuses pooling if the transformer's output is not a vector per token, but for example a score.
fn needs_vectors_of_tokens(sentence: &SentenceFile) -> Result<(), LoadError> {
    const TASK: &str = "feature-extraction";
    match sentence.content.transformer_task.as_deref() {
        None | Some(TASK) => Ok(()),
        Some(task) => {
            let found = format!("transformer_task `{task}` before Pooling");
            Err(unsupported(&sentence.path, found, &format!("`{TASK}`")))
        }
    }
}

/// Refuses sparse vectors unless the module or the transformer's file says that it is a masked language model.
fn needs_mlm(sentence: &SentenceFile, says_so: bool) -> Result<(), LoadError> {
    const TASK: &str = "fill-mask";
    match sentence.content.transformer_task.as_deref() {
        Some(TASK) => Ok(()),
        None if says_so => Ok(()),
        task => {
            let found = format!("transformer_task `{}` before SpladePooling", task.unwrap_or("(none)"));
            Err(unsupported(&sentence.path, found, &format!("`{TASK}`")))
        }
    }
}

/// Takes the function that makes scores of logits from the file of sentence-transformers, if this file names one.
fn set_score_function(spec: &mut Spec, own: &SavedConfig) -> Result<(), LoadError> {
    if let (Some(classifier), Some(module)) = (&mut spec.classifier, own.activation()) {
        let refused = || unsupported(&own.path, format!("the activation function `{module}`"), SCORE_MODULES);
        classifier.function = ScoreFunction::of_module(module).ok_or_else(refused)?;
    }
    Ok(())
}

/// The layers behind the pooling of vectors of `width` elements. Adds their files to those that the outputs depend on.
fn read_dense(
    layers: Vec<(String, PathBuf)>,
    mut width: usize,
    files: &mut Vec<(String, PathBuf)>,
) -> Result<Vec<DenseConfig>, LoadError> {
    let mut dense = Vec::with_capacity(layers.len());
    for (name, folder) in layers {
        refuse_pickles(&folder)?;
        let layer = DenseConfig::read(&folder, width)?;
        width = layer.outputs;
        files.extend(layer.files().map(|(file, path)| (format!("{name}/{file}"), path)));
        dense.push(layer);
    }
    Ok(dense)
}

/// For keys whose default is false or empty: `null` means the same as a missing key.
pub(super) fn null_as_default<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

pub(super) fn unsupported(path: &Path, found: String, takes: &str) -> LoadError {
    LoadError::Unsupported { path: path.to_owned(), found, takes: takes.to_owned() }
}

pub(super) fn required<T: DeserializeOwned>(path: &Path) -> Result<T, LoadError> {
    let text = fs::read(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    json::parse(path, &text)
}

/// `None` if there is no such file.
pub(super) fn optional<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, LoadError> {
    match required(path) {
        Ok(value) => Ok(Some(value)),
        Err(LoadError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
