//! The encoder on a CUDA device.
//!
//! `element` is the type of weights and activations, `weights` are the weights on the device. `sources` are the kernels; `module`
//! gets their code from `compile`, `cache` or `embedded`. A pass stages its ids in `staging`, and `ops` launches the kernels;
//! with cuBLASLt `products` computes matrix products, and `vocabulary` makes the scores of sparse vectors. `pass_size` is how many
//! tokens a pass should have.

mod cache;
pub mod compile;
mod element;
mod embedded;
mod module;
mod ops;
mod pass_size;
mod products;
mod sources;
mod staging;
mod vocabulary;
mod weights;

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr};

pub use element::ElementType;
pub use module::KernelsError;

use super::config::{Dims, ModelConfig};
use super::families::{FeedForward, Sequence, Spec};
use super::forward::Linear;
use super::modules::Pooling;
use super::plan::{CudaPlan, Layout};
use super::{Backend, LoadError, forward};
use crate::device::Device as _;
use crate::device::cuda::{CudaDevice, CudaError};
use crate::engine::{PassError, PassShape};

use module::{HEAD_MAX, Kernels};
use ops::CudaOps;
use products::{OwnProducts, Product, Products};
use staging::Staging;
use weights::{CudaWeights, LinearAt};

/// How a model is to run on a CUDA device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// None: by the model and the device.
    pub element: Option<ElementType>,
    /// A folder for compiled kernels; none: they are compiled at every start.
    pub cache: Option<PathBuf>,
    /// Use the program's own matrix products even if cuBLASLt is there, to compare the two.
    pub own_products: bool,
    /// The most tokens of a pass, as configured; none: by the model and the device.
    pub pass_tokens: Option<usize>,
    /// Make the products of passes of all sizes while the model loads. Their code is then on the device and counted, and the
    /// fastest algorithms are chosen.
    pub warm_up: bool,
}

/// A model on a CUDA device.
pub(super) struct CudaEncoder {
    model: CudaModel,
    device: Arc<CudaDevice>,
    /// Passes run one at a time.
    staging: Mutex<Staging>,
    computes: String,
}

/// What of a model the operations need.
#[derive(Debug)]
struct CudaModel {
    weights: CudaWeights,
    kernels: Kernels,
    /// cuBLASLt's matrix products; `None` where the kernels compute them.
    products: Option<Products>,
    spec: Spec,
    pooling: Pooling,
    normalize: bool,
    element: ElementType,
    multiprocessors: usize,
    /// The tokens of a pass that keep the device busy, or those that are configured.
    pass_tokens: usize,
}

/// Longest row that the kernels take: kernels/norm.cuh.
const HIDDEN_MAX: usize = 4096;

/// Most heads: CUDA's limit to the second size of a grid.
const HEADS_MAX: usize = 65_535;

impl CudaEncoder {
    /// Weights and kernels to the device. Reads files: seconds.
    pub fn load(
        config: &ModelConfig,
        device: Arc<CudaDevice>,
        options: &CudaOptions,
    ) -> Result<Self, LoadError> {
        check(config)?;
        let chosen = || ElementType::auto(config.spec.design.norms, device.capability());
        let element = options.element.unwrap_or_else(chosen);
        let kernels = Kernels::load(&device, element, config.spec.dims.head, options.cache.as_deref())?;
        let multiprocessors = device
            .context()
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(|error| device.failed("ask for the multiprocessors", 0, error))?;
        let weights = CudaWeights::load(config, element, &device)?;
        let products = match options.own_products {
            true => Err(OwnProducts::Configured),
            false => Products::load(&device, element, &config.spec.dims)?,
        };
        let computes = match &products {
            Ok(library) => format!("{element}, matrix products by cuBLASLt {}", library.version()),
            Err(why) => format!("{element}, matrix products by the program's own kernels: {why}"),
        };
        let mut model = CudaModel {
            weights,
            kernels,
            products: products.ok(),
            spec: config.spec.clone(),
            pooling: config.pooling,
            normalize: config.normalize,
            element,
            multiprocessors: usize::try_from(multiprocessors).unwrap_or(1),
            pass_tokens: 0,
        };
        let chosen = || model.best_pass_tokens(&device, config.texts.tokens_max);
        model.pass_tokens = options.pass_tokens.unwrap_or_else(chosen);
        if options.warm_up {
            model.warm_up(&device)?;
        }
        let staging = Mutex::new(Staging::new(Arc::clone(&device)));
        Ok(Self { model, device, staging, computes })
    }

    /// The type, and what computes matrix products, in words.
    pub fn computes(&self) -> &str {
        &self.computes
    }

    /// The type of weights and activations.
    pub fn element(&self) -> ElementType {
        self.model.element
    }

    fn plan(&self, shape: PassShape) -> CudaPlan {
        self.model.plan(shape)
    }

    /// Runs a pass and leaves its vectors in the staging memory.
    fn compute(
        &self,
        items: &[Sequence<'_>],
        shape: PassShape,
        staging: &mut Staging,
    ) -> Result<(), CudaError> {
        let plan = self.plan(shape);
        let arena = self.device.alloc_arena(plan.bytes)?;
        // Copy ids and vectors through one piece of memory: asking for a second piece could move the first while the device reads
        // it.
        let vector_bytes = shape.items * self.model.spec.dims.vector_columns() * 4;
        let host = staging.get(plan.activations.max(vector_bytes))?;
        let ids = &mut host[..plan.activations];
        fill(ids, &plan, items, &self.model.spec);
        // SAFETY: the staged parts lie at the start of the arena, with the same distances. The staging memory is not touched before
        // the stream has been waited for, below or, after a failure, by the arena's drop.
        unsafe { self.device.copy_in("copy ids to the device", arena.start(), ids) }?;
        let mut ops =
            CudaOps { model: &self.model, device: &self.device, plan: &plan, shape, arena: arena.start() };
        let (spec, at) = (&self.model.spec, Layout::new(&self.model.spec.dims, shape.cost));
        match spec.dims.is_sparse {
            false => forward::forward(&mut ops, spec, &at)?,
            true => forward::layers(&mut ops, spec, &at).and_then(|_| ops.pool_vocabulary(&at))?,
        }
        // The stream's order ensures that the ids are on the device before vectors overwrite them here.
        let vectors = &mut host[..vector_bytes];
        // SAFETY: the arena has this many bytes of vectors, and the staging memory is borrowed until the wait has ended.
        unsafe {
            let from = arena.start() + plan.vectors as CUdeviceptr;
            self.device.copy_out("copy vectors from the device", vectors, from)
        }?;
        if is_long(&self.model.spec.dims, shape.cost) {
            self.device.synchronize_asleep()
        } else {
            self.device.synchronize()
        }
    }
}

impl CudaModel {
    fn plan(&self, shape: PassShape) -> CudaPlan {
        CudaPlan::new(&self.spec.dims, self.element.bytes(), shape)
    }

    /// How many tokens a pass should have on a device that has the weights already.
    fn best_pass_tokens(&self, device: &CudaDevice, longest: usize) -> usize {
        // In f32 few tokens keep the device busy, and many take seconds.
        if self.element == ElementType::F32 {
            return pass_size::TOKENS_LEAST;
        }
        let bytes_of = |cost: usize| {
            let items = cost.div_ceil(longest.max(1));
            self.plan(PassShape { items, cost, longest }).bytes as u64
        };
        pass_size::tokens(self.multiprocessors, self.spec.dims.hidden, device.memory().free, bytes_of)
    }

    /// A linear map as a product of so many rows. The bias is left out where the exact GELU follows, which adds it.
    fn product(&self, layer: usize, which: Linear, rows: usize) -> Product {
        let LinearAt { weights, rounded_bias, inner, columns, .. } = self.weights.linear(layer, which);
        let bias = (!self.has_gelu(which)).then_some(rounded_bias);
        Product { weights, bias, inner, columns, rows }
    }

    /// Whether GELU follows a map directly.
    fn has_gelu(&self, which: Linear) -> bool {
        which == Linear::Up && self.spec.design.feed_forward == FeedForward::Gelu
    }

    /// Makes the products that passes will need, and chooses their algorithms.
    fn warm_up(&self, device: &Arc<CudaDevice>) -> Result<(), CudaError> {
        let Some(products) = &self.products else { return Ok(()) };
        // All layers have the shapes of the first.
        let maps = [Linear::Qkv, Linear::AttentionOut, Linear::Up, Linear::Down]
            .map(|which| self.product(0, which, 0));
        products.warm_up(device, &maps, self.pass_tokens)
    }
}

/// The multiplications of a pass from which a sleep until its end pays. They take a millisecond at the 200 trillion operations per
/// second of a large GPU, and waking up takes a twentieth of that. Smaller GPUs take longer.
const LONG_PASS_PRODUCTS: u64 = 100_000_000_000;

/// Whether a pass is so long that its thread should sleep, so that the core can tokenise. Counts the linear maps only.
fn is_long(dims: &Dims, tokens: usize) -> bool {
    let of_layer = dims.hidden * (dims.qkv_columns() + dims.attention_columns() + dims.up_columns())
        + dims.feed_forward * dims.hidden;
    let of_head = if dims.is_sparse { dims.hidden * (dims.hidden + dims.vocabulary) } else { 0 };
    (of_layer * dims.layers + of_head) as u64 * tokens as u64 >= LONG_PASS_PRODUCTS
}

impl Backend for CudaEncoder {
    fn dims(&self) -> Dims {
        self.model.spec.dims
    }

    fn resident_bytes(&self) -> u64 {
        self.model.weights.bytes() + self.model.products.as_ref().map_or(0, Products::bytes)
    }

    fn pass_bytes(&self, shape: PassShape) -> u64 {
        self.plan(shape).bytes as u64
    }

    fn pass_tokens(&self) -> Option<usize> {
        Some(self.model.pass_tokens)
    }

    fn run(&self, items: &[Sequence<'_>], take: &mut dyn FnMut(usize, Vec<f32>)) -> Result<(), PassError> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let shape = items.iter().fold(PassShape::default(), |shape, item| shape.with(item.ids.len()));
        self.compute(items, shape, &mut staging)?;
        let dims = &self.model.spec.dims;
        let numbers = staging.get(items.len() * dims.vector_columns() * 4)?.as_chunks().0;
        for at in 0..items.len() {
            let vector = match dims.is_sparse {
                true => vocabulary::scores(numbers, dims, items.len(), at),
                false => {
                    let own = &numbers[at * dims.hidden..][..dims.hidden];
                    own.iter().map(|number| f32::from_ne_bytes(*number)).collect()
                }
            };
            take(at, vector);
        }
        Ok(())
    }
}

impl fmt::Debug for CudaEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEncoder")
            .field("element", &self.model.element)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// Writes token ids, their rows of the position table, and `cu_seqlens`, each where the plan has it.
fn fill(bytes: &mut [u8], plan: &CudaPlan, items: &[Sequence<'_>], spec: &Spec) {
    let (ids, starts) = bytes.split_at_mut(plan.cu_seqlens);
    let (ids, rows) = ids.split_at_mut(plan.rows);
    let mut ids = ids.as_chunks_mut().0.iter_mut();
    let mut rows = rows.as_chunks_mut().0.iter_mut();
    let mut starts = starts.as_chunks_mut().0.iter_mut();
    let mut end = 0_u32;
    let mut start = |end: u32| {
        if let Some(start) = starts.next() {
            *start = end.to_ne_bytes();
        }
    };
    start(end);
    for item in items {
        for (id, to) in item.ids.iter().zip(&mut ids) {
            *to = id.to_ne_bytes();
        }
        for (row, to) in spec.rows_of(*item).zip(&mut rows) {
            *to = row.to_ne_bytes();
        }
        end += item.ids.len() as u32;
        start(end);
    }
}

/// Refuses what there are no kernels for.
fn check(config: &ModelConfig) -> Result<(), LoadError> {
    let refuse = |found: String, takes: String| {
        Err(LoadError::Unsupported { path: config.transformer.join("config.json"), found, takes })
    };
    let dims = &config.spec.dims;
    if dims.head > HEAD_MAX {
        let found = format!("heads of {} elements", dims.head);
        return refuse(found, format!("at most {HEAD_MAX} on a CUDA device"));
    }
    if dims.hidden > HIDDEN_MAX || dims.heads > HEADS_MAX {
        let found = format!("a width of {}", dims.hidden);
        return refuse(found, format!("at most {HIDDEN_MAX} on a CUDA device"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_sleeps_through_long_passes_only() {
        let dims = |layers, hidden, heads| Dims {
            layers,
            hidden,
            heads,
            kv_heads: heads,
            head: hidden / heads,
            feed_forward: 4 * hidden,
            is_gated: false,
            vocabulary: 30_522,
            positions: 512,
            token_types: 2,
            is_sparse: false,
        };
        // MiniLM has 10.6 million weights in its maps, BERT large 302 million.
        let (minilm, large) = (dims(6, 384, 12), dims(24, 1024, 16));
        assert!(!is_long(&minilm, 8192) && is_long(&minilm, 9500));
        assert!(!is_long(&large, 300) && is_long(&large, 400));
        // A map to the vocabulary has 11.7 million more.
        let sparse = Dims { is_sparse: true, ..minilm };
        assert!(!is_long(&sparse, 4200) && is_long(&sparse, 4600));
    }
}
