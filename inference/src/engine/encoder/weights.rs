//! A model's weights on the CPU: read from safetensors, checked against the config, packed for the units that multiply them.

use std::sync::Arc;

use crate::device::cpu::{Buffer, CpuDevice};

use super::LoadError;
use super::checkpoint::Checkpoint;
use super::config::ModelConfig;
use super::families::{MlmHead, NormKind, Spec};
use super::forward::{Linear, Norm};
use super::token_ops::NormPointers;
use super::units::CpuUnits;

/// All weights, in one buffer.
#[derive(Debug)]
pub(super) struct Weights {
    buffer: Buffer,
    plan: WeightsPlan,
    norm_kind: NormKind,
    eps: f32,
}

/// A linear map's packed matrix and its bias.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinearPointers {
    pub weights: *const f32,
    pub bias: *const f32,
    pub inner: usize,
    pub columns: usize,
}

impl LinearPointers {
    /// `columns` columns of the map from `first` on. `first` is a multiple of [`CpuUnits::panel_columns`], or the end.
    pub fn part(self, units: CpuUnits, first: usize, columns: usize) -> Self {
        Self {
            weights: self.weights.wrapping_add(units.packed_len(self.inner, first)),
            bias: self.bias.wrapping_add(first),
            columns,
            ..self
        }
    }
}

/// The head of a masked language model.
#[derive(Clone, Copy)]
pub(super) struct MlmPointers {
    /// With GELU behind it.
    pub dense: LinearPointers,
    pub norm: NormPointers,
    /// The words' embeddings as a map to the vocabulary.
    pub words: LinearPointers,
}

/// Where everything lies in the buffer, in f32 elements.
#[derive(Debug)]
struct WeightsPlan {
    words: usize,
    positions: usize,
    embedding_norm: usize,
    relative: usize,
    /// The table of each rotation.
    rotary: Vec<usize>,
    mlm: Option<MlmPlan>,
    /// Of layer 0; the next layer's lies `layer_len` on.
    linears: [LinearPlan; 4],
    norms: [usize; 2],
    /// Of what attention and the feed-forward make.
    block_norms: Option<[usize; 2]>,
    /// Of the heads of queries, and of keys.
    head_norms: Option<[usize; 2]>,
    layer_len: usize,
    len: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct LinearPlan {
    weights: usize,
    bias: usize,
    inner: usize,
    columns: usize,
}

#[derive(Clone, Copy, Debug)]
struct MlmPlan {
    dense: LinearPlan,
    norm: usize,
    words: LinearPlan,
}

impl LinearPlan {
    /// `part` makes room for so many elements, and says where.
    fn new(part: &mut impl FnMut(usize) -> usize, units: CpuUnits, inner: usize, columns: usize) -> Self {
        Self {
            weights: part(units.packed_len(inner, columns)),
            bias: part(columns.next_multiple_of(units.vectors.lanes())),
            inner,
            columns,
        }
    }
}

/// Every part starts at a multiple of this many elements: a cache line.
const PART_ELEMENTS: usize = 16;

impl WeightsPlan {
    fn new(spec: &Spec, units: CpuUnits) -> Self {
        let dims = &spec.dims;
        let hidden = dims.hidden;
        let mut end = 0;
        let mut part = |elements: usize| {
            let start = end;
            end += elements.next_multiple_of(PART_ELEMENTS);
            start
        };
        let words = part(dims.vocabulary * hidden);
        let positions = part(spec.table_rows() * hidden);
        let embedding_norm = part(2 * hidden);
        let relative = part(dims.heads * spec.distances());
        let rotary = spec.design.rotary.iter().map(|_| part(dims.positions * dims.head)).collect();
        let mlm = spec.mlm.map(|_| MlmPlan {
            dense: LinearPlan::new(&mut part, units, hidden, hidden),
            norm: part(2 * hidden),
            words: LinearPlan::new(&mut part, units, hidden, dims.vocabulary),
        });
        let layer = part(0);
        let linears = [
            (hidden, dims.qkv_columns()),
            (dims.attention_columns(), hidden),
            (hidden, dims.up_columns()),
            (dims.feed_forward, hidden),
        ]
        .map(|(inner, columns)| LinearPlan::new(&mut part, units, inner, columns));
        let norms = [part(2 * hidden), part(2 * hidden)];
        let block_norms = spec.names.block_norms.map(|names| names.map(|_| part(2 * hidden)));
        let head_norms = spec.names.head_norms.map(|names| names.map(|_| part(dims.head)));
        let layer_len = part(0) - layer;
        Self {
            words,
            positions,
            embedding_norm,
            relative,
            rotary,
            mlm,
            linears,
            norms,
            block_norms,
            head_norms,
            layer_len,
            len: layer + dims.layers * layer_len,
        }
    }
}

impl Weights {
    /// Reads all of a model's weights into one buffer of the device. Peak host memory is that buffer and the largest
    /// matrix of a layer.
    pub fn load(config: &ModelConfig, units: CpuUnits, device: &Arc<CpuDevice>) -> Result<Self, LoadError> {
        let spec = &config.spec;
        let mut file = Checkpoint::open(config)?;
        let plan = WeightsPlan::new(spec, units);
        let buffer = device.alloc(plan.len * 4)?;
        let mut loading = Loading {
            file: &mut file,
            plan: &plan,
            // SAFETY: the buffer has `len` f32 and is aligned to 64; zeroing it makes every element a valid f32.
            all: unsafe {
                buffer.as_ptr().write_bytes(0, plan.len * 4);
                std::slice::from_raw_parts_mut(buffer.as_ptr().cast(), plan.len)
            },
            units,
        };
        loading.embeddings(spec)?;
        if let (Some(head), Some(plan)) = (spec.mlm, plan.mlm) {
            loading.mlm(head, plan)?;
        }
        for layer in 0..spec.dims.layers {
            loading.layer(layer, spec)?;
        }
        Ok(Self { buffer, plan, norm_kind: spec.design.norm_kind, eps: spec.norm_eps })
    }

    pub fn bytes(&self) -> u64 {
        self.buffer.len() as u64
    }

    pub fn words(&self) -> *const f32 {
        self.at(self.plan.words)
    }

    /// What is added to the words' embeddings: [`Spec::table_rows`] rows.
    pub fn positions(&self) -> *const f32 {
        self.at(self.plan.positions)
    }

    /// The relative bias: for each head a row of [`Spec::distances`].
    pub fn relative(&self) -> *const f32 {
        self.at(self.plan.relative)
    }

    /// The table of one of the model's rotations: a row for each position.
    pub fn rotary(&self, which: usize) -> *const f32 {
        self.at(self.plan.rotary[which])
    }

    /// The norms of the heads of queries, and of keys.
    pub fn head_norms(&self, layer: usize) -> Option<[*const f32; 2]> {
        self.plan.head_norms.map(|norms| norms.map(|at| self.at(at + layer * self.plan.layer_len)))
    }

    pub fn embedding_norm(&self) -> NormPointers {
        self.norm_at(self.plan.embedding_norm)
    }

    pub fn linear(&self, layer: usize, which: Linear) -> LinearPointers {
        self.linear_at(self.plan.linears[which as usize], layer * self.plan.layer_len)
    }

    /// The head of a masked language model, if the model's vectors are sparse.
    pub fn mlm(&self) -> Option<MlmPointers> {
        self.plan.mlm.map(|plan| MlmPointers {
            dense: self.linear_at(plan.dense, 0),
            norm: self.norm_at(plan.norm),
            words: self.linear_at(plan.words, 0),
        })
    }

    fn linear_at(&self, plan: LinearPlan, shift: usize) -> LinearPointers {
        LinearPointers {
            weights: self.at(plan.weights + shift),
            bias: self.at(plan.bias + shift),
            inner: plan.inner,
            columns: plan.columns,
        }
    }

    pub fn norm(&self, layer: usize, which: Norm) -> NormPointers {
        self.norm_at(self.plan.norms[which as usize] + layer * self.plan.layer_len)
    }

    /// The norm of what attention or the feed-forward makes, if the model has one.
    pub fn block_norm(&self, layer: usize, which: Norm) -> Option<NormPointers> {
        let norms = self.plan.block_norms?;
        Some(self.norm_at(norms[which as usize] + layer * self.plan.layer_len))
    }

    fn norm_at(&self, at: usize) -> NormPointers {
        let hidden = self.plan.linears[Linear::AttentionOut as usize].columns;
        let (weight, bias) = (self.at(at), self.at(at + hidden));
        NormPointers { weight, bias, kind: self.norm_kind, eps: self.eps }
    }

    fn at(&self, element: usize) -> *const f32 {
        debug_assert!(element <= self.plan.len);
        self.buffer.as_ptr().cast::<f32>().wrapping_add(element)
    }
}

/// Weights on their way from the file into the buffer.
struct Loading<'a> {
    file: &'a mut Checkpoint,
    plan: &'a WeightsPlan,
    all: &'a mut [f32],
    units: CpuUnits,
}

impl Loading<'_> {
    fn embeddings(&mut self, spec: &Spec) -> Result<(), LoadError> {
        let mut at = self.plan.words;
        let all = &mut *self.all;
        self.file.read_words(spec, |piece| {
            all[at..][..piece.len()].copy_from_slice(piece);
            at += piece.len();
            Ok(())
        })?;
        let positions = self.file.position_table(spec)?;
        self.all[self.plan.positions..][..positions.len()].copy_from_slice(&positions);
        let relative = self.file.relative_table(spec)?;
        self.all[self.plan.relative..][..relative.len()].copy_from_slice(&relative);
        for (rotary, at) in spec.design.rotary.iter().zip(&self.plan.rotary) {
            let table = rotary.table(spec.dims.positions, spec.dims.head);
            self.all[*at..][..table.len()].copy_from_slice(&table);
        }
        self.norm(self.file.names().embedding_norm, spec, self.plan.embedding_norm)
    }

    /// The head of a masked language model. Its last map has the words' embeddings as weights, which are there already.
    fn mlm(&mut self, head: &MlmHead, plan: MlmPlan) -> Result<(), LoadError> {
        let MlmPlan { dense, norm, words } = plan;
        let hidden = dense.inner;
        let mut matrix = vec![0.0; hidden * hidden];
        self.file.read_head(&format!("{}.weight", head.dense), &[hidden, hidden], &mut matrix)?;
        self.units.pack(
            &mut self.all[dense.weights..][..self.units.packed_len(hidden, hidden)],
            (hidden, hidden),
            |inner, column| matrix[column * hidden + inner],
        );
        self.read_head(&format!("{}.bias", head.dense), hidden, dense.bias)?;
        self.read_head(&format!("{}.weight", head.norm), hidden, norm)?;
        self.read_head(&format!("{}.bias", head.norm), hidden, norm + hidden)?;
        let embeddings = self.plan.words;
        let (before, map) = self.all.split_at_mut(words.weights);
        let embeddings = &before[embeddings..];
        self.units.pack(
            &mut map[..self.units.packed_len(hidden, words.columns)],
            (hidden, words.columns),
            |inner, column| embeddings[column * hidden + inner],
        );
        let bias = head.biases.iter().find(|name| self.file.has_head(name)).or(head.biases.first());
        self.read_head(bias.copied().unwrap_or_default(), words.columns, words.bias)
    }

    fn read_head(&mut self, name: &str, elements: usize, at: usize) -> Result<(), LoadError> {
        self.file.read_head(name, &[elements], &mut self.all[at..][..elements])
    }

    fn layer(&mut self, layer: usize, spec: &Spec) -> Result<(), LoadError> {
        let shift = layer * self.plan.layer_len;
        for (which, parts) in self.file.names().linears {
            let plan = self.plan.linears[which as usize];
            // PyTorch stores a linear map as rows of outputs, so joining maps appends rows.
            let mut matrix = vec![0.0; plan.columns * plan.inner];
            let mut first = 0;
            let all = Checkpoint::rows_of_parts(&spec.dims, which, plan.columns, parts.len());
            for (part, count) in parts.iter().zip(all) {
                let rows = &mut matrix[first * plan.inner..][..count * plan.inner];
                let name = self.file.of_layer(layer, part);
                self.file.read(&format!("{name}.weight"), &[count, plan.inner], rows)?;
                if spec.design.has_bias(which) {
                    self.read(&format!("{name}.bias"), &[count], plan.bias + shift + first)?;
                }
                first += count;
            }
            let packed = self.units.packed_len(plan.inner, plan.columns);
            self.units.pack(
                &mut self.all[plan.weights + shift..][..packed],
                (plan.inner, plan.columns),
                |inner, column| matrix[column * plan.inner + inner],
            );
        }
        for (which, part) in self.file.names().norms {
            let at = self.plan.norms[which as usize] + shift;
            let name = self.file.norm_of(layer, which, part);
            self.norm(&name, spec, at)?;
        }
        let blocks = self.file.names().block_norms.iter().flatten();
        for (part, at) in blocks.zip(self.plan.block_norms.iter().flatten()) {
            self.norm(&self.file.of_layer(layer, part), spec, at + shift)?;
        }
        let heads = self.file.head_norms(&spec.design, layer);
        for ((name, scale), at) in heads.iter().zip(self.plan.head_norms.iter().flatten()) {
            let to = &mut self.all[at + shift..][..spec.dims.head];
            self.file.read_norm(&spec.design, name, *scale, to)?;
        }
        Ok(())
    }

    fn norm(&mut self, name: &str, spec: &Spec, at: usize) -> Result<(), LoadError> {
        let hidden = spec.dims.hidden;
        self.file.read_norm(&spec.design, name, 1.0, &mut self.all[at..][..hidden])?;
        if spec.design.norm_bias {
            self.read(&format!("{name}.bias"), &[hidden], at + hidden)
        } else {
            Ok(())
        }
    }

    fn read(&mut self, name: &str, shape: &[usize], at: usize) -> Result<(), LoadError> {
        let to = &mut self.all[at..][..shape.iter().product()];
        self.file.read(name, shape, to)
    }
}
