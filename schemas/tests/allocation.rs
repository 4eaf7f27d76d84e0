//! How much memory decoding takes, by an allocator that counts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{ENCODINGS, failure, job_of, jobs, outputs, sparse};
use vramq_schemas::codec::DECODE_BYTES_MAX;
use vramq_schemas::{BODY_BYTES_MAX, Encoding, Failure, ItemProgress, Job, Outputs, codec};

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

/// Counts the bytes that this thread has asked for and not given back.
struct Counting;

fn count(more: usize, less: usize) {
    let now = NOW.get().wrapping_add(more).wrapping_sub(less);
    NOW.set(now);
    // Freeing another thread's memory makes the count wrap around, which is not a peak.
    if now < usize::MAX / 2 {
        PEAK.set(PEAK.get().max(now));
    }
}

// SAFETY: every call goes to `System` unchanged; counting touches no memory of the allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both are there while it copies.
        count(size, 0);
        count(0, layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The peak memory of decoding as any type of body, with the result.
fn peak(body: &[u8], encoding: Encoding) -> usize {
    fn of<T>(decode: impl Fn() -> T) -> usize {
        let before = NOW.get();
        PEAK.set(before);
        drop(decode());
        assert_eq!(NOW.get(), before, "all of it is given back");
        PEAK.get() - before
    }
    of(|| codec::decode::<Job>(body, encoding))
        .max(of(|| codec::decode::<Outputs>(body, encoding)))
        .max(of(|| codec::decode::<Failure>(body, encoding)))
        .max(of(|| codec::decode::<ItemProgress>(body, encoding)))
}

/// What a short body may take, whatever it claims.
fn short_bound(body: &[u8]) -> usize {
    128 * body.len() + 8 * 1024
}

/// Every beginning of every valid body, followed by a length that is not there.
#[test]
fn a_short_body_that_claims_a_lot() {
    let claims: [&[u8]; 10] = [
        &[],
        // MessagePack: a list, a map, bytes and a text of 4 GiB.
        &[0xdd, 0xff, 0xff, 0xff, 0xff],
        &[0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0xc6, 0xff, 0xff, 0xff, 0xff],
        &[0xdb, 0xff, 0xff, 0xff, 0xff],
        // bincode.
        &[0xfb, 0xff, 0xff],
        &[0xfc, 0x00, 0x00, 0xff, 0x00],
        &[0xfc, 0xff, 0xff, 0xff, 0xff],
        &[0xfd, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        &[0xfd, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
    ];
    for encoding in ENCODINGS {
        let mut bodies =
            jobs().iter().map(|(_, job)| codec::encode(job, encoding).unwrap()).collect::<Vec<_>>();
        bodies.push(codec::encode(&outputs(), encoding).unwrap());
        bodies.push(codec::encode(&sparse(), encoding).unwrap());
        bodies.push(codec::encode(&failure(), encoding).unwrap());
        for body in bodies {
            for end in 0..=body.len() {
                for claim in claims {
                    let hostile = [&body[..end], claim].concat();
                    let peak = peak(&hostile, encoding);
                    assert!(peak <= short_bound(&hostile), "{peak} bytes for {hostile:?}");
                }
            }
        }
    }
}

/// Bodies of the largest allowed size made of what unfolds most.
#[test]
fn large_bodies_take_bounded_memory_while_they_are_decoded() {
    let mut dearest = 0;
    for (name, body, encoding) in large_bodies() {
        assert!(body.len() <= BODY_BYTES_MAX, "{name}: {}", body.len());
        let peak = peak(&body, encoding);
        println!("{name}: {:.1} times the largest body", peak as f64 / BODY_BYTES_MAX as f64);
        assert!(peak <= DECODE_BYTES_MAX, "{name}: {peak} bytes");
        dearest = dearest.max(peak);
    }
    assert!(dearest >= DECODE_BYTES_MAX / 4, "the bound is far from the truth: {dearest}");
}

fn large_bodies() -> Vec<(String, Vec<u8>, Encoding)> {
    let mut bodies = Vec::new();
    for encoding in ENCODINGS {
        let job = codec::encode(&job_of(BODY_BYTES_MAX, encoding), encoding).unwrap();
        bodies.push((format!("largest job, {encoding:?}"), job, encoding));
    }
    let mut json = |head: &str, unit: &str, sized: usize, tail: &str| {
        let times = (sized - head.len() - tail.len()) / unit.len();
        let body = [head, &unit.repeat(times), unit.trim_end_matches(','), tail].concat();
        bodies.push((format!("{head}{unit}"), body.into_bytes(), Encoding::Json));
    };
    let full = BODY_BYTES_MAX - 64;
    for unit in ["\"\",", "{\"uri\":\"\"},", "0,", "\"\\u0000\","] {
        json(r#"{"model":"m","inputs":["#, unit, full, "]}");
        // Below the cap on items.
        json(r#"{"model":"m","inputs":["#, unit, 65_000 * unit.len(), "]}");
    }
    for unit in ["0,", "[],", r#"{"":0},"#, r#""\n","#] {
        json(r#"{"model":"m","inputs":[{"json":["#, unit, full, "]}]}");
    }
    json(r#"{"model":"m","inputs":["#, r#"{"json":0},"#, 65_000 * 11, "]}");
    json(r#"{"model":"m","inputs":[],"params":{"x":["#, "0,", full, "]}}");
    json(r#"{"model":""#, "\\u0000", full, r#"","inputs":[]}"#);
    json(r#"{"reason":"malformed","error":""#, "\\u0000", full, r#""}"#);
    json(r#"{"item":0,"fraction":0,"note":""#, "\\u0000", full, r#""}"#);
    for unit in ["0,", "1e9,"] {
        json(r#"{"model":"m","outputs":[{"dtype":"f16","embedding":["#, unit, full, "]}]}");
    }
    json(r#"{"model":"m","outputs":["#, r#"{"embedding":[0]},"#, 65_000 * 18, "]}");
    for key in ["indices", "values"] {
        json(&format!(r#"{{"model":"m","outputs":[{{"sparse":{{"{key}":["#), "0,", full, "]}}]}");
    }
    let element = r#"{"sparse":{"indices":[0],"values":[0]}},"#;
    json(r#"{"model":"m","outputs":["#, element, 65_000 * element.len(), "]}");
    for unit in ["0,", "[],", "[0],", "{},", r#"{"":0},"#, r#"{"a":{"b":{}}},"#, r#""","#, r#""\n","#] {
        for sized in [full, full / 2, full / 8, full / 32, full / 96] {
            json(r#"{"model":"m","outputs":[{"json":["#, unit, sized, "]}]}");
        }
        let item = format!(r#"{{"json":[{}]}},"#, unit.trim_end_matches(','));
        json(r#"{"model":"m","outputs":["#, &item, (65_000 * item.len()).min(full), "]}");
    }
    // The same JSON inside bincode: version, model, one output, its tag, the text's length.
    for unit in ["0,", "{},", r#"{"":0},"#] {
        let text = format!("[{}0]", unit.repeat((BODY_BYTES_MAX - 64) / unit.len() / 8));
        let mut body = vec![1, 1, b'm', 1, 1, 0xfc];
        body.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
        body.extend(text.as_bytes());
        bodies.push((format!("bincode {unit}"), body, Encoding::Bincode));
    }
    bodies.extend(large_in_message_pack());
    bodies
}

/// What takes few bytes of MessagePack, in every place that has room for much of it.
fn large_in_message_pack() -> Vec<(String, Vec<u8>, Encoding)> {
    const NIL: u8 = 0xc0;
    let list = |unit: &[u8], times: usize| {
        let length = u32::try_from(times).unwrap().to_be_bytes();
        [&[0xdd][..], &length, &unit.repeat(times)].concat()
    };
    // A map of one entry; its key is a text of less than 32 bytes.
    let map = |key: &str, value: &[u8]| {
        [&[0x81, 0xa0 | u8::try_from(key.len()).unwrap()], key.as_bytes(), value].concat()
    };
    let body = |key: &str, items: &[u8]| [&b"\x82\xa5model\xa1m"[..], &map(key, items)[1..]].concat();
    let mut bodies = Vec::new();
    let mut add = |name: String, body: Vec<u8>| bodies.push((name, body, Encoding::MessagePack));
    let full = BODY_BYTES_MAX - 64;
    // As much as is taken: a nil becomes five bytes of JSON text.
    for inputs in ["inputs", "outputs"] {
        let values = list(&[NIL], full / 6);
        add(format!("{inputs} of nil"), body(inputs, &[&[0x91][..], &map("json", &values)].concat()));
    }
    // What unfolds most.
    let values = list(&[0x81, 0xa0, NIL], 60_000);
    add("outputs of maps".to_owned(), body("outputs", &[&[0x91][..], &map("json", &values)].concat()));
    // More than is taken.
    add(
        "too much JSON".to_owned(),
        body("inputs", &[&[0x91][..], &map("json", &list(&[NIL], full))].concat()),
    );
    add(
        "too long a vector".to_owned(),
        body("outputs", &[&[0x91][..], &map("embedding", &list(&[0], full))].concat()),
    );
    add("too large params".to_owned(), body("params", &map("x", &list(&[NIL], full - 16))));
    // Lists just above a power of two, which have doubled for the last time.
    let vector = list(&[0], (1 << 21) + 1);
    add("vectors".to_owned(), body("outputs", &list(&map("embedding", &vector), 7)));
    let values = map("sparse", &map("values", &vector));
    add("values of sparse vectors".to_owned(), body("outputs", &list(&values, 7)));
    add("few numbers".to_owned(), body("outputs", &list(&map("embedding", &[0x91, 0]), 65_000)));
    add("references".to_owned(), body("inputs", &list(&map("uri", &[0xa0]), 65_000)));
    bodies
}
