//! The layer loop's operations on a CUDA device: each is one launch on the device's stream.

use std::ffi::c_void;
use std::marker::PhantomData;

use cudarc::driver::sys::CUdeviceptr;

use super::CudaModel;
use super::weights::{LinearAt, NormAt};
use crate::device::cuda::{CudaDevice, CudaError, Function};
use crate::engine::PassShape;
use crate::engine::encoder::families::{FeedForward, Gate, NormKind, Sees};
use crate::engine::encoder::forward::{Linear, Norm, Ops};
use crate::engine::encoder::modules::Pooling;
use crate::engine::encoder::plan::{CudaPlan, Matrix};

/// A pass whose ids and `cu_seqlens` are in its arena.
pub(super) struct CudaOps<'a> {
    pub model: &'a CudaModel,
    pub device: &'a CudaDevice,
    pub plan: &'a CudaPlan,
    pub shape: PassShape,
    pub arena: CUdeviceptr,
}

/// Threads of a block, tokens and columns of a tile of a linear map: as in kernels/linear.cu and linear_f32.cu.
struct Tile {
    threads: u32,
    side: usize,
}

const LARGE: Tile = Tile { threads: 256, side: 128 };
const SMALL: Tile = Tile { threads: 128, side: 64 };
const SMALL_F32: Tile = Tile { threads: 256, side: 64 };

/// As in kernels/attention.cu and attention_lanes.cuh.
const ATTENTION_THREADS: u32 = 128;

const POOL_THREADS: u32 = 256;

/// Tokens of a block: as in kernels/rotate.cu.
const ROTATE_TOKENS: usize = 16;
const ROTATE_THREADS: u32 = 128;

/// As in kernels/gate.cu.
const GATE_THREADS: u32 = 128;

/// All keys before a query, or behind it: as in kernels/sees.cuh.
const ALL_KEYS: u32 = u32::MAX;

const BIAS_GELU_THREADS: u32 = 256;

const WARP: usize = 32;

impl CudaOps<'_> {
    fn at(&self, matrix: Matrix) -> CUdeviceptr {
        self.arena + (self.plan.activations + matrix.offset * self.model.element.bytes()) as CUdeviceptr
    }

    fn cu_seqlens(&self) -> CUdeviceptr {
        self.arena + self.plan.cu_seqlens as CUdeviceptr
    }

    /// Whether rows of so many columns, and those of the model's sizes, begin at multiples of what kernels read at a time.
    fn aligned_rows(&self, columns: usize) -> u32 {
        self.aligned() & u32::from(columns.is_multiple_of(self.model.element.chunk()))
    }

    /// Rows begin at multiples of what kernels read at a time.
    fn aligned(&self) -> u32 {
        let (dims, chunk) = (&self.model.spec.dims, self.model.element.chunk());
        let all = [dims.hidden, dims.feed_forward, dims.head];
        u32::from(all.iter().all(|size| size.is_multiple_of(chunk)))
    }

    /// Whether norms are by the mean of squares, as kernels take it.
    fn of_squares(&self) -> u32 {
        u32::from(self.model.spec.design.norm_kind == NormKind::RootMeanSquare)
    }

    /// `x = gelu(x + bias)`, in rows of whole chunks.
    fn bias_gelu(&self, bias: CUdeviceptr, x: Matrix) -> Result<(), CudaError> {
        let chunks = self.shape.cost * x.columns / self.model.element.chunk();
        let (count, columns, x) = (size(chunks), size(x.columns), self.at(x));
        let mut launch = Launch::new(self, &self.model.kernels.bias_gelu);
        launch.arguments.arg(&x).arg(&bias).arg(&columns).arg(&count);
        launch.run((chunks.div_ceil(BIAS_GELU_THREADS as usize), 1), BIAS_GELU_THREADS)
    }

    /// A linear map by the program's own kernels, with GELU behind it where asked for.
    pub fn own_linear(
        &self,
        linear: LinearAt,
        gelu: bool,
        from: Matrix,
        to: Matrix,
    ) -> Result<(), CudaError> {
        let LinearAt { weights, bias, inner, columns, .. } = linear;
        let tokens = self.shape.cost;
        let tiles = |tile: &Tile| tokens.div_ceil(tile.side) * columns.div_ceil(tile.side);
        let kernels = &self.model.kernels.linear;
        // Large tiles read less, but only where there are enough of them for all multiprocessors.
        let (tile, functions) = match &kernels.large {
            None => (SMALL_F32, &kernels.small),
            Some(large) if tiles(&LARGE) >= self.model.multiprocessors => (LARGE, large),
            Some(_) => (SMALL, &kernels.small),
        };
        let aligned = self.aligned_rows(columns);
        let (rows, inner, columns) = (size(tokens), size(inner), size(columns));
        let (from, to) = (self.at(from), self.at(to));
        let mut launch = Launch::new(self, &functions[usize::from(gelu)]);
        launch.arguments.arg(&from).arg(&weights).arg(&bias).arg(&to);
        launch.arguments.arg(&rows).arg(&inner).arg(&columns).arg(&aligned);
        launch.run((tiles(&tile), 1), tile.threads)
    }

    /// `x = x + add`, `to = norm(x)`. All three may be one matrix, which then holds the norm.
    pub fn norm_of_sum(
        &self,
        norm: NormAt,
        eps: f32,
        (x, add): (Matrix, Matrix),
        to: Matrix,
    ) -> Result<(), CudaError> {
        let NormAt { weight, bias } = norm;
        let (hidden, aligned, of_squares) = (size(x.columns), self.aligned(), self.of_squares());
        let (x, add, to) = (self.at(x), self.at(add), self.at(to));
        let mut launch = Launch::new(self, &self.model.kernels.add_norm);
        launch.arguments.arg(&x).arg(&add).arg(&to).arg(&weight).arg(&bias).arg(&eps);
        launch.arguments.arg(&of_squares).arg(&hidden).arg(&aligned);
        launch.run((self.shape.cost, 1), self.norm_threads())
    }

    /// Pools each sequence's rows into one vector in f32. The vectors lie without gaps from this byte of the arena on.
    pub fn pool_to(
        &self,
        from: Matrix,
        pooling: Pooling,
        normalize: bool,
        to: usize,
    ) -> Result<(), CudaError> {
        // As kernels/pool.cu numbers them.
        let pooling: u32 = match pooling {
            Pooling::Mean => 0,
            Pooling::Cls => 1,
            Pooling::Max => 2,
            Pooling::Last => 3,
        };
        let (columns, normalize) = (size(from.columns), u32::from(normalize));
        let aligned = self.aligned_rows(from.columns);
        let (x, cu_seqlens, to) = (self.at(from), self.cu_seqlens(), self.arena + to as CUdeviceptr);
        let mut launch = Launch::new(self, &self.model.kernels.pool);
        launch.arguments.arg(&x).arg(&cu_seqlens).arg(&columns).arg(&pooling);
        launch.arguments.arg(&normalize).arg(&aligned).arg(&to);
        launch.run((self.shape.items, 1), POOL_THREADS)
    }

    /// Threads of a block that normalises a row, a chunk each.
    fn norm_threads(&self) -> u32 {
        size(self.model.spec.dims.hidden.div_ceil(self.model.element.chunk()).next_multiple_of(WARP))
    }
}

/// A kernel and its arguments, in the order of its signature.
struct Launch<'a> {
    device: &'a CudaDevice,
    kernel: &'a Function,
    arguments: Arguments<'a>,
}

/// Where each argument is.
struct Arguments<'a>(Vec<*mut c_void>, PhantomData<&'a ()>);

/// What kernels take.
trait Argument {}
impl Argument for u32 {}
impl Argument for f32 {}
impl Argument for CUdeviceptr {}

/// The most that a kernel here has.
const ARGUMENTS_MAX: usize = 13;

impl<'a> Arguments<'a> {
    fn arg(&mut self, value: &'a impl Argument) -> &mut Self {
        self.0.push(std::ptr::from_ref(value).cast_mut().cast());
        self
    }
}

impl<'a> Launch<'a> {
    fn new(ops: &CudaOps<'a>, kernel: &'a Function) -> Self {
        let arguments = Arguments(Vec::with_capacity(ARGUMENTS_MAX), PhantomData);
        Self { device: ops.device, kernel, arguments }
    }

    /// Enqueues the launch. Without blocks nothing is launched, because CUDA would refuse it.
    fn run(mut self, blocks: (usize, usize), threads: u32) -> Result<(), CudaError> {
        let (across, down) = (size(blocks.0), size(blocks.1));
        if across == 0 || down == 0 {
            return Ok(());
        }
        let kernel = self.kernel.handle();
        // SAFETY: the operations give each kernel the arguments of its signature, pointing into the arena and the weights.
        // Both have room for what the kernel touches by their plans, and live until the pass has waited for the stream.
        unsafe { self.device.launch(kernel, (across, down), threads, &mut self.arguments.0) }
    }
}

/// A size as kernels take it. A pass has far fewer tokens than a u32 can count; the driver would refuse a larger number.
fn size(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Ops for CudaOps<'_> {
    type Error = CudaError;

    fn embed(&mut self, sum: Matrix, to: Matrix) -> Result<(), CudaError> {
        let weights = &self.model.weights;
        let NormAt { weight, bias } = weights.embedding_norm();
        let (words, positions) = (weights.words(), weights.positions());
        let (ids, rows) = (self.arena, self.arena + self.plan.rows as CUdeviceptr);
        let (eps, hidden) = (self.model.spec.norm_eps, size(to.columns));
        let (aligned, of_squares, sum, to) = (self.aligned(), self.of_squares(), self.at(sum), self.at(to));
        let blocks = (self.shape.cost, 1);
        let mut launch = Launch::new(self, &self.model.kernels.embed);
        launch.arguments.arg(&ids).arg(&rows).arg(&words).arg(&positions);
        launch.arguments.arg(&weight).arg(&bias).arg(&eps).arg(&of_squares).arg(&hidden).arg(&aligned);
        launch.arguments.arg(&sum).arg(&to);
        launch.run(blocks, self.norm_threads())
    }

    fn linear(&mut self, layer: usize, which: Linear, from: Matrix, to: Matrix) -> Result<(), CudaError> {
        let linear = self.model.weights.linear(layer, which);
        let gelu = self.model.has_gelu(which);
        if let Some(products) = &self.model.products {
            // The library's own GELU is an approximation. The exact one is applied afterwards, with the bias, in f32.
            let product = self.model.product(layer, which, self.shape.cost);
            // SAFETY: matrices of the arena and of the weights, with room by their plans, which live until the pass has waited
            // for the stream.
            if unsafe { products.multiply(self.device, &product, self.at(from), self.at(to)) }? {
                return if gelu { self.bias_gelu(linear.bias, to) } else { Ok(()) };
            }
        }
        self.own_linear(linear, gelu, from, to)
    }

    fn rotate(&mut self, layer: usize, qkv: Matrix) -> Result<(), CudaError> {
        let spec = &self.model.spec;
        let Some(table) = spec.design.attention_of(layer).rotary else { return Ok(()) };
        let table = self.model.weights.rotary(table);
        let [queries, keys] = self.model.weights.head_norms(layer);
        let tiles = self.shape.longest.div_ceil(ROTATE_TOKENS);
        let (eps, per_sequence, stride) = (spec.norm_eps, size(tiles), size(qkv.columns));
        let [heads, kv_heads, head] = [spec.dims.heads, spec.dims.kv_heads, spec.dims.head].map(size);
        let (qkv, cu_seqlens) = (self.at(qkv), self.cu_seqlens());
        let mut launch = Launch::new(self, &self.model.kernels.rotate);
        launch.arguments.arg(&qkv).arg(&cu_seqlens).arg(&table).arg(&queries).arg(&keys).arg(&eps);
        launch.arguments.arg(&per_sequence).arg(&stride).arg(&heads).arg(&kv_heads).arg(&head);
        launch.run((tiles * self.shape.items, 1), ROTATE_THREADS)
    }

    fn attention(&mut self, layer: usize, qkv: Matrix, to: Matrix) -> Result<(), CudaError> {
        let spec = &self.model.spec;
        let dims = &spec.dims;
        let tiles = self.shape.longest.div_ceil(self.model.kernels.attention_queries);
        // The kernels compute exponentials to the base 2.
        let scale = std::f32::consts::LOG2_E / (dims.head as f32).sqrt();
        let [heads, kv_heads, head] = [dims.heads, dims.kv_heads, dims.head].map(size);
        let (qkv, cu_seqlens, to, per_sequence) = (self.at(qkv), self.cu_seqlens(), self.at(to), size(tiles));
        let (bias, positions, aligned) =
            (self.model.weights.relative(), size(dims.positions), self.aligned());
        let (before, behind) = match spec.design.attention_of(layer).sees {
            Sees::All => (ALL_KEYS, ALL_KEYS),
            Sees::Near(apart) => (size(apart), size(apart)),
            Sees::Before => (ALL_KEYS, 0),
        };
        let mut launch = Launch::new(self, &self.model.kernels.attention);
        launch.arguments.arg(&qkv).arg(&cu_seqlens).arg(&to).arg(&per_sequence);
        launch.arguments.arg(&heads).arg(&kv_heads).arg(&head).arg(&scale).arg(&aligned);
        launch.arguments.arg(&bias).arg(&positions).arg(&before).arg(&behind);
        launch.run((tiles * self.shape.items, dims.heads), ATTENTION_THREADS)
    }

    fn add_norm(
        &mut self,
        layer: usize,
        which: Norm,
        x: Matrix,
        add: Matrix,
        to: Matrix,
    ) -> Result<(), CudaError> {
        self.norm_of_sum(self.model.weights.norm(layer, which), self.model.spec.norm_eps, (x, add), to)
    }

    fn norm_block(&mut self, layer: usize, which: Norm, x: Matrix) -> Result<(), CudaError> {
        let Some(norm) = self.model.weights.block_norm(layer, which) else { return Ok(()) };
        // The sum of x and itself, whose mean of squares is four times as large.
        self.norm_of_sum(norm, 4.0 * self.model.spec.norm_eps, (x, x), x)
    }

    fn gate(&mut self, halves: Matrix, to: Matrix) -> Result<(), CudaError> {
        let FeedForward::Gated { gate, of_second } = self.model.spec.design.feed_forward else {
            return Ok(());
        };
        let columns = size(to.columns);
        let stripes = to.columns.div_ceil(GATE_THREADS as usize * self.model.element.chunk());
        let (halves, to, aligned) = (self.at(halves), self.at(to), self.aligned());
        // As kernels/gate.cu numbers them.
        let function: u32 = match gate {
            Gate::Gelu => 0,
            Gate::Silu => 1,
            Gate::GeluTanh => 2,
        };
        let of_second = u32::from(of_second);
        let mut launch = Launch::new(self, &self.model.kernels.gate);
        launch.arguments.arg(&halves).arg(&to).arg(&columns).arg(&function).arg(&of_second).arg(&aligned);
        launch.run((self.shape.cost, stripes), GATE_THREADS)
    }

    fn pool(&mut self, from: Matrix) -> Result<(), CudaError> {
        self.pool_to(from, self.model.pooling, self.model.normalize, self.plan.vectors)
    }
}
