//! Runs a pass on the CPU device: allocates its memory, and gives its items to the device's threads.

use std::fmt;
use std::sync::Arc;

use crate::device::cpu::CpuDevice;
use crate::engine::{PassError, PassShape};

use super::barrier::{Barrier, BreaksBarrier, Participant};
use super::config::{Dims, ModelConfig};
use super::cpu::{CpuModel, CpuOps};
use super::families::Sequence;
use super::pack::{Packing, Shards};
use super::plan::{CpuPlan, Layout, activations_per_token};
use super::units::CpuUnits;
use super::weights::Weights;
use super::{Backend, LoadError, forward};

/// A model on the CPU device.
pub(super) struct CpuEncoder {
    model: CpuModel,
    device: Arc<CpuDevice>,
}

impl CpuEncoder {
    pub fn load(config: &ModelConfig, units: CpuUnits, device: Arc<CpuDevice>) -> Result<Self, LoadError> {
        let model = CpuModel {
            weights: Weights::load(config, units, &device)?,
            spec: config.spec.clone(),
            pooling: config.pooling,
            normalize: config.normalize,
            units,
        };
        Ok(Self { model, device })
    }

    fn plan(&self, shape: PassShape) -> CpuPlan {
        CpuPlan::new(&self.model.spec.dims, self.model.units, self.device.threads(), shape)
    }
}

impl Backend for CpuEncoder {
    fn dims(&self) -> Dims {
        self.model.spec.dims
    }

    fn resident_bytes(&self) -> u64 {
        self.model.weights.bytes()
    }

    fn pass_bytes(&self, shape: PassShape) -> u64 {
        self.plan(shape).bytes as u64
    }

    fn run(&self, items: &[Sequence<'_>], take: &mut dyn FnMut(usize, Vec<f32>)) -> Result<(), PassError> {
        let shape = items.iter().fold(PassShape::default(), |shape, item| shape.with(item.ids.len()));
        let plan = self.plan(shape);
        let arena = self.device.alloc_arena(plan.bytes)?;
        let lengths: Vec<usize> = items.iter().map(|item| item.ids.len()).collect();
        let packing = Packing::new(&lengths, &self.model.spec.dims, self.device.threads());
        let pass = Pass { model: &self.model, packing: &packing, plan: &plan, arena: arena.as_ptr() };
        pass.fill(items);
        let barrier = Barrier::new(match packing.shards {
            Shards::Shared(_) => self.device.threads(),
            Shards::PerThread(_) => 1,
        });
        self.device.on_all_threads(|rank| pass.run(rank, &barrier));
        pass.vectors(take);
        Ok(())
    }
}

impl fmt::Debug for CpuEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuEncoder")
            .field("units", &self.model.units)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// A pass that has its memory.
struct Pass<'a> {
    model: &'a CpuModel,
    packing: &'a Packing,
    plan: &'a CpuPlan,
    arena: *mut u8,
}

// SAFETY: only the arena is written. `run` gives every thread parts of it that no other thread writes.
unsafe impl Sync for Pass<'_> {}

impl Pass<'_> {
    fn at<T>(&self, byte: usize) -> *mut T {
        debug_assert!(byte <= self.plan.bytes);
        self.arena.wrapping_add(byte).cast()
    }

    /// Writes token ids, their rows of the position table, and `cu_seqlens`, in packed order.
    fn fill(&self, items: &[Sequence<'_>]) {
        let (ids, cu_seqlens): (*mut u32, *mut u32) = (self.at(self.plan.ids), self.at(self.plan.cu_seqlens));
        let rows: *mut u32 = self.at(self.plan.rows);
        let mut end = 0;
        for (k, at) in self.packing.order.iter().enumerate() {
            let item = items[*at as usize];
            let tokens = item.ids.len();
            // SAFETY: the plan has room for all items' tokens and for one start more than items; nothing else holds
            // a reference into the arena yet.
            unsafe {
                cu_seqlens.add(k).write(end as u32);
                ids.add(end).copy_from_nonoverlapping(item.ids.as_ptr(), tokens);
                for (at, row) in self.model.spec.rows_of(item).enumerate() {
                    rows.add(end + at).write(row);
                }
            }
            end += tokens;
        }
        // SAFETY: as above: this is the one more.
        unsafe { cu_seqlens.add(items.len()).write(end as u32) };
    }

    /// One thread's work: its own shard, or its share of the one for all.
    fn run(&self, rank: usize, barrier: &Barrier) {
        let (shard, rank_in_barrier) = match &self.packing.shards {
            Shards::Shared(shard) => (shard, rank),
            Shards::PerThread(shards) => {
                let Some(shard) = shards.get(rank) else { return };
                (shard, 0)
            }
        };
        let dims = &self.model.spec.dims;
        let items = self.packing.order.len();
        let tokens = self.packing.shards.as_slice().iter().map(|shard| shard.tokens).sum();
        let _breaks = BreaksBarrier(barrier);
        let activations = self.at::<f32>(self.plan.activations);
        let mut ops = CpuOps {
            model: self.model,
            shard: *shard,
            // SAFETY: `fill` has written this many; no one writes them again while the pass runs.
            ids: unsafe { std::slice::from_raw_parts(self.at(self.plan.ids), tokens) },
            // SAFETY: as above.
            rows: unsafe { std::slice::from_raw_parts(self.at(self.plan.rows), tokens) },
            // SAFETY: as above.
            cu_seqlens: unsafe { std::slice::from_raw_parts(self.at(self.plan.cu_seqlens), items + 1) },
            activations: activations.wrapping_add(shard.first_token * activations_per_token(dims)),
            scratch: self.at(self.plan.scratch + rank * self.plan.scratch_stride),
            vectors: self.at(self.plan.vectors),
            thread: Participant { barrier, rank: rank_in_barrier },
        };
        // `Broken` means that another thread has panicked. The caller gets that panic.
        let (spec, at) = (&self.model.spec, Layout::new(dims, shard.tokens));
        let _ = match dims.is_sparse {
            false => forward::forward(&mut ops, spec, &at),
            true => forward::layers(&mut ops, spec, &at).and_then(|_| ops.pool_vocabulary(&at)),
        };
    }

    /// Gives the vectors to `take` in the items' order.
    fn vectors(&self, take: &mut dyn FnMut(usize, Vec<f32>)) {
        let columns = self.model.spec.dims.vector_columns();
        let mut sequence = vec![0; self.packing.order.len()];
        for (k, at) in self.packing.order.iter().enumerate() {
            sequence[*at as usize] = k;
        }
        for (at, k) in sequence.into_iter().enumerate() {
            let vector = self.at::<f32>(self.plan.vectors).wrapping_add(k * columns);
            // SAFETY: the pass has ended and written a vector of so many elements for each sequence.
            take(at, unsafe { std::slice::from_raw_parts(vector, columns) }.to_vec());
        }
    }
}
