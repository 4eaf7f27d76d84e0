//! Models to test encoders with: the fixtures, and BERTs of any shape with random weights.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tempfile::TempDir;
use vramq_inference::engine::encoder::Source;
use vramq_schemas::Input;

use crate::programs::root;
use crate::weights::{Draw, Tensor, safetensors};

/// A model of inference/tests/fixtures.
pub fn fixture(name: &str) -> Source {
    Source::Folder(root().join("inference/tests/fixtures").join(name))
}

/// A fixture's texts, and the vectors that an independent library made of them.
///
/// # Errors
/// It has none.
pub fn reference(name: &str) -> Result<(Vec<String>, Vec<Vec<f32>>)> {
    let folder = root().join("inference/tests/fixtures").join(name);
    let texts: Vec<String> = serde_json::from_slice(&fs::read(folder.join("texts.json"))?)?;
    let vectors = rows(&folder.join("vectors.f32"), texts.len())?;
    Ok((texts, vectors))
}

/// A fixture's pairs and lone texts, and the logits that transformers made of them: one for each label.
///
/// # Errors
/// It has none.
pub fn logits(name: &str) -> Result<(Vec<Input>, Vec<Vec<f32>>)> {
    let folder = root().join("inference/tests/fixtures").join(name);
    let texts: Vec<Vec<String>> = serde_json::from_slice(&fs::read(folder.join("pairs.json"))?)?;
    let input = |texts: &Vec<String>| match &texts[..] {
        [query, document] => Ok(Input::Json(json!({"query": query, "document": document}).into())),
        [text] => Ok(Input::Text(text.clone())),
        _ => anyhow::bail!("{name}: {texts:?} are no pair"),
    };
    let inputs = texts.iter().map(input).collect::<Result<Vec<_>>>()?;
    let logits = rows(&folder.join("logits.f32"), inputs.len())?;
    Ok((inputs, logits))
}

/// The numbers of a file, in so many rows.
///
/// # Errors
/// It is missing, or does not have as many.
pub fn rows(path: &Path, count: usize) -> Result<Vec<Vec<f32>>> {
    let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let numbers: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let is_whole = bytes.len() % 4 == 0 && !numbers.is_empty() && numbers.len().is_multiple_of(count.max(1));
    ensure!(is_whole, "{} has {} bytes, which are not {count} rows", path.display(), bytes.len());
    Ok(numbers.chunks(numbers.len() / count).map(<[f32]>::to_vec).collect())
}

/// A shape of a BERT. Its vocabulary is that of the fixtures.
#[derive(Clone, Copy, Debug)]
pub struct RandomBert {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub feed_forward: usize,
    pub positions: usize,
    /// The factor of all weights.
    pub scale: f32,
    /// A token whose embedding is not a number, as in a damaged checkpoint.
    pub broken_token: Option<usize>,
}

impl Default for RandomBert {
    fn default() -> Self {
        Self {
            layers: 1,
            hidden: 64,
            heads: 2,
            feed_forward: 128,
            positions: 256,
            scale: 1.0,
            broken_token: None,
        }
    }
}

/// A model on disk while this lives.
#[derive(Debug)]
pub struct Written {
    folder: TempDir,
}

impl Written {
    pub(crate) fn new(folder: TempDir) -> Self {
        Self { folder }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn source(&self) -> Source {
        Source::Folder(self.folder.path().to_owned())
    }
}

/// The size of the fixtures' vocabulary.
const VOCABULARY: usize = 273;

/// The tensor with a row for each token.
const WORDS: &str = "embeddings.word_embeddings.weight";

impl RandomBert {
    /// `bert-LAYERSxWIDTHxHEADSxFEED_FORWARD`. models/lengths.py draws the same weights by itself.
    ///
    /// # Errors
    /// The name is another one.
    pub fn named(name: &str) -> Result<Self> {
        let sizes = name.strip_prefix("bert-").context("no BERT")?.split('x').map(str::parse);
        let sizes: Vec<usize> = sizes.collect::<Result<_, _>>().with_context(|| name.to_owned())?;
        let [layers, hidden, heads, feed_forward] = sizes[..] else { anyhow::bail!("{name} has no shape") };
        Ok(Self { layers, hidden, heads, feed_forward, ..Self::default() })
    }

    /// Writes it, with a fixture's tokenizer.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn write(&self) -> Result<Written> {
        let folder = tempfile::tempdir()?;
        for file in ["tokenizer.json", "vocab.txt"] {
            let from = root().join("inference/tests/fixtures/tiny-mean").join(file);
            fs::copy(&from, folder.path().join(file)).with_context(|| format!("copy {}", from.display()))?;
        }
        let config = json!({
            "model_type": "bert", "hidden_act": "gelu", "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "intermediate_size": self.feed_forward, "vocab_size": VOCABULARY,
            "max_position_embeddings": self.positions, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
        });
        fs::write(folder.path().join("config.json"), config.to_string())?;
        let tokenizer = json!({"tokenizer_class": "BertTokenizer", "model_max_length": self.positions});
        fs::write(folder.path().join("tokenizer_config.json"), tokenizer.to_string())?;
        fs::write(folder.path().join("model.safetensors"), self.safetensors())?;
        Ok(Written { folder })
    }

    /// Names and shapes of all tensors.
    fn tensors(&self) -> Vec<Tensor> {
        let (hidden, wide) = (self.hidden, self.feed_forward);
        let mut all = vec![
            (WORDS.to_owned(), vec![VOCABULARY, hidden]),
            ("embeddings.position_embeddings.weight".to_owned(), vec![self.positions, hidden]),
            ("embeddings.token_type_embeddings.weight".to_owned(), vec![2, hidden]),
        ];
        let mut pair = |name: &str, shape: Vec<usize>| {
            all.push((format!("{name}.bias"), vec![shape[0]]));
            all.push((format!("{name}.weight"), shape));
        };
        pair("embeddings.LayerNorm", vec![hidden]);
        for layer in 0..self.layers {
            let mut map = |name: &str, shape| pair(&format!("encoder.layer.{layer}.{name}"), shape);
            for which in ["query", "key", "value"] {
                map(&format!("attention.self.{which}"), vec![hidden, hidden]);
            }
            map("attention.output.dense", vec![hidden, hidden]);
            map("attention.output.LayerNorm", vec![hidden]);
            map("intermediate.dense", vec![wide, hidden]);
            map("output.dense", vec![hidden, wide]);
            map("output.LayerNorm", vec![hidden]);
        }
        all
    }

    fn safetensors(&self) -> Vec<u8> {
        let mut draw = Draw::default();
        safetensors(self.tensors().into_iter().map(|(name, shape)| {
            let mut elements = draw.tensor(&name, &shape);
            elements.iter_mut().for_each(|element| *element *= self.scale);
            if let Some(token) = self.broken_token.filter(|_| name == WORDS) {
                elements[token * self.hidden..][..self.hidden].fill(f32::NAN);
            }
            ((name, shape), elements)
        }))
    }
}
