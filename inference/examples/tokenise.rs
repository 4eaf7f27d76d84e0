//! Tokenises a file of texts, one per line, on one thread: with the `tokenizers` library alone, and as a worker does. Prints texts and
//! tokens per second, and how many times faster the worker is. Fails if a token differs.
//!
//! `cargo run --release -p vramq-inference --example tokenise -- MODEL TEXTS [ROUNDS]`
//!
//! The worker's first round begins without any words remembered. The last rows are texts of random words, none of which comes again.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use tokenizers::Tokenizer;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_inference::engine::{Engine, Item};
use vramq_schemas::{Input, Params};

/// Letters of a random word, and words of a random text.
const LETTERS: usize = 8;
const WORDS: usize = 40;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, texts, options @ ..] = &args[..] else {
        anyhow::bail!("usage: tokenise MODEL TEXTS [ROUNDS]");
    };
    let rounds =
        options.first().map_or(Ok(3), |text| text.parse::<u32>()).context("ROUNDS is not a number")?;
    let texts = std::fs::read_to_string(texts).with_context(|| format!("read {texts}"))?;
    let texts: Vec<String> = texts.lines().map(str::to_owned).collect();
    let encoder = Encoder::load_f32(&Source::Folder(model.into()), CpuDevice::new(4 << 30, 1)?)?;
    let mut tokenizer =
        Tokenizer::from_file(Path::new(model).join("tokenizer.json")).map_err(|e| anyhow::anyhow!(e))?;
    tokenizer.with_truncation(None).map_err(|e| anyhow::anyhow!(e))?.with_padding(None);
    for round in 1..=rounds {
        compare(&tokenizer, &encoder, &texts, &format!("round {round}"))?;
    }
    let mut random = random_words();
    for round in 1..=rounds {
        let text = || (0..WORDS).map(|_| random()).collect::<Vec<_>>().join(" ");
        let unique: Vec<String> = std::iter::repeat_with(text).take(texts.len()).collect();
        compare(&tokenizer, &encoder, &unique, &format!("random words, round {round}"))?;
    }
    Ok(())
}

/// The library's tokens are those of the whole texts, without special ones. The worker cuts them to the model's length.
fn compare(tokenizer: &Tokenizer, encoder: &Encoder, texts: &[String], what: &str) -> Result<()> {
    let inputs: Vec<Input> = texts.iter().cloned().map(Input::Text).collect();
    let started = Instant::now();
    let expected: Vec<Vec<u32>> = texts.iter().map(|text| library(tokenizer, text)).collect::<Result<_>>()?;
    let of_library = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let items = encoder.prepare(&inputs, &Params::default())?;
    let of_worker = started.elapsed().as_secs_f64();
    report(&format!("library, {what}"), of_library, texts.len(), expected.iter().map(Vec::len).sum());
    report(&format!("worker, {what}"), of_worker, texts.len(), items.iter().map(Item::cost).sum());
    println!("worker, {what}: {:.1} times as fast", of_library / of_worker);
    check(&items, &expected)
}

fn library(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    match tokenizer.encode_fast(text, false) {
        Ok(encoding) => Ok(encoding.get_ids().to_vec()),
        Err(error) => Err(anyhow::anyhow!(error)),
    }
}

/// Whether items have the tokens of the library between a special token at each end.
fn check(items: &[Item], expected: &[Vec<u32>]) -> Result<()> {
    for (at, (item, expected)) in items.iter().zip(expected).enumerate() {
        let Item::Tokens { ids, .. } = item else { anyhow::bail!("text {at} has no tokens") };
        let [_, content @ .., _] = &ids[..] else { anyhow::bail!("text {at} has no special tokens") };
        ensure!(expected.starts_with(content), "text {at}: {content:?}, not {expected:?}");
    }
    Ok(())
}

fn report(what: &str, seconds: f64, texts: usize, tokens: usize) {
    println!("{what}: {:.0} texts/s, {:.0} tokens/s", texts as f64 / seconds, tokens as f64 / seconds);
}

/// Words of letters from a sequence without a short period.
fn random_words() -> impl FnMut() -> String {
    let mut state = 7_u64;
    move || {
        let mut letter = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            char::from(b'a' + ((state >> 33) % 26) as u8)
        };
        (0..LETTERS).map(|_| letter()).collect()
    }
}
