//! The weights of a masked language model's head on a CUDA device. Its map to the vocabulary uses the words' embeddings as weights,
//! which are on the device already in the layout of linear maps.

use super::{CudaWeights, LinearAt, LinearPlan, Loading, NormAt};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::Dims;
use crate::engine::encoder::cuda::element::ElementType;
use crate::engine::encoder::families::MlmHead;

/// A linear map with GELU behind it, a norm, and the map to the vocabulary.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct MlmAt {
    pub dense: LinearAt,
    pub norm: NormAt,
    pub words: LinearAt,
}

/// Where the same lies, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct MlmPlan {
    dense: LinearPlan,
    norm: usize,
    words: LinearPlan,
}

impl MlmPlan {
    /// `part` makes room for so many elements of a size. `words` is where the words' embeddings are.
    pub fn new(
        part: &mut impl FnMut(usize, usize) -> usize,
        dims: &Dims,
        element: ElementType,
        words: usize,
        norm_stride: usize,
    ) -> Self {
        let (inner, vocabulary) = (dims.hidden, dims.vocabulary);
        // The kernels that run the head take biases in f32 only.
        let map = |weights, bias, columns| LinearPlan { weights, bias, rounded_bias: bias, inner, columns };
        Self {
            dense: map(part(inner * inner, element.bytes()), part(inner, 4), inner),
            norm: part(2, norm_stride),
            words: map(words, part(vocabulary, 4), vocabulary),
        }
    }
}

impl CudaWeights {
    /// The head of a masked language model, if the model's vectors are sparse.
    pub fn mlm(&self) -> Option<MlmAt> {
        self.plan.mlm.map(|MlmPlan { dense, norm, words }| MlmAt {
            dense: self.linear_at(dense, 0),
            norm: self.norm_at(norm),
            words: self.linear_at(words, 0),
        })
    }
}

impl Loading<'_> {
    pub(super) fn mlm(&mut self, head: &MlmHead, plan: MlmPlan) -> Result<(), LoadError> {
        let MlmPlan { dense, norm, words } = plan;
        let (square, row) = ([dense.inner, dense.inner], [dense.inner]);
        let of_dense = |part: &str| format!("{}.{part}", head.dense);
        let of_norm = |part: &str| format!("{}.{part}", head.norm);
        let bias = head.biases.iter().find(|name| self.file.has_head(name)).or(head.biases.first());
        self.head(&of_dense("weight"), &square, self.element, dense.weights)?;
        self.head(&of_dense("bias"), &row, ElementType::F32, dense.bias)?;
        self.head(&of_norm("weight"), &row, ElementType::F32, norm)?;
        self.head(&of_norm("bias"), &row, ElementType::F32, norm + self.plan.norm_stride)?;
        self.head(bias.copied().unwrap_or_default(), &[words.columns], ElementType::F32, words.bias)
    }

    /// A tensor of the head.
    fn head(
        &mut self,
        name: &str,
        shape: &[usize],
        element: ElementType,
        at: usize,
    ) -> Result<(), LoadError> {
        let mut numbers = vec![0.0; shape.iter().product()];
        self.file.read_head(name, shape, &mut numbers)?;
        self.put(name, &numbers, element, at)
    }
}
