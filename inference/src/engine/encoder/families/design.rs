//! How the layers of a family are built: where norms are, what the feed-forward computes, what each token attends to.

use std::ops::Range;

use super::{ConfigFile, Rotary};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::forward::Linear;

/// What the layers of a model are made of.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::engine::encoder) struct Design {
    pub norms: Norms,
    pub norm_kind: NormKind,
    /// Whether norms add a bias.
    pub norm_bias: bool,
    /// Whether norms multiply with one more than their weights.
    pub norm_plus_one: bool,
    pub feed_forward: FeedForward,
    /// Whether linear maps add a bias, by [`Linear`].
    pub biases: [bool; 4],
    /// The layers have these in turn.
    pub attention: Vec<Attention>,
    /// What attention rotates queries and keys by: [`Attention::rotary`] says which.
    pub rotary: Vec<Rotary>,
    /// The factor of queries, besides their norms' weights. Attention divides scores by √(elements of a head), and some models
    /// divide by another number.
    pub query_scale: f32,
}

/// Where the norms of a layer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) enum Norms {
    /// Behind each block: `x = norm(x + block(x))`.
    After,
    /// Before each block, and behind the last layer: `x = x + block(norm(x))`.
    Before,
    /// As `Before`, but the first layer's attention takes the embeddings, which have a norm of their own.
    BeforeButFirst,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) enum NormKind {
    /// Ba et al. 2016: by mean and variance.
    Layer,
    /// Zhang and Sennrich 2019: by the mean of squares.
    RootMeanSquare,
}

/// What is between the two linear maps of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) enum FeedForward {
    Gelu,
    /// Shazeer 2020: the upper map makes two halves, and the function of one is multiplied with the other.
    Gated {
        gate: Gate,
        of_second: bool,
    },
}

/// The function of a gated feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) enum Gate {
    Gelu,
    /// Hendrycks and Gimpel's approximation of it: x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))).
    GeluTanh,
    /// x / (1 + e^-x).
    Silu,
}

impl Gate {
    /// By the name that transformers has for it.
    pub(super) fn read(file: &ConfigFile<'_>, name: &str) -> Result<Self, LoadError> {
        match name {
            "gelu" => Ok(Self::Gelu),
            "gelu_pytorch_tanh" => Ok(Self::GeluTanh),
            "silu" | "swish" | "swiglu" => Ok(Self::Silu),
            other => {
                let found = format!("the activation function `{other}`");
                file.refuse(found, "`gelu`, `silu`, `gelu_pytorch_tanh`")
            }
        }
    }
}

/// A layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) struct Attention {
    pub sees: Sees,
    /// Which of the model's rotations; `None`: positions are in the embeddings.
    pub rotary: Option<usize>,
}

impl Attention {
    /// The attention of BERT.
    pub const PLAIN: Self = Self { sees: Sees::All, rotary: None };
}

/// The tokens of its own text that a token attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) enum Sees {
    All,
    /// Up to so many before it, as many behind it, and itself.
    Near(usize),
    /// Those before it, and itself.
    Before,
}

impl Sees {
    /// The keys that a query of a text of so many tokens attends to.
    #[inline(always)]
    pub fn keys(self, query: usize, tokens: usize) -> Range<usize> {
        match self {
            Self::All => 0..tokens,
            Self::Near(apart) => {
                query.saturating_sub(apart)..tokens.min(query.saturating_add(apart).saturating_add(1))
            }
            Self::Before => 0..query + 1,
        }
    }
}

impl Design {
    /// BERT's (Devlin et al. 2018), and that of the families that grew from it.
    pub fn bert() -> Self {
        Self {
            norms: Norms::After,
            norm_kind: NormKind::Layer,
            norm_bias: true,
            norm_plus_one: false,
            feed_forward: FeedForward::Gelu,
            biases: [true; 4],
            attention: vec![Attention::PLAIN],
            rotary: Vec::new(),
            query_scale: 1.0,
        }
    }

    pub fn has_bias(&self, which: Linear) -> bool {
        self.biases[which as usize]
    }

    /// A layer's attention.
    pub fn attention_of(&self, layer: usize) -> Attention {
        let turn = layer % self.attention.len().max(1);
        self.attention.get(turn).copied().unwrap_or(Attention::PLAIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_see_what_their_kind_of_attention_says() {
        assert_eq!(Sees::All.keys(3, 9), 0..9);
        assert_eq!(Sees::Before.keys(3, 9), 0..4);
        assert_eq!(Sees::Near(2).keys(0, 9), 0..3);
        assert_eq!(Sees::Near(2).keys(5, 9), 3..8);
        assert_eq!(Sees::Near(2).keys(8, 9), 6..9);
    }
}
