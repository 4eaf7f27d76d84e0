//! A text of many megabytes takes memory only for the tokens that are kept, whatever its content; the process's own allocator
//! counts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};

use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_inference::engine::{Engine, Item};
use vramq_schemas::{Input, Params};

/// The system's allocator, with counts of the bytes allocated now and at most.
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
        // SAFETY: by this function's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), SeqCst);
        // SAFETY: by this function's contract.
        unsafe { System.dealloc(start, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Tests of one program run at a time: each measures what the whole program allocates.
static ALONE: Mutex<()> = Mutex::new(());

const MIB: usize = 1 << 20;

/// The largest text that fits the body of a job.
const TEXT: usize = 15 * MIB;

fn encoder(fixture: &str) -> Encoder {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    Encoder::load_f32(&Source::Folder(folder), CpuDevice::new(1 << 28, 1).unwrap()).unwrap()
}

/// What the items of a text are, and how many bytes more than before were allocated at most.
fn prepared(encoder: &Encoder, text: String) -> (Result<Vec<Item>, String>, usize) {
    let inputs = [Input::Text(text)];
    let before = NOW.load(SeqCst);
    MOST.store(before, SeqCst);
    let items = encoder.prepare(&inputs, &Params::default()).map_err(|refused| refused.to_string());
    (items, MOST.load(SeqCst) - before)
}

/// Tokenizers that are not WordPiece tokenise only a bounded part of what they read.
#[test]
fn a_text_takes_bounded_memory_with_every_tokenizer() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let fixtures = [
        ("tiny-camembert", 24),
        ("tiny-gemma", 300),
        ("tiny-gte", 300),
        ("tiny-modernbert", 300),
        ("tiny-mpnet", 300),
        ("tiny-qwen3", 300),
        ("tiny-roberta", 24),
        ("tiny-xlm-roberta", 24),
    ];
    for (fixture, tokens) in fixtures {
        let encoder = encoder(fixture);
        for piece in ["the cat sat on the mat. ", "the\ncat\n", "中国的首都是北京市。", "😀🎉 x", "é ", "1 "]
        {
            let (items, grown) = prepared(&encoder, piece.repeat(TEXT / piece.len()));
            assert!(grown < 100 * MIB, "{fixture}: {piece:?} takes {grown} bytes");
            let items = match items {
                Ok(items) => items,
                // Characters outside a small vocabulary are one unknown token, however many there are.
                Err(refused) if piece.starts_with('中') && refused.contains("fewer than the") => continue,
                Err(refused) => panic!("{fixture}: {piece:?}: {refused}"),
            };
            let [Item::Tokens { ids, .. }] = &items[..] else { panic!("{items:?}") };
            assert_eq!(ids.len(), tokens, "{fixture}: {piece:?}");
        }
        // The first tokens of an endless word are known only at its end, so it takes all of the text or none.
        let (items, grown) = prepared(&encoder, "x".repeat(TEXT));
        assert!(grown < 100 * MIB, "{fixture}: an endless word takes {grown} bytes");
        if let Err(refused) = items {
            assert!(refused.contains("a text of 15728640 bytes is too long"), "{fixture}: {refused}");
            assert!(refused.contains("the first 262144 bytes"), "{fixture}: {refused}");
        }
        let (items, _) = prepared(&encoder, "x".repeat(64 << 10));
        items.unwrap_or_else(|refused| panic!("{fixture}: a word of 64 KiB: {refused}"));
    }
}

#[test]
fn a_text_takes_memory_for_its_tokens_only() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let encoder = encoder("tiny-long");
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
        let (items, grown) = prepared(&encoder, piece.repeat(TEXT / piece.len()));
        let items = items.unwrap();
        let [Item::Tokens { ids, .. }] = &items[..] else { panic!("{items:?}") };
        assert_eq!(ids.len(), tokens, "{what}");
        assert!(grown < 4 * MIB, "{what} takes {grown} bytes");
    }
}
