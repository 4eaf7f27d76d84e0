//! A text of many megabytes takes memory only for the tokens that are kept, whatever its content; the process's own allocator
//! counts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_inference::engine::{Engine, Item};
use vramq_schemas::{Input, Params};

/// The system's allocator; it knows how much is allocated, and how much was at most.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn grown(bytes: usize) {
    MOST.fetch_max(NOW.fetch_add(bytes, SeqCst) + bytes, SeqCst);
}

// SAFETY: every call goes to the system's allocator as it came; counting touches atomics only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller's word.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller's word.
        unsafe { System.dealloc(start, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MIB: usize = 1 << 20;

/// The largest text that fits the body of a job.
const TEXT: usize = 15 * MIB;

#[test]
fn a_text_takes_memory_for_its_tokens_only() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-long");
    let encoder = Encoder::load(&Source::Folder(folder), CpuDevice::new(1 << 28, 1).unwrap()).unwrap();
    let every = |letters: usize| format!("{} ", "x".repeat(letters - 1));
    for (what, piece, tokens) in [
        ("one endless word", "x".to_owned(), 3),
        ("one endless word of accents", "e\u{301}".to_owned(), 3),
        ("nothing but spaces", " \u{3000}".to_owned(), 2),
        ("nothing that is seen", "\u{200b}".to_owned(), 2),
        ("words that nobody knows", every(1000), 512),
        ("words that are longer than its tokens together", every(100_000), TEXT / 100_000 + 2),
        ("punctuation", "。".to_owned(), 512),
        ("ordinary words", "the cat sat on the mat. ".to_owned(), 512),
    ] {
        let inputs = [Input::Text(piece.repeat(TEXT / piece.len()))];
        let before = NOW.load(SeqCst);
        MOST.store(before, SeqCst);
        let items = encoder.prepare(&inputs, &Params::default()).unwrap();
        let grown = MOST.load(SeqCst) - before;
        let [Item::Tokens { ids, .. }] = &items[..] else { panic!("{items:?}") };
        assert_eq!(ids.len(), tokens, "{what}");
        assert!(grown < 4 * MIB, "{what} takes {grown} bytes");
    }
}
