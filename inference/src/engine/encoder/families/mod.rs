//! The families of models that the encoder runs: one reader for each makes a plain [`Spec`] of its `config.json`.
//!
//! The layer loop, the plans and the loaders know a `Spec` and no family. A new family is a new reader: what its
//! configuration calls the sizes, what its checkpoint calls the tensors, and what of it this engine does not run.

mod bert;
mod classifier;
mod distilbert;
mod mpnet;
mod roberta;

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::LoadError;
use super::config::Dims;
use super::forward::{Linear, Norm};

pub(super) use classifier::{Activation, Classifier, HeadNames, SCORE_MODULES, ScoreFunction};

/// All that loading and running a model depends on, whatever its family.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub dims: Dims,
    pub norm_eps: f32,
    pub positions: Positions,
    pub relative: Option<RelativeBias>,
    pub names: &'static Names,
    /// `None`: the model makes embeddings.
    pub classifier: Option<Classifier>,
}

/// The tokens of one item.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence<'a> {
    pub ids: &'a [u32],
    /// The first of them that is of the second token type; how many there are, if none is.
    pub second_from: usize,
}

impl Spec {
    /// Token types that items may have: a second one for pairs of texts, which only classifiers take.
    pub fn segments(&self) -> usize {
        if self.classifier.is_some() && self.dims.token_types > 1 { 2 } else { 1 }
    }

    /// The row of that table that each token of an item takes, in order.
    pub fn rows_of(&self, sequence: Sequence<'_>) -> impl Iterator<Item = u32> {
        let second_type = match self.segments() {
            1 => 0,
            _ => self.positions.rows(self.dims.positions) as u32,
        };
        let rows = self.positions.of(sequence.ids).enumerate();
        rows.map(move |(at, row)| if at < sequence.second_from { row } else { row + second_type })
    }

    /// Rows of the table that is added to the words' embeddings: one for each position of each token type.
    pub fn table_rows(&self) -> usize {
        self.segments() * self.positions.rows(self.dims.positions)
    }

    /// Distances between two tokens of a text, each way; zero without a relative bias.
    pub fn distances(&self) -> usize {
        self.relative.map_or(0, |_| 2 * self.dims.positions - 1)
    }
}

/// Which row of the position embeddings a token takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Positions {
    /// The token's place in its text.
    Place,
    /// As RoBERTa counts: rows up to that of the padding token's id are not for texts; the n-th token that is not
    /// padding takes the n-th row after it, and a padding token inside a text takes that row itself.
    SkipPadding { padding: u32 },
}

impl Positions {
    /// The first row of the checkpoint's table that any token takes. Rows count from here.
    pub fn first_row(self) -> usize {
        match self {
            Self::Place => 0,
            Self::SkipPadding { padding } => padding as usize,
        }
    }

    /// Rows that texts of up to `positions` tokens take.
    pub fn rows(self, positions: usize) -> usize {
        match self {
            Self::Place => positions,
            Self::SkipPadding { .. } => positions + 1,
        }
    }

    /// The row of each token of one item, in order.
    fn of(self, ids: &[u32]) -> impl Iterator<Item = u32> {
        let mut counted = 0;
        ids.iter().zip(0..).map(move |(id, place)| match self {
            Self::Place => place,
            Self::SkipPadding { padding } if *id == padding => 0,
            Self::SkipPadding { .. } => {
                counted += 1;
                counted
            }
        })
    }
}

/// A bias on attention's scores by the distance between two tokens, the same in all layers (Raffel et al. 2020).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RelativeBias {
    /// Half of them for keys after the query, half for the others.
    pub buckets: usize,
    /// All distances from here on share a bucket.
    pub distance_max: usize,
}

impl RelativeBias {
    /// The bucket of a key that stands `distance` tokens after the query. Near keys have a bucket for each distance,
    /// farther ones share, in logarithmic steps. In f32, as the reference computes it.
    pub fn bucket(&self, distance: isize) -> usize {
        let half = self.buckets / 2;
        let side = if distance > 0 { half } else { 0 };
        let (apart, exact) = (distance.unsigned_abs(), half / 2);
        if apart < exact {
            return side + apart;
        }
        let steps = (apart as f32 / exact as f32).ln() / (self.distance_max as f32 / exact as f32).ln();
        side + (exact + (steps * (half - exact) as f32) as usize).min(half - 1)
    }
}

/// What a family's checkpoint calls its tensors, without `.weight` and `.bias`.
#[derive(Debug)]
pub(super) struct Names {
    /// What all names begin with in files that hold a task's head too; others have no such prefix.
    pub prefix: &'static str,
    pub words: &'static str,
    pub positions: &'static str,
    pub token_types: Option<&'static str>,
    pub embedding_norm: &'static str,
    /// The relative bias: a row for each bucket, a column for each head.
    pub relative: &'static str,
    /// A layer's names are `LAYERS.N.` and a part below.
    pub layers: &'static str,
    /// Each linear map, with the maps of the checkpoint whose rows of outputs follow each other in it.
    pub linears: [(Linear, &'static [&'static str]); 4],
    pub norms: [(Norm, &'static str); 2],
    /// Without the prefix above.
    pub head: HeadNames,
}

/// Makes a [`Spec`] of the text of a `config.json`.
type Reader = fn(&ConfigFile<'_>) -> Result<Spec, LoadError>;

/// Every `model_type` that runs, and its reader.
const READERS: [(&str, Reader); 6] = [
    ("bert", bert::read),
    ("camembert", roberta::read),
    ("distilbert", distilbert::read),
    ("mpnet", mpnet::read),
    ("roberta", roberta::read),
    ("xlm-roberta", roberta::read),
];

/// Reads a `config.json` with the reader of its `model_type`.
///
/// # Errors
/// Names what in it is missing, malformed or not supported, with the list of what is.
pub(super) fn read(path: &Path) -> Result<Spec, LoadError> {
    let text = fs::read(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    let file = ConfigFile { path, text };
    let config: AnyConfig = file.parse()?;
    let model_type = config.model_type.as_deref().unwrap_or("(none)");
    let Some((_, reader)) = READERS.iter().find(|(name, _)| *name == model_type) else {
        let known: Vec<String> = READERS.iter().map(|(name, _)| format!("`{name}`")).collect();
        return file.refuse(format!("the architecture `{model_type}`"), &known.join(", "));
    };
    if config.is_decoder || config.add_cross_attention {
        return file.refuse("a decoder".into(), "an encoder");
    }
    let mut spec = reader(&file)?;
    check_sizes(&file, &spec.dims)?;
    spec.classifier = classifier::read(&file, &spec.names.head)?;
    Ok(spec)
}

/// What every family's file may say.
#[derive(Deserialize)]
struct AnyConfig {
    model_type: Option<String>,
    #[serde(default)]
    is_decoder: bool,
    #[serde(default)]
    add_cross_attention: bool,
}

/// A `config.json` that has been read but not parsed.
struct ConfigFile<'a> {
    path: &'a Path,
    text: Vec<u8>,
}

impl ConfigFile<'_> {
    fn parse<T: DeserializeOwned>(&self) -> Result<T, LoadError> {
        serde_json::from_slice(&self.text)
            .map_err(|source| LoadError::Json { path: self.path.to_owned(), source })
    }

    fn refuse<T>(&self, found: String, takes: &str) -> Result<T, LoadError> {
        Err(LoadError::Unsupported { path: self.path.to_owned(), found, takes: takes.to_owned() })
    }

    fn needs_gelu(&self, activation: &str) -> Result<(), LoadError> {
        match activation {
            "gelu" => Ok(()),
            other => self.refuse(format!("the activation function `{other}`"), "`gelu`"),
        }
    }
}

/// The keys that BERT and the families that grew from it share.
#[derive(Deserialize)]
struct BertLike {
    hidden_act: String,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    layer_norm_eps: f64,
    /// MPNet has none.
    type_vocab_size: Option<usize>,
    position_embedding_type: Option<String>,
    pad_token_id: Option<u32>,
    relative_attention_num_buckets: Option<usize>,
}

impl BertLike {
    /// Parses a file and checks what these families have in common.
    fn read(file: &ConfigFile<'_>) -> Result<Self, LoadError> {
        let config: Self = file.parse()?;
        file.needs_gelu(&config.hidden_act)?;
        match config.position_embedding_type.as_deref() {
            None | Some("absolute") => Ok(config),
            Some(kind) => file.refuse(format!("position embeddings `{kind}`"), "`absolute`"),
        }
    }

    fn dims(&self, positions: usize) -> Dims {
        Dims {
            layers: self.num_hidden_layers,
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            feed_forward: self.intermediate_size,
            vocabulary: self.vocab_size,
            positions,
            token_types: self.type_vocab_size.unwrap_or(0),
        }
    }

    /// Positions as RoBERTa counts them: how many a text may have, and by what rule.
    fn positions_after_padding(
        &self,
        file: &ConfigFile<'_>,
        padding: u32,
    ) -> Result<(usize, Positions), LoadError> {
        match self.max_position_embeddings.checked_sub(padding as usize + 1) {
            Some(positions) if positions > 0 => Ok((positions, Positions::SkipPadding { padding })),
            _ => file.refuse(
                format!(
                    "{} position embeddings, the padding token's is number {padding}",
                    self.max_position_embeddings
                ),
                "more positions than that",
            ),
        }
    }
}

/// Sizes of one million and more are those of no model, and below them no product of three sizes overflows.
const SIZE_END: usize = 1 << 20;

fn check_sizes(file: &ConfigFile<'_>, dims: &Dims) -> Result<(), LoadError> {
    let sizes = [
        dims.hidden,
        dims.layers,
        dims.heads,
        dims.feed_forward,
        dims.vocabulary,
        dims.positions,
        // None is allowed.
        dims.token_types + 1,
    ];
    if sizes.iter().any(|size| !(1..SIZE_END).contains(size)) {
        return file.refuse("sizes of zero or beyond a million".into(), "those of a model");
    }
    if !dims.hidden.is_multiple_of(dims.heads) {
        return file.refuse(
            format!("{} heads for a width of {}", dims.heads, dims.hidden),
            "heads that divide the width",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of `MPNetEncoder.relative_position_bucket` in transformers 5.23.
    #[test]
    fn distances_share_buckets_as_in_transformers() {
        let by_32 = [
            (-511, 15),
            (-128, 15),
            (-90, 14),
            (-64, 14),
            (-63, 13),
            (-32, 12),
            (-31, 11),
            (-16, 10),
            (-9, 8),
            (-8, 8),
            (-7, 7),
            (-1, 1),
            (0, 0),
            (1, 17),
            (7, 23),
            (8, 24),
            (15, 25),
            (16, 26),
            (22, 26),
            (23, 27),
            (32, 28),
            (63, 29),
            (64, 30),
            (90, 30),
            (91, 31),
            (128, 31),
            (511, 31),
        ];
        let by_10 = [
            (-511, 4),
            (-32, 4),
            (-31, 3),
            (-8, 3),
            (-7, 2),
            (-1, 1),
            (0, 0),
            (1, 6),
            (7, 7),
            (8, 8),
            (33, 9),
        ];
        let cases: [(usize, &[(isize, usize)]); 2] = [(32, &by_32), (10, &by_10)];
        for (buckets, expected) in cases {
            let bias = RelativeBias { buckets, distance_max: 128 };
            for (distance, bucket) in expected {
                assert_eq!(bias.bucket(*distance), *bucket, "{distance} in {buckets}");
            }
        }
    }

    #[test]
    fn padding_inside_a_text_is_not_counted() {
        let positions = |rule: Positions| rule.of(&[0, 7, 1, 1, 8, 2]).collect::<Vec<_>>();
        assert_eq!(positions(Positions::Place), [0, 1, 2, 3, 4, 5]);
        assert_eq!(positions(Positions::SkipPadding { padding: 1 }), [1, 2, 0, 0, 3, 4]);
    }
}
