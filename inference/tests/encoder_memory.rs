//! A pass allocates exactly what its plan says; the process's own allocator counts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use vramq_inference::device::Device;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_inference::engine::{Engine, shape_of};
use vramq_schemas::{Input, Output, Params};

/// The system's allocator, counting while switched on.
struct Counting;

static ON: AtomicBool = AtomicBool::new(false);
static ALL: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

fn count(bytes: usize) {
    if ON.load(SeqCst) {
        ALL.fetch_add(bytes, SeqCst);
        LARGEST.fetch_max(bytes, SeqCst);
    }
}

// SAFETY: every call goes to the system's allocator as it came; counting touches atomics only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: by this function's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: by this function's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: by this function's contract.
        unsafe { System.realloc(start, layout, size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: by this function's contract.
        unsafe { System.dealloc(start, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work`. Returns its result, the bytes of all its allocations (frees do not count), and the bytes of the largest.
fn counted<T>(work: impl FnOnce() -> T) -> (T, usize, usize) {
    ALL.store(0, SeqCst);
    LARGEST.store(0, SeqCst);
    ON.store(true, SeqCst);
    let value = work();
    ON.store(false, SeqCst);
    (value, ALL.load(SeqCst), LARGEST.load(SeqCst))
}

/// Bytes that a pass allocates besides its arena: the vectors that it returns, and for each item its length, order, owner and
/// output. The constant covers the wake-up of the threads.
fn besides_the_arena(items: usize, hidden: usize) -> usize {
    items * (hidden * 4 + size_of::<Output>() + 56) + 1024
}

/// A thread of the pool allocates once when it starts, which may be late on a busy machine. That does not belong to a pass. So a pass runs
/// this often, and the run that allocates the least counts.
const RUNS: usize = 4;

#[test]
fn a_pass_allocates_its_plan_and_its_results_and_nothing_else() {
    // The smallest layers; a gated feed-forward; heads wider than their share; sparse vectors. An output of sparse vectors has two
    // numbers for each element, made of two more.
    for (name, numbers) in [("tiny-mean", 1), ("tiny-modernbert", 1), ("tiny-qwen3", 1), ("tiny-splade", 5)] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        takes_its_plan(&folder, numbers);
    }
}

/// `numbers`: how many numbers each element of a vector takes besides the arena.
fn takes_its_plan(folder: &Path, numbers: usize) {
    for threads in [1, 2, 3] {
        let device = CpuDevice::new(1 << 28, threads).unwrap();
        let encoder = Encoder::load_f32(&Source::Folder(folder.to_owned()), Arc::clone(&device)).unwrap();
        let inputs: Vec<Input> = (0..500).map(|n| Input::Text("some words ".repeat(1 + n % 9))).collect();
        let items = encoder.prepare(&inputs, &Params::default()).unwrap();
        for count in [1, 2, 7, 100, 500] {
            let items = &items[..count];
            let planned = encoder.pass_bytes(shape_of(items)) as usize;
            let baseline = device.memory();
            let runs = (0..RUNS).map(|_| counted(|| encoder.run(items).unwrap()));
            let (outputs, all, largest) = runs.min_by_key(|(_, all, _)| *all).unwrap();
            assert_eq!(outputs.len(), count);
            assert_eq!(largest, planned, "the arena is the largest allocation, of exactly its plan");
            let rest = all - planned;
            eprintln!("{threads} threads, {count} items: {rest} bytes besides the arena of {planned}");
            let bound = besides_the_arena(count, numbers * encoder.dims().vector_columns());
            assert!(
                rest <= bound,
                "{threads} threads, {count} items: {rest} bytes besides the arena, bound {bound}"
            );
            assert_eq!(device.memory(), baseline);
        }
    }
}
