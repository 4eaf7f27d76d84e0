//! A model's weights on a CUDA device: matrices in the element type and in PyTorch's layout, biases and norms in f32.

mod mlm;

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;

use super::element::ElementType;
use crate::device::cuda::{CudaDevice, CudaMemory};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::checkpoint::Checkpoint;
use crate::engine::encoder::config::ModelConfig;
use crate::engine::encoder::families::Spec;
use crate::engine::encoder::forward::{Linear, Norm};

use mlm::MlmPlan;

/// All weights, in one allocation.
#[derive(Debug)]
pub(super) struct CudaWeights {
    memory: CudaMemory,
    plan: WeightsPlan,
}

/// A linear map: `columns` rows of `inner` elements, and `columns` of bias. `bias` is in f32; `rounded_bias` has elements, for
/// cuBLASLt.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinearAt {
    pub weights: CUdeviceptr,
    pub bias: CUdeviceptr,
    pub rounded_bias: CUdeviceptr,
    pub inner: usize,
    pub columns: usize,
}

/// Weight and bias of a layer norm, f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormAt {
    pub weight: CUdeviceptr,
    pub bias: CUdeviceptr,
}

/// Where everything lies, in bytes.
#[derive(Debug)]
struct WeightsPlan {
    words: usize,
    positions: usize,
    embedding_norm: usize,
    /// Nothing, without a relative bias.
    relative: Option<usize>,
    /// The table of each rotation.
    rotary: Vec<usize>,
    mlm: Option<MlmPlan>,
    /// Of layer 0; the next layer's lies `layer_bytes` on.
    linears: [LinearPlan; 4],
    norms: [usize; 2],
    /// Of what attention and the feed-forward make.
    block_norms: Option<[usize; 2]>,
    /// Of the heads of queries, and of keys.
    head_norms: Option<[usize; 2]>,
    layer_bytes: usize,
    bytes: usize,
    /// From the weight of a norm to its bias.
    norm_stride: usize,
}

#[derive(Clone, Copy, Debug)]
struct LinearPlan {
    weights: usize,
    bias: usize,
    /// The bias as elements; the same place as `bias` if elements are f32.
    rounded_bias: usize,
    inner: usize,
    columns: usize,
}

/// Every part starts at a multiple of this: kernels read 16 bytes at a time, and the device 32 or 128.
const PART_ALIGNMENT: usize = 256;

impl WeightsPlan {
    fn new(spec: &Spec, element: ElementType) -> Self {
        let dims = &spec.dims;
        let hidden = dims.hidden;
        let mut end = 0;
        let mut part = |elements: usize, size: usize| {
            let start = end;
            end += (elements * size).next_multiple_of(PART_ALIGNMENT);
            start
        };
        let words = part(dims.vocabulary * hidden, element.bytes());
        let positions = part(spec.table_rows() * hidden, element.bytes());
        let norm_stride = (hidden * 4).next_multiple_of(PART_ALIGNMENT);
        let embedding_norm = part(2, norm_stride);
        let relative = spec.relative.map(|_| part(dims.heads * spec.distances(), 4));
        let rotary = spec.design.rotary.iter().map(|_| part(dims.positions * dims.head, 4)).collect();
        let mlm = spec.mlm.map(|_| MlmPlan::new(&mut part, dims, element, words, norm_stride));
        let layer = part(0, 0);
        let linears = [
            (hidden, dims.qkv_columns()),
            (dims.attention_columns(), hidden),
            (hidden, dims.up_columns()),
            (dims.feed_forward, hidden),
        ]
        .map(|(inner, columns)| {
            let (weights, bias) = (part(inner * columns, element.bytes()), part(columns, 4));
            let rounded_bias =
                if element == ElementType::F32 { bias } else { part(columns, element.bytes()) };
            LinearPlan { weights, bias, rounded_bias, inner, columns }
        });
        let norms = [part(2, norm_stride), part(2, norm_stride)];
        let block_norms = spec.names.block_norms.map(|names| names.map(|_| part(2, norm_stride)));
        let head_norms = spec.names.head_norms.map(|names| names.map(|_| part(dims.head, 4)));
        let layer_bytes = part(0, 0) - layer;
        let bytes = layer + dims.layers * layer_bytes;
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
            layer_bytes,
            bytes,
            norm_stride,
        }
    }
}

impl CudaWeights {
    /// Reads all of a model's weights into one allocation of the device. Peak host memory is the position embeddings and a
    /// piece of a matrix.
    pub fn load(
        config: &ModelConfig,
        element: ElementType,
        device: &Arc<CudaDevice>,
    ) -> Result<Self, LoadError> {
        let file = Checkpoint::open(config)?;
        let plan = WeightsPlan::new(&config.spec, element);
        let memory = device.alloc(plan.bytes)?;
        let mut loading =
            Loading { config, file, plan: &plan, device, start: memory.start(), element, bytes: Vec::new() };
        loading.embeddings()?;
        if let (Some(head), Some(plan)) = (config.spec.mlm, plan.mlm) {
            loading.mlm(head, plan)?;
        }
        for layer in 0..config.spec.dims.layers {
            loading.layer(layer)?;
        }
        Ok(Self { memory, plan })
    }

    pub fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    pub fn words(&self) -> CUdeviceptr {
        self.at(self.plan.words)
    }

    /// What is added to the words' embeddings: [`Spec::table_rows`] rows.
    pub fn positions(&self) -> CUdeviceptr {
        self.at(self.plan.positions)
    }

    /// The relative bias in f32, for each head a row of [`Spec::distances`]; a null pointer if there is none.
    pub fn relative(&self) -> CUdeviceptr {
        self.plan.relative.map_or(0, |at| self.at(at))
    }

    /// The table of one of the model's rotations in f32: a row for each position.
    pub fn rotary(&self, which: usize) -> CUdeviceptr {
        self.at(self.plan.rotary[which])
    }

    /// The norms of the heads of queries, and of keys, in f32; null pointers if there are none.
    pub fn head_norms(&self, layer: usize) -> [CUdeviceptr; 2] {
        let norms =
            self.plan.head_norms.map(|norms| norms.map(|at| self.at(at + layer * self.plan.layer_bytes)));
        norms.unwrap_or_default()
    }

    pub fn embedding_norm(&self) -> NormAt {
        self.norm_at(self.plan.embedding_norm)
    }

    pub fn linear(&self, layer: usize, which: Linear) -> LinearAt {
        self.linear_at(self.plan.linears[which as usize], layer * self.plan.layer_bytes)
    }

    pub fn norm(&self, layer: usize, which: Norm) -> NormAt {
        self.norm_at(self.plan.norms[which as usize] + layer * self.plan.layer_bytes)
    }

    /// The norm of what attention or the feed-forward makes, if the model has one.
    pub fn block_norm(&self, layer: usize, which: Norm) -> Option<NormAt> {
        let norms = self.plan.block_norms?;
        Some(self.norm_at(norms[which as usize] + layer * self.plan.layer_bytes))
    }

    fn linear_at(&self, plan: LinearPlan, shift: usize) -> LinearAt {
        LinearAt {
            weights: self.at(plan.weights + shift),
            bias: self.at(plan.bias + shift),
            rounded_bias: self.at(plan.rounded_bias + shift),
            inner: plan.inner,
            columns: plan.columns,
        }
    }

    fn norm_at(&self, byte: usize) -> NormAt {
        NormAt { weight: self.at(byte), bias: self.at(byte + self.plan.norm_stride) }
    }

    fn at(&self, byte: usize) -> CUdeviceptr {
        debug_assert!(byte < self.plan.bytes);
        self.memory.start() + byte as CUdeviceptr
    }
}

/// Weights on their way from the file to the device.
struct Loading<'a> {
    config: &'a ModelConfig,
    file: Checkpoint,
    plan: &'a WeightsPlan,
    device: &'a CudaDevice,
    start: CUdeviceptr,
    element: ElementType,
    /// A piece as the device gets it.
    bytes: Vec<u8>,
}

impl Loading<'_> {
    fn embeddings(&mut self) -> Result<(), LoadError> {
        let spec = &self.config.spec;
        self.words()?;
        let names = self.file.names();
        let positions = self.file.position_table(spec)?;
        self.put(names.positions, &positions, self.element, self.plan.positions)?;
        if let Some(at) = self.plan.relative {
            let relative = self.file.relative_table(spec)?;
            self.put(names.relative, &relative, ElementType::F32, at)?;
        }
        for (rotary, at) in spec.design.rotary.iter().zip(&self.plan.rotary) {
            let table = rotary.table(spec.dims.positions, spec.dims.head);
            self.put("rotary positions", &table, ElementType::F32, *at)?;
        }
        self.norm(names.embedding_norm, self.plan.embedding_norm)
    }

    fn layer(&mut self, layer: usize) -> Result<(), LoadError> {
        let shift = layer * self.plan.layer_bytes;
        let (spec, names) = (&self.config.spec, self.file.names());
        for (which, parts) in names.linears {
            let plan = self.plan.linears[which as usize];
            let mut first = 0;
            let all = Checkpoint::rows_of_parts(&spec.dims, which, plan.columns, parts.len());
            for (part, count) in parts.iter().zip(all) {
                let name = self.file.of_layer(layer, part);
                let rows = plan.weights + shift + first * plan.inner * self.element.bytes();
                self.matrix(&format!("{name}.weight"), &[count, plan.inner], rows)?;
                let bias = spec.design.has_bias(which).then(|| format!("{name}.bias"));
                let biases = [(plan.bias, ElementType::F32), (plan.rounded_bias, self.element)];
                let places = biases.map(|(bias, element)| (bias + shift + first * element.bytes(), element));
                self.numbers(bias.as_deref(), count, &places)?;
                first += count;
            }
        }
        for (which, part) in names.norms {
            let at = self.plan.norms[which as usize] + shift;
            self.norm(&self.file.norm_of(layer, which, part), at)?;
        }
        for (part, at) in names.block_norms.iter().flatten().zip(self.plan.block_norms.iter().flatten()) {
            self.norm(&self.file.of_layer(layer, part), at + shift)?;
        }
        let heads = self.file.head_norms(&spec.design, layer);
        for ((name, scale), at) in heads.iter().zip(self.plan.head_norms.iter().flatten()) {
            self.norm_weight(name, spec.dims.head, *scale, at + shift)?;
        }
        Ok(())
    }

    fn norm(&mut self, name: &str, at: usize) -> Result<(), LoadError> {
        let spec = &self.config.spec;
        let hidden = spec.dims.hidden;
        self.norm_weight(name, hidden, 1.0, at)?;
        let bias = spec.design.norm_bias.then(|| format!("{name}.bias"));
        self.numbers(bias.as_deref(), hidden, &[(at + self.plan.norm_stride, ElementType::F32)])
    }

    /// What a norm multiplies with, in f32.
    fn norm_weight(&mut self, name: &str, count: usize, scale: f32, at: usize) -> Result<(), LoadError> {
        let mut numbers = vec![0.0; count];
        self.file.read_norm(&self.config.spec.design, name, scale, &mut numbers)?;
        self.put(name, &numbers, ElementType::F32, at)
    }

    /// Writes the numbers of a tensor to several places, each in its own type; zeros if the model has no such tensor.
    fn numbers(
        &mut self,
        name: Option<&str>,
        count: usize,
        to: &[(usize, ElementType)],
    ) -> Result<(), LoadError> {
        let mut numbers = vec![0.0; count];
        if let Some(name) = name {
            self.file.read(name, &[count], &mut numbers)?;
        }
        to.iter().try_for_each(|(at, element)| self.put(name.unwrap_or("zeros"), &numbers, *element, *at))
    }

    fn words(&mut self) -> Result<(), LoadError> {
        let element = self.element;
        let mut at = self.plan.words;
        let Self { file, device, start, bytes, config, .. } = self;
        let name = file.words();
        file.read_words(&config.spec, |piece| {
            upload(config, device, &name, piece, element, bytes, *start + at as CUdeviceptr)?;
            at += piece.len() * element.bytes();
            Ok(())
        })
    }

    fn matrix(&mut self, name: &str, shape: &[usize], mut at: usize) -> Result<(), LoadError> {
        let element = self.element;
        let Self { file, device, start, bytes, config, .. } = self;
        file.read_pieces(name, shape, |piece| {
            upload(config, device, name, piece, element, bytes, *start + at as CUdeviceptr)?;
            at += piece.len() * element.bytes();
            Ok(())
        })
    }

    fn put(&mut self, name: &str, numbers: &[f32], element: ElementType, at: usize) -> Result<(), LoadError> {
        let to = self.start + at as CUdeviceptr;
        upload(self.config, self.device, name, numbers, element, &mut self.bytes, to)
    }
}

/// Copies numbers of a tensor to the device, as elements. `bytes` is a buffer for the encoded elements.
fn upload(
    config: &ModelConfig,
    device: &CudaDevice,
    name: &str,
    numbers: &[f32],
    element: ElementType,
    bytes: &mut Vec<u8>,
    to: CUdeviceptr,
) -> Result<(), LoadError> {
    if let Some(large) = numbers.iter().find(|x| element.overflows(**x)) {
        return Err(LoadError::Unsupported {
            path: config.weights.clone(),
            found: format!("{large} in tensor {name}, which {element} has no room for"),
            takes: "such weights as dtype = \"bf16\" or \"f32\"".to_owned(),
        });
    }
    bytes.clear();
    element.append(numbers, bytes);
    device.bind()?;
    // SAFETY: `to` has room for these by the plan; `bytes` is not touched before the wait below has ended.
    unsafe { device.copy_in("copy weights to the device", to, bytes) }?;
    Ok(device.synchronize()?)
}
