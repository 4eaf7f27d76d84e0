//! Encodes a file of texts, one per line, as a worker would, and prints the speed.
//!
//! `cargo run --release -p vramq-inference --example encode -- MODEL TEXTS [TOKENS_PER_PASS [THREADS [ROUNDS [DTYPE]]]]`

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{ComputeType, Encoder, Source};
use vramq_inference::engine::{Engine, Item};
use vramq_schemas::{Input, Params};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, texts, options @ ..] = &args[..] else {
        anyhow::bail!("usage: encode MODEL TEXTS [TOKENS_PER_PASS [THREADS [ROUNDS [DTYPE]]]]");
    };
    let option = |at: usize, default: usize| match options.get(at) {
        Some(text) => text.parse().context("an option is not a number"),
        None => Ok(default),
    };
    let (pass_tokens, threads, rounds) = (option(0, 2048)?, option(1, cores())?, option(2, 1)?);
    let dtype = options.get(3).map_or(Ok(ComputeType::F32), |text| text.parse());
    let dtype = dtype.map_err(|error| anyhow::anyhow!("DTYPE {error}"))?;
    let texts = std::fs::read_to_string(texts).with_context(|| format!("read {texts}"))?;
    let inputs: Vec<Input> = texts.lines().map(|line| Input::Text(line.to_owned())).collect();

    let started = Instant::now();
    let device = CpuDevice::new(4 << 30, threads)?;
    let encoder = Encoder::load_dtype(&Source::Folder(model.into()), device, dtype)?;
    println!("{encoder:?}");
    println!("loaded in {:.2?}, peak {} MiB", started.elapsed(), peak_mib());

    for _ in 0..rounds {
        let started = Instant::now();
        let items = encoder.prepare(&inputs, &Params::default())?;
        let prepared = started.elapsed();
        let passes = passes(&items, pass_tokens);
        let tokens: usize = items.iter().map(Item::cost).sum();
        let mut vectors = 0;
        for pass in &passes {
            vectors += encoder.run(pass)?.len();
        }
        report(vectors, tokens, passes.len(), prepared, started.elapsed());
    }
    Ok(())
}

/// Runs of items of at most `tokens` tokens, or of one item.
fn passes(items: &[Item], tokens: usize) -> Vec<&[Item]> {
    let (mut passes, mut first, mut cost) = (Vec::new(), 0, 0);
    for (at, item) in items.iter().enumerate() {
        if cost + item.cost() > tokens && at > first {
            passes.push(&items[first..at]);
            (first, cost) = (at, 0);
        }
        cost += item.cost();
    }
    passes.push(&items[first..]);
    passes
}

fn report(vectors: usize, tokens: usize, passes: usize, prepared: Duration, all: Duration) {
    println!(
        "{vectors} texts, {tokens} tokens, {passes} passes: {:.1} texts/s, {:.0} tokens/s; {all:.2?}, of which tokenising \
         {prepared:.2?}; peak {} MiB",
        vectors as f64 / all.as_secs_f64(),
        tokens as f64 / all.as_secs_f64(),
        peak_mib()
    );
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The most memory that the process has had resident; 0 where the system does not tell.
fn peak_mib() -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .unwrap_or_default()
        / 1024
}
