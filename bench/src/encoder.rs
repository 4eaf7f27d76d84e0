//! The encoder by itself, without a broker, against the libraries that people embed with.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{ComputeType, CpuUnits, Encoder, Parts, Source};
use vramq_inference::engine::{Engine, Item};
use vramq_schemas::{Input, Output, Params, Values};

use crate::engines::{OURS, OURS_BF16, OURS_F32, REFERENCE};
use crate::{Setup, gates, process};

/// Texts that are tokenised as one task; what a job usually holds.
const CHUNK: usize = 32;

/// Memory of the device: never the limit here.
const DEVICE_BYTES: u64 = 4 << 30;

/// The other libraries; bench/peers/encode.py says how they are run.
const PEERS: [&str; 5] =
    ["sentence-transformers-bf16", "onnxruntime", "onnxruntime-int8", "openvino", "openvino-bf16"];

/// Not an engine: only the layers' matrix products, by PyTorch's library. An engine in f32 cannot be much faster.
const CEILING: &str = "sgemm";

/// What one run gives.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figures {
    pub sentences_per_s: f64,
    #[serde(default)]
    pub tokens_per_s: f64,
    /// Of the whole process: code, tokenizer, weights, passes.
    pub peak_mib: f64,
}

/// An engine, and the median of its runs.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub engine: String,
    #[serde(flatten)]
    pub figures: Figures,
    /// The rate of vramq's first row divided by the rate of this row.
    pub vramq_is: f64,
    /// The least cosine between a text's vector and that of sentence-transformers in f32. `None`: there are no vectors, or no
    /// reference.
    pub cosine_min: Option<f64>,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { engine, figures, vramq_is, cosine_min } = self;
        let Figures { sentences_per_s, peak_mib, .. } = figures;
        write!(
            f,
            "  {engine:<27} {sentences_per_s:>7.1} sentences/s  peak {peak_mib:>6.0} MiB  vramq is {vramq_is:.2}x"
        )?;
        match cosine_min {
            Some(cosine) => write!(f, "  cosine at least {cosine:.7}"),
            None => Ok(()),
        }
    }
}

/// Measures every engine that this machine can run, in turn, and takes each engine's median over the rounds.
pub async fn measure(setup: &Setup) -> anyhow::Result<Vec<Row>> {
    let mut engines = vec![OURS];
    let amx = CpuUnits::amx(Parts::Rounded);
    match &amx {
        Ok(_) => engines.push(OURS_F32),
        Err(absent) => println!("  no AMX: {absent}"),
    }
    if amx.is_ok() || CpuUnits::avx512_bf16(Parts::Rounded).is_some() {
        engines.push(OURS_BF16);
    }
    match &setup.python {
        Some(_) => engines.extend(others(&setup.without)?),
        None => println!("  (no VRAMQ_BENCH_PYTHON: the other libraries are left out)"),
    }
    let mut runs = vec![Vec::new(); engines.len()];
    for round in 0..setup.rounds {
        for at in order(round, engines.len()) {
            runs[at].push(run_engine(setup, engines[at]).await?);
        }
    }
    let medians: Vec<_> = runs.into_iter().map(median).collect();
    let ours = medians[0].sentences_per_s;
    let rate = |engine: &str| {
        let at = engines.iter().position(|other| *other == engine)?;
        Some(medians[at].sentences_per_s)
    };
    gates::lines(amx.is_ok(), rate).iter().for_each(|line| println!("{line}"));
    let rows = engines.into_iter().zip(medians).map(|(engine, figures)| Row {
        engine: engine.to_owned(),
        vramq_is: ours / figures.sentences_per_s,
        cosine_min: cosine_min(&vectors_of(setup, engine), &vectors_of(setup, REFERENCE)),
        figures,
    });
    Ok(rows.collect())
}

/// The engines of other libraries, but those that are left out.
fn others(without: &[String]) -> anyhow::Result<Vec<&'static str>> {
    let mut others: Vec<_> = [REFERENCE].into_iter().chain(PEERS).chain([CEILING]).collect();
    for name in without {
        anyhow::ensure!(others.contains(&name.as_str()), "--without {name}: there are {}", others.join(", "));
    }
    others.retain(|other| !without.iter().any(|name| name == other));
    Ok(others)
}

/// The engines' order in a round. Every round begins with another one, so that a machine that slows down slows all of them.
fn order(round: usize, engines: usize) -> impl Iterator<Item = usize> {
    (0..engines).map(move |at| (round + at) % engines)
}

/// Runs an engine once, in a process of its own.
pub async fn run_engine(setup: &Setup, engine: &str) -> anyhow::Result<Figures> {
    let vectors = vectors_of(setup, engine);
    if let Some(folder) = vectors.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let (lines, threads) = (setup.sentences.to_string(), setup.threads.to_string());
    let mut command = match (&setup.python, engine.strip_prefix("vramq")) {
        (Some(python), None) => {
            let mut command = Command::new(python);
            command
                .args(["bench/peers/encode.py", engine])
                .args([&setup.model, &setup.texts])
                .args([lines, threads])
                .arg(&vectors);
            command
        }
        (_, dtype) => {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("encode").arg("--model").arg(&setup.model).arg("--texts").arg(&setup.texts);
            command.args(["--sentences", &lines, "--threads", &threads]);
            command.args(["--pass-tokens", &setup.pass_tokens.to_string()]);
            command.arg("--vectors").arg(&vectors);
            if let Some(dtype) = dtype.and_then(|dtype| dtype.strip_prefix('-')) {
                command.args(["--dtype", dtype]);
            }
            command
        }
    };
    process::figures(&mut command).await
}

/// Where an engine writes its vectors: f32, in the order of the texts.
fn vectors_of(setup: &Setup, engine: &str) -> PathBuf {
    setup.out.with_file_name(format!("{engine}.f32"))
}

fn median(mut runs: Vec<Figures>) -> Figures {
    runs.sort_by(|a, b| a.sentences_per_s.total_cmp(&b.sentences_per_s));
    runs.swap_remove(runs.len() / 2)
}

/// The least cosine between two vectors of the same text. `None` if a file is missing, or has another number of vectors.
fn cosine_min(vectors: &Path, reference: &Path) -> Option<f64> {
    let read = |path: &Path| -> Option<Vec<f64>> {
        let bytes = std::fs::read(path).ok()?;
        let (values, rest) = bytes.as_chunks::<4>();
        rest.is_empty().then(|| values.iter().map(|value| f64::from(f32::from_le_bytes(*value))).collect())
    };
    let (vectors, reference) = (read(vectors)?, read(reference)?);
    if vectors.is_empty() || vectors.len() != reference.len() {
        return None;
    }
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let cosines = vectors
        .chunks(WIDTH)
        .zip(reference.chunks(WIDTH))
        .map(|(ours, theirs)| dot(ours, theirs) / (dot(ours, ours) * dot(theirs, theirs)).sqrt());
    cosines.min_by(f64::total_cmp)
}

/// Elements of MiniLM's vectors.
const WIDTH: usize = 384;

/// Embeds all texts once to warm up and once for the clock; tokenising is included, loading is not. Writes the vectors.
pub fn run(setup: &Setup, texts: &[String], dtype: ComputeType, vectors: &Path) -> anyhow::Result<Figures> {
    let Setup { model, threads, pass_tokens, .. } = setup;
    let device = CpuDevice::new(DEVICE_BYTES, *threads)?;
    let engine = Encoder::load_dtype(&Source::Folder(model.to_owned()), Arc::clone(&device), dtype)?;
    let inputs: Vec<_> = texts.iter().cloned().map(Input::Text).collect();
    embed(&engine, &inputs[..inputs.len().min(10 * CHUNK)], *pass_tokens)?;
    let started = Instant::now();
    let (tokens, outputs) = embed(&engine, &inputs, *pass_tokens)?;
    let seconds = started.elapsed().as_secs_f64();
    std::fs::write(vectors, outputs).with_context(|| vectors.display().to_string())?;
    Ok(Figures {
        sentences_per_s: inputs.len() as f64 / seconds,
        tokens_per_s: tokens as f64 / seconds,
        peak_mib: peak_mib()?,
    })
}

/// The tokens embedded, and the vectors as bytes in the order of the inputs.
fn embed(engine: &Encoder, inputs: &[Input], pass_tokens: usize) -> anyhow::Result<(usize, Vec<u8>)> {
    let params = Params::default();
    let prepared: Vec<Vec<Item>> =
        inputs.par_chunks(CHUNK).map(|chunk| engine.prepare(chunk, &params)).collect::<Result<_, _>>()?;
    let (mut tokens, mut pass, mut cost) = (0, Vec::new(), 0);
    let mut vectors = vec![Vec::new(); inputs.len()];
    for (index, item) in prepared.into_iter().flatten().enumerate() {
        if !pass.is_empty() && cost + item.cost() > pass_tokens {
            run_pass(engine, std::mem::take(&mut pass), &mut vectors)?;
            cost = 0;
        }
        cost += item.cost();
        tokens += item.cost();
        pass.push((index, item));
    }
    run_pass(engine, pass, &mut vectors)?;
    Ok((tokens, vectors.concat()))
}

/// Runs a pass, the longest item first, as the worker does.
fn run_pass(engine: &Encoder, mut items: Vec<(usize, Item)>, vectors: &mut [Vec<u8>]) -> anyhow::Result<()> {
    items.sort_by_key(|(_, item)| std::cmp::Reverse(item.cost()));
    let (indices, items): (Vec<_>, Vec<_>) = items.into_iter().unzip();
    let outputs = engine.run(&items)?;
    anyhow::ensure!(outputs.len() == items.len(), "{} outputs for {} items", outputs.len(), items.len());
    for (index, output) in indices.into_iter().zip(outputs) {
        let Output::Embedding(embedding) = output else { anyhow::bail!("an output that is not a vector") };
        let Values::F32(values) = embedding.values else { anyhow::bail!("a vector that is not in f32") };
        vectors[index] = values.into_iter().flat_map(f32::to_le_bytes).collect();
    }
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

#[cfg(test)]
mod tests {
    use super::{CEILING, REFERENCE, order, others};

    #[test]
    fn what_is_left_out_is_named_as_it_is() {
        let left = others(&["openvino".to_owned(), "openvino-bf16".to_owned()]).unwrap();
        assert_eq!(
            left,
            [REFERENCE, "sentence-transformers-bf16", "onnxruntime", "onnxruntime-int8", CEILING]
        );
        let refused = others(&["openvino-f16".to_owned()]).unwrap_err().to_string();
        assert!(refused.starts_with("--without openvino-f16: there are "), "{refused}");
    }

    #[test]
    fn every_round_has_all_engines_and_begins_with_another() {
        let rounds: Vec<Vec<usize>> = (0..4).map(|round| order(round, 3).collect()).collect();
        assert_eq!(rounds, [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
    }
}
