//! References for lengths and shapes that no fixture's text has: token ids, and the vectors that transformers made of them
//! (models/lengths.py).

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use vramq_inference::engine::encoder::Source;
use vramq_inference::engine::{Item, SparseItem};
use vramq_schemas::EmbeddingFormat;

use crate::bert::{RandomBert, Written, fixture, rows};
use crate::programs::root;

/// The most tokens that a vocabulary of the tests' models of sparse vectors has.
pub const VOCABULARY_MAX: usize = 1 << 15;

/// A model, token ids of several lengths, and the vectors that transformers made of them.
#[derive(Debug)]
pub struct Lengths {
    pub source: Source,
    is_sparse: bool,
    tokens: Vec<Vec<u32>>,
    vectors: Vec<Vec<f32>>,
    /// A model of random weights is on disk as long as this.
    _written: Option<Written>,
}

impl Lengths {
    /// Of a fixture, or of a `bert-…` as [`RandomBert::named`] takes it.
    ///
    /// # Errors
    /// It has no reference.
    pub fn read(name: &str) -> Result<Self> {
        let folder = folder();
        let path = folder.join(format!("{name}.json"));
        let tokens =
            fs::read(&path).with_context(|| format!("read {}: models/lengths.py", path.display()))?;
        let tokens: Vec<Vec<u32>> = serde_json::from_slice(&tokens)?;
        let vectors = rows(&folder.join(format!("{name}.f32")), tokens.len())?;
        let written = match name.starts_with("bert-") {
            true => Some(RandomBert::named(name)?.write()?),
            false => None,
        };
        let source = written.as_ref().map_or_else(|| fixture(name), Written::source);
        Ok(Self { source, is_sparse: name.starts_with("tiny-splade"), tokens, vectors, _written: written })
    }

    /// Those of all models, in their order.
    ///
    /// # Errors
    /// There are none.
    pub fn names() -> Result<Vec<String>> {
        let mut names: Vec<String> = fs::read_dir(folder())?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|own| own == "json"))
            .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
            .collect();
        ensure!(!names.is_empty(), "{} has no references", folder().display());
        names.sort();
        Ok(names)
    }

    /// All lengths that it has.
    pub fn all(&self) -> Vec<usize> {
        self.tokens.iter().map(Vec::len).collect()
    }

    /// Items of these lengths, and their vectors. transformers computes nothing of no tokens; the pooling of sentence-transformers,
    /// which divides a sum by a number of tokens that is not zero, makes zeros of them.
    ///
    /// # Errors
    /// The reference has no item of one of them.
    pub fn of(&self, lengths: &[usize]) -> Result<(Vec<Item>, Vec<Vec<f32>>)> {
        let width = self.vectors.first().map_or(0, Vec::len);
        let found = |length: &usize| {
            if *length == 0 {
                return Ok((Vec::new(), vec![0.0; width]));
            }
            let at = self.tokens.iter().position(|ids| ids.len() == *length);
            let at =
                at.with_context(|| format!("models/lengths.py has no {length} tokens for {}", self.source))?;
            Ok((self.tokens[at].clone(), self.vectors[at].clone()))
        };
        let pairs = lengths.iter().map(found).collect::<Result<Vec<_>>>()?;
        Ok(pairs.into_iter().map(|(ids, vector)| (self.item(ids), self.padded(vector))).unzip())
    }

    fn item(&self, ids: Vec<u32>) -> Item {
        let ids = ids.into();
        match self.is_sparse {
            true => Item::Sparse(SparseItem { ids, elements_max: None }),
            false => Item::Tokens { ids, format: EmbeddingFormat::default() },
        }
    }

    /// As long as [`vectors`](crate::encoders::vectors) makes them.
    fn padded(&self, mut vector: Vec<f32>) -> Vec<f32> {
        if self.is_sparse {
            vector.resize(VOCABULARY_MAX, 0.0);
        }
        vector
    }
}

fn folder() -> PathBuf {
    root().join("inference/tests/fixtures/lengths")
}
