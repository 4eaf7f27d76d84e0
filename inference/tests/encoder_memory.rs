//! A pass allocates exactly what its plan says, and a loaded model holds its weights once; the process's own allocator counts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};

use vramq_inference::device::Device;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{CpuUnits, Dims, Encoder, Level, Parts, Source};
use vramq_inference::engine::{Engine, shape_of};
use vramq_schemas::{Input, Output, Params};

/// The system's allocator, counting while switched on.
struct Counting;

static ON: AtomicBool = AtomicBool::new(false);
static ALL: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);
/// Bytes that were allocated and not freed since. Less than zero where something older was freed.
static HELD: AtomicIsize = AtomicIsize::new(0);

/// The counters are of the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn count(bytes: usize) {
    if ON.load(SeqCst) {
        ALL.fetch_add(bytes, SeqCst);
        LARGEST.fetch_max(bytes, SeqCst);
        HELD.fetch_add(bytes as isize, SeqCst);
    }
}

fn uncount(bytes: usize) {
    if ON.load(SeqCst) {
        HELD.fetch_sub(bytes as isize, SeqCst);
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
        uncount(layout.size());
        // SAFETY: by this function's contract.
        unsafe { System.realloc(start, layout, size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        uncount(layout.size());
        // SAFETY: by this function's contract.
        unsafe { System.dealloc(start, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What the allocator was asked for, in bytes.
struct Counts {
    /// All allocations; frees do not count.
    all: usize,
    largest: usize,
    held: isize,
}

fn counted<T>(work: impl FnOnce() -> T) -> (T, Counts) {
    ALL.store(0, SeqCst);
    LARGEST.store(0, SeqCst);
    HELD.store(0, SeqCst);
    ON.store(true, SeqCst);
    let value = work();
    ON.store(false, SeqCst);
    (value, Counts { all: ALL.load(SeqCst), largest: LARGEST.load(SeqCst), held: HELD.load(SeqCst) })
}

/// Bytes that a pass allocates besides its arena: the vectors that it returns, and for each item its length, order, owner and
/// output. The constant covers the wake-up of the threads.
fn besides_the_arena(items: usize, hidden: usize) -> usize {
    items * (hidden * 4 + size_of::<Output>() + 56) + 1024
}

/// A thread of the pool allocates once when it starts, which may be late on a busy machine. That does not belong to a pass. So a pass runs
/// this often, and the run that allocates the least counts.
const RUNS: usize = 4;

/// Every format of weights: f32 for vector units, and both of tiles.
fn all_units() -> [CpuUnits; 3] {
    let tiles = [Parts::Split, Parts::Rounded].map(|parts| CpuUnits::tile_model(Level::best(), parts));
    [CpuUnits::vectors(Level::best()), tiles[0], tiles[1]]
}

fn fixture(name: &str) -> Source {
    Source::Folder(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name))
}

#[test]
fn a_pass_allocates_its_plan_and_its_results_and_nothing_else() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // The smallest layers; a gated feed-forward; heads wider than their share; sparse vectors. An output of sparse vectors has two
    // numbers for each element, made of two more.
    for (name, numbers) in [("tiny-mean", 1), ("tiny-modernbert", 1), ("tiny-qwen3", 1), ("tiny-splade", 5)] {
        let [vectors, tiles @ ..] = all_units();
        for threads in [1, 2, 3] {
            takes_its_plan(name, numbers, vectors, threads, &[1, 2, 7, 100, 500]);
        }
        // The model of tiles is slow. The last pass has rows for several blocks of tiles on each thread.
        for units in tiles {
            for threads in [1, 3] {
                takes_its_plan(name, numbers, units, threads, &[1, 7, 30]);
            }
        }
    }
}

/// `numbers`: how many numbers each element of a vector takes besides the arena.
fn takes_its_plan(name: &str, numbers: usize, units: CpuUnits, threads: usize, counts: &[usize]) {
    let device = CpuDevice::new(1 << 28, threads).unwrap();
    let encoder = Encoder::load_on_units(&fixture(name), Arc::clone(&device), units).unwrap();
    let inputs: Vec<Input> = (0..500).map(|n| Input::Text("some words ".repeat(1 + n % 9))).collect();
    let items = encoder.prepare(&inputs, &Params::default()).unwrap();
    for count in counts {
        let what = format!("{name}, {units}, {threads} threads, {count} items");
        let items = &items[..*count];
        let planned = encoder.pass_bytes(shape_of(items)) as usize;
        let baseline = device.memory();
        let runs = (0..RUNS).map(|_| counted(|| encoder.run(items).unwrap()));
        let (outputs, counts) = runs.min_by_key(|(_, counts)| counts.all).unwrap();
        assert_eq!(outputs.len(), *count);
        assert_eq!(
            counts.largest, planned,
            "{what}: the arena is the largest allocation, of exactly its plan"
        );
        let rest = counts.all - planned;
        eprintln!("{what}: {rest} bytes besides the arena of {planned}");
        let bound = besides_the_arena(*count, numbers * encoder.dims().vector_columns());
        assert!(rest <= bound, "{what}: {rest} bytes besides the arena, bound {bound}");
        assert_eq!(device.memory(), baseline);
    }
}

/// Rows and columns that packed weights are rounded up to: a step of depth, and a block of columns.
const TILES: usize = 32;

/// The elements of the layers' linear maps, with rows and columns rounded up to multiples.
fn map_elements(dims: &Dims, multiple: usize) -> usize {
    let maps = [
        (dims.hidden, dims.qkv_columns()),
        (dims.attention_columns(), dims.hidden),
        (dims.hidden, dims.up_columns()),
        (dims.feed_forward, dims.hidden),
    ];
    let elements = |(inner, columns): (usize, usize)| {
        inner.next_multiple_of(multiple) * columns.next_multiple_of(multiple)
    };
    dims.layers * maps.map(elements).iter().sum::<usize>()
}

/// What a load may hold more or less than another one besides the weights: threads start and end, and tokenizers sort their tokens at
/// random. Single loads of one model differed by 20 KiB, those in the middle of [`LOADS`] by 8. A second format of the maps would be at
/// least twice as much as this.
const HELD_BESIDES: usize = 24 << 10;

/// A model is loaded this often, and the load in the middle counts.
const LOADS: usize = 5;

#[test]
fn a_loaded_model_holds_its_weights_in_one_format() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Maps of whole tiles, and maps that no tile divides.
    for name in ["tiny-modernbert", "tiny-qwen3", "tiny-gemma"] {
        let loaded = all_units().map(|units| {
            let device = CpuDevice::new(1 << 28, 1).unwrap();
            let free = device.memory().free;
            let load = || Encoder::load_on_units(&fixture(name), Arc::clone(&device), units).unwrap();
            // The first load also fills what the process keeps.
            let encoder = load();
            let (dims, resident) = (encoder.dims(), encoder.resident_bytes() as usize);
            assert_eq!((free - device.memory().free) as usize, resident, "{name}, {units}");
            let mut held = [(); LOADS].map(|()| counted(load).1.held);
            held.sort_unstable();
            (units, dims, resident, held[LOADS / 2])
        });
        let [(_, dims, vectors, of_vectors), (_, _, split, _), (_, _, rounded, _)] = loaded;
        // Two parts of two bytes are as large as an f32; the maps of a rounded model are half of that.
        let elements = map_elements(&dims, TILES);
        assert_eq!(split - rounded, 2 * elements, "{name}: {split} and {rounded} bytes");
        // All else is the same on vector units, which round up as well: no second format lies beside that of the tiles.
        let rest = split - 4 * elements;
        let rest_max = vectors - 4 * map_elements(&dims, 1);
        assert!(rest <= rest_max, "{name}: {rest} bytes besides the maps, in f32 at most {rest_max}");
        assert!(2 * map_elements(&dims, 1) > 2 * HELD_BESIDES, "{name}: too small to see a second format");
        let besides = of_vectors - vectors as isize;
        for (units, _, resident, held) in loaded {
            let more = held - resident as isize - besides;
            eprintln!("{name}, {units}: {held} bytes held, {resident} of them weights; besides {more:+}");
            assert!(
                more.unsigned_abs() <= HELD_BESIDES,
                "{name}, {units}: {held} bytes are held, and {resident} are the weights'; in f32 {besides} are beside them"
            );
        }
    }
}
