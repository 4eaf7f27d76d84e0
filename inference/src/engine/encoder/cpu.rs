//! The layer loop's operations on the CPU.

use std::ops::Range;

use super::attention::HeadAttention;
use super::barrier::{Broken, Participant};
use super::families::{FeedForward, Spec};
use super::forward::{Linear, Norm, Ops, map_by_map};
use super::matmul::Product;
use super::modules::Pooling;
use super::pack::Shard;
use super::plan::{Layout, Matrix};
use super::rotary::{HeadNorms, Rotate};
use super::simd::Kernel;
use super::tiles::{TileFeedForward, TileProduct, Tiles};
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

/// The fewest rows per thread for which rows are divided among threads. With fewer rows columns are divided, so that no thread
/// reads all weights for a few rows.
const ROWS_PER_THREAD_MIN: usize = 32;

impl CpuOps<'_> {
    pub fn at(&self, matrix: Matrix, row: usize) -> *mut f32 {
        // Wrapping, because an empty share may begin at the end.
        self.activations.wrapping_add(matrix.offset + row * matrix.columns)
    }

    /// This thread's part of `units`, in whole multiples of `grain` but for the last.
    pub fn share(&self, units: usize, grain: usize) -> Range<usize> {
        let each = units.div_ceil(grain).div_ceil(self.thread.barrier.width) * grain;
        let start = (self.thread.rank * each).min(units);
        start..(start + each).min(units)
    }

    /// This thread's rows of a product; `None` where columns are divided among threads.
    fn own_rows(&self) -> Option<Range<usize>> {
        let (all, threads) = (self.shard.tokens, self.thread.barrier.width);
        let divided = threads == 1 || all >= ROWS_PER_THREAD_MIN * threads;
        divided.then(|| self.share(all, self.model.units.grain_rows()))
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
        let (rows, columns) = match self.own_rows() {
            Some(rows) => (rows, 0..map.columns),
            None => (0..self.shard.tokens, self.share(map.columns, units.panel_columns())),
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

    /// The feed-forward on tiles, in one.
    fn tile_feed_forward(&self, tiles: Tiles, rows: Range<usize>, layer: usize, [from, to]: [Matrix; 2]) {
        let [up, down] = [Linear::Up, Linear::Down].map(|map| self.model.weights.linear(layer, map));
        let product = |map: LinearPointers| Product {
            a: self.at(from, rows.start),
            a_stride: from.columns,
            b: map.weights,
            bias: map.bias,
            c: self.at(to, rows.start),
            c_stride: to.columns,
            rows: rows.len(),
            inner: map.inner,
            columns: map.columns,
            gelu: false,
        };
        self.run(&TileFeedForward {
            tiles,
            between: self.model.spec.design.feed_forward,
            up: product(up),
            down: product(down),
            scratch: self.scratch.cast(),
        });
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

    fn feed_forward(&mut self, layer: usize, spec: &Spec, from: Matrix, at: &Layout) -> Result<(), Broken> {
        match (self.model.units.tiles, self.own_rows()) {
            (Some(tiles), Some(rows)) if Tiles::has_in_one(spec.dims.is_gated, spec.dims.feed_forward) => {
                self.tile_feed_forward(tiles, rows, layer, [from, at.y]);
                self.thread.wait()
            }
            _ => map_by_map(self, layer, spec, from, at),
        }
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
