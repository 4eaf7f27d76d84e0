//! Turns the vectors that a pass makes into embeddings, sparse vectors or scores. Each kind of output has items of its own.

use rayon::ThreadPool;
use vramq_schemas::{EmbeddingFormat, Input, Output, Params};

use crate::engine::{InvalidInput, Item, OutputMax, PassError, ScoredItem, SparseItem};

use super::checkpoint::Checkpoint;
use super::config::ModelConfig;
use super::dense::Dense;
use super::families::Sequence;
use super::head::Head;
use super::sparse::SparseConfig;
use super::tokens::Tokens;
use super::{Backend, LoadError};

/// The kind of a model's outputs, and what makes them.
pub(super) enum Outputs {
    Embeddings {
        /// Layers that transform the vectors first.
        dense: Option<Dense>,
        /// Elements of an output.
        width: usize,
    },
    Sparse(SparseConfig),
    Scores(Head),
}

impl Outputs {
    /// # Errors
    /// The weights behind the layers cannot be loaded.
    pub fn load(config: &ModelConfig) -> Result<Self, LoadError> {
        Ok(match (&config.sparse, &config.spec.classifier) {
            (Some(sparse), _) => Self::Sparse(sparse.clone()),
            (None, Some(classifier)) => {
                let hidden = config.spec.dims.hidden;
                Self::Scores(Head::load(&mut Checkpoint::open(config)?, classifier, hidden)?)
            }
            (None, None) => Self::Embeddings {
                dense: Dense::load(&config.dense, config.dense_normalize)?,
                width: config.width(),
            },
        })
    }

    /// The most that an output takes.
    pub fn max(&self, tokens: &Tokens, params: &Params) -> OutputMax {
        match self {
            Self::Embeddings { width, .. } => {
                // Parameters that cannot be read are refused by `check`.
                let format = tokens.format(params).unwrap_or_default();
                let elements = format.dimensions.map_or(*width as u64, u64::from);
                OutputMax::Embedding { elements, format }
            }
            Self::Sparse(sparse) => sparse.output_max(params),
            Self::Scores(head) => OutputMax::Text(head.output_bytes_max()),
        }
    }

    /// Whether there are such inputs and parameters for these outputs.
    ///
    /// # Errors
    /// Names the first input or the parameter that is not taken.
    pub fn check(&self, tokens: &Tokens, inputs: &[Input], params: &Params) -> Result<(), InvalidInput> {
        match self {
            Self::Embeddings { .. } => tokens.check(inputs, params),
            Self::Sparse(sparse) => sparse.check(tokens, inputs, params),
            Self::Scores(_) => tokens.check_scored(inputs, params),
        }
    }

    /// Inputs as items, in order.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn items(
        &self,
        tokens: &Tokens,
        inputs: &[Input],
        params: &Params,
    ) -> Result<Vec<Item>, InvalidInput> {
        match self {
            Self::Embeddings { .. } => tokens.items(inputs, params),
            Self::Sparse(sparse) => sparse.items(tokens, inputs, params),
            Self::Scores(_) => tokens.scored(inputs, params),
        }
    }

    /// The tokens of an item; `None` if it is not of this kind.
    pub fn sequence<'a>(&self, item: &'a Item) -> Option<Sequence<'a>> {
        match (item, self) {
            (Item::Tokens { ids, .. }, Self::Embeddings { .. })
            | (Item::Sparse(SparseItem { ids, .. }), Self::Sparse(_)) => {
                Some(Sequence { ids, second_from: ids.len() })
            }
            (Item::Scored(item), Self::Scores(_)) => {
                Some(Sequence { ids: &item.ids, second_from: item.second_from })
            }
            _ => None,
        }
    }

    /// Runs a pass over items, of which `sequences` are the tokens. `threads` compute what the device does not.
    ///
    /// # Errors
    /// See [`PassError`].
    pub fn run(
        &self,
        backend: &dyn Backend,
        sequences: &[Sequence<'_>],
        items: &[Item],
        threads: &ThreadPool,
    ) -> Result<Vec<Output>, PassError> {
        match self {
            Self::Embeddings { dense: None, width } => {
                embeddings(items, *width, |take| backend.run(sequences, take))
            }
            Self::Embeddings { dense: Some(dense), width } => {
                let vectors = dense.apply(vectors(backend, sequences)?, threads);
                embeddings(items, *width, |take| {
                    vectors.into_iter().enumerate().for_each(|(at, vector)| take(at, vector));
                    Ok(())
                })
            }
            Self::Sparse(sparse) => sparse_vectors(sparse, backend, sequences, items),
            Self::Scores(head) => {
                let is_raw = |item: &Item| matches!(item, Item::Scored(ScoredItem { raw: true, .. }));
                let raw: Vec<bool> = items.iter().map(is_raw).collect();
                head.outputs(&vectors(backend, sequences)?, &raw, threads)
            }
        }
    }
}

/// The vector of each item, as pooling makes it. All are checked here, because the layers behind
/// pooling may turn a number that is not finite into a finite one.
fn vectors(backend: &dyn Backend, sequences: &[Sequence<'_>]) -> Result<Vec<Vec<f32>>, PassError> {
    let mut vectors: Vec<Vec<f32>> = Vec::with_capacity(sequences.len());
    backend.run(sequences, &mut |_, vector| vectors.push(vector))?;
    for (at, vector) in vectors.iter().enumerate() {
        finite(at, vector.iter().position(|element| !element.is_finite()))?;
    }
    Ok(vectors)
}

/// An embedding of each item, of the first `width` elements of its vector: `run` gives the vectors, by the items' places.
fn embeddings(
    items: &[Item],
    width: usize,
    run: impl FnOnce(&mut dyn FnMut(usize, Vec<f32>)) -> Result<(), PassError>,
) -> Result<Vec<Output>, PassError> {
    let mut outputs = Vec::with_capacity(items.len());
    let mut checked = Ok(());
    run(&mut |at, mut vector| {
        vector.truncate(width);
        let format = match items.get(at) {
            Some(Item::Tokens { format, .. }) => *format,
            // `Outputs::sequence` has refused it.
            _ => EmbeddingFormat::default(),
        };
        let embedding = format.embedding(vector);
        if checked.is_ok() {
            checked = finite(at, embedding.values.first_not_finite());
        }
        outputs.push(Output::Embedding(embedding));
    })?;
    checked.map(|()| outputs)
}

/// A sparse vector of each item, from its scores of the vocabulary.
fn sparse_vectors(
    sparse: &SparseConfig,
    backend: &dyn Backend,
    sequences: &[Sequence<'_>],
    items: &[Item],
) -> Result<Vec<Output>, PassError> {
    // One at a time: the scores of all items would take far more memory than the outputs.
    let mut outputs = Vec::with_capacity(items.len());
    let mut checked = Ok(());
    backend.run(sequences, &mut |at, scores| {
        let Some(item) = items.get(at) else { return };
        match sparse.output(item, &scores) {
            Ok(output) => outputs.push(output),
            Err(error) => checked = Err(PassError::Failed(format!("item {at}: {error}"))),
        }
    })?;
    checked.map(|()| outputs)
}

/// Fails if an item's vector has an element that is infinite or NaN, which would spoil every comparison in a vector store. The
/// worker then finds the item at fault by running jobs alone.
///
/// # Errors
/// There is such an element.
fn finite(item: usize, first_not_finite: Option<usize>) -> Result<(), PassError> {
    match first_not_finite {
        None => Ok(()),
        Some(element) => Err(PassError::Failed(format!(
            "element {element} of the vector of item {item} is not a finite number"
        ))),
    }
}
