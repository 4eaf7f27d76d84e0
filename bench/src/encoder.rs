//! The encoder by itself: prepare, then passes; no broker.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{ComputeType, Encoder, Source};
use vramq_inference::engine::{Engine, Item};
use vramq_schemas::{Input, Params};

/// Texts that are tokenised as one task; what a job usually holds.
const CHUNK: usize = 32;

/// Memory of the device: never the limit here.
const DEVICE_BYTES: u64 = 4 << 30;

/// What one run gives.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    pub sentences_per_s: f64,
    #[serde(default)]
    pub tokens_per_s: f64,
    /// Of the whole process: code, tokenizer, weights, passes.
    pub peak_mib: f64,
}

/// Embeds all texts once to warm up and once for the clock; tokenising is included, loading is not.
pub fn run(model: &Path, texts: &[String], threads: usize, pass_tokens: usize) -> anyhow::Result<Figures> {
    let device = CpuDevice::new(DEVICE_BYTES, threads)?;
    let engine = Encoder::load_as(&Source::Folder(model.to_owned()), Arc::clone(&device), ComputeType::Auto)?;
    let inputs: Vec<_> = texts.iter().cloned().map(Input::Text).collect();
    embed(&engine, &inputs[..inputs.len().min(10 * CHUNK)], pass_tokens)?;
    let started = Instant::now();
    let tokens = embed(&engine, &inputs, pass_tokens)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(Figures {
        sentences_per_s: inputs.len() as f64 / seconds,
        tokens_per_s: tokens as f64 / seconds,
        peak_mib: peak_mib()?,
    })
}

/// Returns the tokens embedded.
fn embed(engine: &Encoder, inputs: &[Input], pass_tokens: usize) -> anyhow::Result<usize> {
    let params = Params::default();
    let prepared: Vec<Vec<Item>> =
        inputs.par_chunks(CHUNK).map(|chunk| engine.prepare(chunk, &params)).collect::<Result<_, _>>()?;
    let (mut tokens, mut pass, mut cost) = (0, Vec::new(), 0);
    for item in prepared.into_iter().flatten() {
        if !pass.is_empty() && cost + item.cost() > pass_tokens {
            run_pass(engine, std::mem::take(&mut pass))?;
            cost = 0;
        }
        cost += item.cost();
        tokens += item.cost();
        pass.push(item);
    }
    run_pass(engine, pass)?;
    Ok(tokens)
}

/// Runs a pass, the longest item first, as the worker does.
fn run_pass(engine: &Encoder, mut items: Vec<Item>) -> anyhow::Result<()> {
    items.sort_by_key(|item| std::cmp::Reverse(item.cost()));
    let outputs = engine.run(&items)?;
    anyhow::ensure!(outputs.len() == items.len(), "{} outputs for {} items", outputs.len(), items.len());
    Ok(())
}

/// The kernel's high-water mark of this process's resident memory.
fn peak_mib() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find(|line| line.starts_with("VmHWM:")).context("no VmHWM in /proc/self/status")?;
    let kib: f64 = line.split_whitespace().nth(1).context("VmHWM has no figure")?.parse()?;
    Ok(kib / 1024.0)
}
