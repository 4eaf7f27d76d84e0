//! The layer loop's operations on the CPU.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::attention::HeadAttention;
use super::families::{FeedForward, Spec};
use super::forward::{Linear, Norm, Ops};
use super::matmul::Product;
use super::modules::Pooling;
use super::pack::Shard;
use super::plan::Matrix;
use super::rotary::{HeadNorms, Rotate};
use super::simd::Kernel;
use super::tiles::TileProduct;
use super::token_ops::{AddNorm, Embed, Gated, NormPointers, Pool};
use super::units::CpuUnits;
use super::weights::{LinearPointers, Weights};

/// One thread's part of a pass: its own shard, or its share of every operation on a shard that all threads work on.
pub(super) struct CpuOps<'a> {
    pub model: &'a CpuModel,
    pub shard: Shard,
    /// Token ids of the whole pass, packed.
    pub ids: &'a [u32],
    /// The row of the position table that each of them takes.
    pub rows: &'a [u32],
    /// Starts of the pass's packed sequences, and the end of the last.
    pub cu_seqlens: &'a [u32],
    /// The shard's activations, in elements that [`Matrix`] counts from here.
    pub activations: *mut f32,
    /// This thread's own.
    pub scratch: *mut f32,
    /// Vectors of the whole pass.
    pub vectors: *mut f32,
    pub thread: Participant<'a>,
}

/// The parts of a model that the operations need.
#[derive(Debug)]
pub(super) struct CpuModel {
    pub weights: Weights,
    pub spec: Spec,
    pub pooling: Pooling,
    pub normalize: bool,
    pub units: CpuUnits,
}

/// A thread among those that work on one shard.
#[derive(Clone, Copy)]
pub(super) struct Participant<'a> {
    pub barrier: &'a Barrier,
    pub rank: usize,
}

/// The fewest rows per thread for which rows are divided among threads. With fewer rows columns are divided, so that no thread
/// reads all weights for a few rows.
const ROWS_PER_THREAD_MIN: usize = 32;

impl CpuOps<'_> {
    pub fn at(&self, matrix: Matrix, row: usize) -> *mut f32 {
        // Wrapping, because an empty share may begin at the end.
        self.activations.wrapping_add(matrix.offset + row * matrix.columns)
    }

    /// This thread's part of `units`, in whole multiples of `grain` but for the last.
    pub fn share(&self, units: usize, grain: usize) -> std::ops::Range<usize> {
        let each = units.div_ceil(grain).div_ceil(self.thread.barrier.width) * grain;
        let start = (self.thread.rank * each).min(units);
        start..(start + each).min(units)
    }

    /// Sequences of the shard: first row in the shard, and tokens.
    pub fn sequences(&self) -> impl Iterator<Item = (usize, usize)> {
        let bounds = &self.cu_seqlens[self.shard.first..=self.shard.first + self.shard.sequences];
        bounds.windows(2).map(|bounds| {
            let (start, end) = (bounds[0] as usize, bounds[1] as usize);
            (start - self.shard.first_token, end - start)
        })
    }

    /// Runs a kernel of this thread.
    pub fn run(&self, kernel: &impl Kernel) {
        // SAFETY: kernels made here and in `vocabulary` point into this shard's activations, at rows below its tokens, into weights of
        // the sizes that `dims` says, and to this thread's scratch; the plan made all of them as large as the pass
        // needs. Threads that share a shard write rows, columns or heads that no other has, and wait for each other
        // between operations; other threads have other shards.
        unsafe { self.model.units.vectors.run(kernel) };
    }

    /// `to = from · weights + bias`, then GELU if asked for.
    pub fn product(&self, map: LinearPointers, from: Matrix, to: Matrix, gelu: bool) -> Result<(), Broken> {
        let units = self.model.units;
        let all = self.shard.tokens;
        let (rows, columns) =
            if self.thread.barrier.width == 1 || all >= ROWS_PER_THREAD_MIN * self.thread.barrier.width {
                (self.share(all, units.grain_rows()), 0..map.columns)
            } else {
                (0..all, self.share(map.columns, units.panel_columns()))
            };
        let part = map.part(units, columns.start, columns.len());
        let product = Product {
            a: self.at(from, rows.start),
            a_stride: from.columns,
            b: part.weights,
            bias: part.bias,
            c: self.at(to, rows.start).wrapping_add(columns.start),
            c_stride: to.columns,
            rows: rows.len(),
            inner: part.inner,
            columns: part.columns,
            gelu,
        };
        match units.tiles {
            None => self.run(&product),
            Some(tiles) => self.run(&TileProduct { tiles, product, scratch: self.scratch.cast() }),
        }
        self.thread.wait()
    }

    /// `x = norm(x)`.
    pub fn norm(&self, norm: NormPointers, x: Matrix) -> Result<(), Broken> {
        let rows = self.share(self.shard.tokens, 1);
        // The norm is that of x + x; `norm` allows for the factor of two.
        let x_rows = self.at(x, rows.start);
        self.run(&AddNorm {
            x: x_rows,
            add: x_rows,
            to: x_rows,
            norm: norm.of_doubled(),
            rows: rows.len(),
            hidden: x.columns,
        });
        self.thread.wait()
    }
}

impl Ops for CpuOps<'_> {
    type Error = Broken;

    fn embed(&mut self, sum: Matrix, to: Matrix) -> Result<(), Broken> {
        let rows = self.share(self.shard.tokens, 1);
        let weights = &self.model.weights;
        self.run(&Embed {
            ids: &self.ids[self.shard.first_token..][rows.clone()],
            rows: &self.rows[self.shard.first_token..][rows.clone()],
            words: weights.words(),
            positions: weights.positions(),
            norm: weights.embedding_norm(),
            hidden: to.columns,
            sum: self.at(sum, rows.start),
            to: self.at(to, rows.start),
        });
        self.thread.wait()
    }

    fn linear(&mut self, layer: usize, which: Linear, from: Matrix, to: Matrix) -> Result<(), Broken> {
        let gelu = which == Linear::Up && self.model.spec.design.feed_forward == FeedForward::Gelu;
        self.product(self.model.weights.linear(layer, which), from, to, gelu)
    }

    fn rotate(&mut self, layer: usize, qkv: Matrix) -> Result<(), Broken> {
        let (spec, weights) = (&self.model.spec, &self.model.weights);
        let rows = self.share(self.shard.tokens, 1);
        let Some(table) = spec.design.attention_of(layer).rotary else { return self.thread.wait() };
        for (start, tokens) in self.sequences() {
            let (first, end) = (rows.start.max(start), rows.end.min(start + tokens));
            if first >= end {
                continue;
            }
            self.run(&Rotate {
                qkv: self.at(qkv, first),
                stride: qkv.columns,
                tokens: end - first,
                heads: spec.dims.heads,
                kv_heads: spec.dims.kv_heads,
                head: spec.dims.head,
                norms: weights.head_norms(layer).map(|[queries, keys]| HeadNorms {
                    queries,
                    keys,
                    eps: spec.norm_eps,
                }),
                table: weights.rotary(table).wrapping_add((first - start) * spec.dims.head),
            });
        }
        self.thread.wait()
    }

    fn attention(&mut self, layer: usize, qkv: Matrix, to: Matrix) -> Result<(), Broken> {
        let spec = &self.model.spec;
        let dims = &spec.dims;
        let sees = spec.design.attention_of(layer).sees;
        let mut unit = 0;
        for (start, tokens) in self.sequences() {
            for head in 0..dims.heads {
                unit += 1;
                if tokens == 0 || unit % self.thread.barrier.width != self.thread.rank {
                    continue;
                }
                let queries = self.at(qkv, start);
                let keys = queries.wrapping_add(dims.attention_columns());
                let kv_head = head / (dims.heads / dims.kv_heads) * dims.head;
                self.run(&HeadAttention {
                    queries: queries.wrapping_add(head * dims.head),
                    keys: keys.wrapping_add(kv_head),
                    values: keys.wrapping_add(dims.kv_columns() + kv_head),
                    stride: qkv.columns,
                    to: self.at(to, start).wrapping_add(head * dims.head),
                    to_stride: to.columns,
                    tokens,
                    head: dims.head,
                    sees,
                    bias: spec.relative.map(|_| {
                        let row = self.model.weights.relative().wrapping_add(head * spec.distances());
                        // The distance of a token to itself is in the middle.
                        row.wrapping_add(dims.positions - 1)
                    }),
                    scratch: self.scratch,
                });
            }
        }
        self.thread.wait()
    }

    fn add_norm(
        &mut self,
        layer: usize,
        which: Norm,
        x: Matrix,
        add: Matrix,
        to: Matrix,
    ) -> Result<(), Broken> {
        let rows = self.share(self.shard.tokens, 1);
        self.run(&AddNorm {
            x: self.at(x, rows.start),
            add: self.at(add, rows.start),
            to: self.at(to, rows.start),
            norm: self.model.weights.norm(layer, which),
            rows: rows.len(),
            hidden: x.columns,
        });
        self.thread.wait()
    }

    fn norm_block(&mut self, layer: usize, which: Norm, x: Matrix) -> Result<(), Broken> {
        match self.model.weights.block_norm(layer, which) {
            Some(norm) => self.norm(norm, x),
            None => self.thread.wait(),
        }
    }

    fn gate(&mut self, halves: Matrix, to: Matrix) -> Result<(), Broken> {
        let rows = self.share(self.shard.tokens, 1);
        if let FeedForward::Gated { gate, of_second } = self.model.spec.design.feed_forward {
            self.run(&Gated {
                halves: self.at(halves, rows.start),
                gate,
                of_second,
                rows: rows.len(),
                columns: to.columns,
                to: self.at(to, rows.start),
            });
        }
        self.thread.wait()
    }

    fn pool(&mut self, from: Matrix) -> Result<(), Broken> {
        let hidden = from.columns;
        for (at, (start, tokens)) in self.sequences().enumerate() {
            if at % self.thread.barrier.width != self.thread.rank {
                continue;
            }
            self.run(&Pool {
                x: self.at(from, start),
                tokens,
                hidden,
                pooling: self.model.pooling,
                normalize: self.model.normalize,
                to: self.vectors.wrapping_add((self.shard.first + at) * hidden),
            });
        }
        self.thread.wait()
    }
}

/// Where the threads of a pass wait for each other, so that they go through the same operations in step.
pub(super) struct Barrier {
    width: usize,
    /// How many threads wait in the current generation.
    arrived: AtomicUsize,
    /// How many times all threads have arrived.
    generation: AtomicUsize,
    broken: AtomicBool,
}

/// Returned by a wait if another thread of the barrier has panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// How often a thread polls before it yields. Waits are short, because all threads have the same work, and a sleep in the kernel
/// usually costs more.
const SPINS: usize = 4096;

impl Barrier {
    pub fn new(width: usize) -> Self {
        Self {
            width,
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
        }
    }
}

impl Participant<'_> {
    /// Waits until all threads have arrived: what each wrote before, all see after.
    pub fn wait(&self) -> Result<(), Broken> {
        let barrier = self.barrier;
        if barrier.width == 1 {
            return Ok(());
        }
        let generation = barrier.generation.load(Ordering::Acquire);
        if barrier.arrived.fetch_add(1, Ordering::AcqRel) + 1 == barrier.width {
            barrier.arrived.store(0, Ordering::Relaxed);
            barrier.generation.store(generation.wrapping_add(1), Ordering::Release);
            return Ok(());
        }
        let mut looks = 0;
        while barrier.generation.load(Ordering::Acquire) == generation {
            if barrier.broken.load(Ordering::Relaxed) {
                return Err(Broken);
            }
            looks += 1;
            if looks < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

/// Breaks the barrier when its thread unwinds, so that no other thread waits for it for ever.
pub(super) struct BreaksBarrier<'a>(pub &'a Barrier);

impl Drop for BreaksBarrier<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.broken.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_meet_at_a_barrier_and_see_what_each_has_done() {
        let barrier = Barrier::new(3);
        let done: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (barrier, done) = (&barrier, &done);
                scope.spawn(move || {
                    for round in 1..=500 {
                        done[rank].store(round, Ordering::Relaxed);
                        Participant { barrier, rank }.wait().unwrap();
                        assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == round));
                        Participant { barrier, rank }.wait().unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_frees_the_threads_that_wait() {
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| Participant { barrier: &barrier, rank: 0 }.wait());
            let panics = scope.spawn(|| {
                let _breaks = BreaksBarrier(&barrier);
                std::panic::resume_unwind(Box::new("gone"));
            });
            assert!(panics.join().is_err());
            assert_eq!(waits.join().unwrap(), Err(Broken));
        });
    }
}
