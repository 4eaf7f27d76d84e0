//! Measures programs as models: what a pass through a process costs, and PyTorch behind vramq against Celery and LitServe.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use lapin::options::ConfirmSelectOptions;
use lapin::{Connection, ConnectionProperties};
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use vramq_schemas::topology::jobs_queue;

use crate::end_to_end::{exchange, job, replies};
use crate::path::forget_queues;
use crate::{Setup, http, middle, process};

pub const MODEL: &str = "bench-program";

/// Texts in a job.
const TEXTS: [usize; 2] = [1, 32];

/// Jobs of a measurement of models that do nothing.
const NO_OP_JOBS: usize = 5_000;

/// Items in a pass: as many as requests in a batch of LitServe.
const ITEMS_MAX: usize = 64;

/// Concurrent clients of LitServe: enough to fill its batches.
const CLIENTS: usize = 64;

/// The same jobs by several means.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub texts: usize,
    pub by: &'static str,
    pub jobs_per_s: f64,
    /// The rate of vramq's process model divided by the rate of this row.
    pub process_is: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { texts, by, jobs_per_s, process_is } = self;
        write!(
            f,
            "  jobs of {texts:>2}: {by:<26} {jobs_per_s:>8.1} jobs/s  the process model is {process_is:.2}x"
        )
    }
}

/// What a peer prints.
#[derive(Debug, Deserialize)]
struct PeerFigures {
    texts_per_s: f64,
}

/// Measures all of them, each `rounds` times in turn; the median counts.
pub async fn measure(setup: &Setup, texts: &[String]) -> anyhow::Result<Vec<Row>> {
    println!(
        "programs as models: a model that does nothing, and MiniLM on PyTorch with {} threads",
        setup.threads
    );
    let Some(python) = &setup.python else {
        println!("  (no VRAMQ_BENCH_PYTHON: left out)");
        return Ok(Vec::new());
    };
    let rows = run(setup, python, texts).await?;
    rows.iter().for_each(|row| println!("{row}"));
    Ok(rows)
}

async fn run(setup: &Setup, python: &Path, texts: &[String]) -> anyhow::Result<Vec<Row>> {
    let folder = setup.out.parent().context("--out is a file in a folder")?.to_owned();
    std::fs::create_dir_all(&folder)?;
    let echo = write(&folder, "echo", &format!("[model.{MODEL}]\nengine = \"echo\"\n"))?;
    let nothing = write(&folder, "nothing", &program(setup, python, "nothing")?)?;
    let minilm = write(&folder, "minilm", &program(setup, python, "minilm")?)?;
    let mut rows = Vec::new();
    for each in TEXTS {
        let no_op: Vec<_> = texts.iter().cycle().take(NO_OP_JOBS * each).cloned().collect();
        let (mut by_process, mut by_echo) = (Vec::new(), Vec::new());
        let (mut torch, mut celery, mut litserve) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..setup.rounds {
            by_process.push(through(setup, &nothing, &no_op, each).await?);
            by_echo.push(through(setup, &echo, &no_op, each).await?);
            torch.push(through(setup, &minilm, texts, each).await?);
            celery.push(by_celery(setup, python, each).await?);
            litserve.push(by_litserve(setup, python, texts, each).await?);
        }
        let (nothing, torch) = (middle(by_process), middle(torch));
        rows.extend([
            row(each, "nothing, in a process", nothing, nothing),
            row(each, "nothing, built in (echo)", middle(by_echo), nothing),
            row(each, "PyTorch, vramq", torch, torch),
            row(each, "PyTorch, Celery (solo)", middle(celery), torch),
            row(each, "PyTorch, LitServe", middle(litserve), torch),
        ]);
    }
    Ok(rows)
}

fn row(texts: usize, by: &'static str, jobs_per_s: f64, process: f64) -> Row {
    Row { texts, by, jobs_per_s, process_is: process / jobs_per_s }
}

fn write(folder: &Path, name: &str, config: &str) -> anyhow::Result<PathBuf> {
    let path = folder.join(format!("{name}.toml"));
    std::fs::write(&path, config).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// The configuration of a program in bench/peers/minilm.py.
pub fn program(setup: &Setup, python: &Path, which: &str) -> anyhow::Result<String> {
    let (command, package, model) =
        (command(python, which)?, absolute(Path::new("python"))?, absolute(&setup.model)?);
    Ok(format!(
        "[model.{MODEL}]\nengine = \"process\"\ncommand = {command}\n\
         items_max = {ITEMS_MAX}\ninstances = 1\n\
         env = {{ PYTHONPATH = \"{package}\", MODEL = \"{model}\", THREADS = \"{}\" }}\n",
        setup.threads
    ))
}

/// The command of a program in bench/peers/minilm.py, as the configuration has it.
pub(crate) fn command(python: &Path, which: &str) -> anyhow::Result<String> {
    let (python, script) = (absolute(python)?, absolute(Path::new("bench/peers/minilm.py"))?);
    Ok(format!("[\"{python}\", \"{script}\", \"{which}\"]"))
}

fn absolute(path: &Path) -> std::io::Result<String> {
    std::path::absolute(path).map(|path| path.display().to_string())
}

/// Jobs per second through RabbitMQ and a worker.
async fn through(setup: &Setup, config: &Path, texts: &[String], each: usize) -> anyhow::Result<f64> {
    let connection = Connection::connect(&setup.url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    forget_queues(&channel, MODEL).await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let (queue, mut incoming) = replies(&channel).await?;
    let mut served = process::spawn_configured(&setup.url, &setup.worker, config)?;
    process::wait_for_consumer(&connection, &jobs_queue(MODEL)).await?;
    let jobs: Vec<_> = texts.chunks(each).map(|texts| job(MODEL, texts)).collect();
    // The first jobs warm up the process, and teach what a pass costs.
    exchange(&channel, &queue, &mut incoming, &jobs[..jobs.len().min(3 * ITEMS_MAX)], None).await?;
    let started = Instant::now();
    exchange(&channel, &queue, &mut incoming, &jobs, None).await?;
    let seconds = started.elapsed().as_secs_f64();
    process::stop(&mut served).await?;
    connection.close(200, "done".into()).await?;
    // Computed as for the others, although the last job may be shorter.
    Ok(texts.len() as f64 / each as f64 / seconds)
}

/// Jobs per second of a task in Celery.
async fn by_celery(setup: &Setup, python: &Path, each: usize) -> anyhow::Result<f64> {
    let mut command = peer(setup, python, "celery_minilm.py")?;
    command.arg(&setup.texts).args([setup.sentences.to_string(), each.to_string()]);
    let PeerFigures { texts_per_s } = process::figures(command.env("BROKER_URL", &setup.url)).await?;
    Ok(texts_per_s / each as f64)
}

/// Jobs per second as requests to LitServe.
async fn by_litserve(setup: &Setup, python: &Path, texts: &[String], each: usize) -> anyhow::Result<f64> {
    let served = http::LitServe::start(peer(setup, python, "litserve_minilm.py")?).await?;
    let figures = http::ask(&served.url, texts, each, CLIENTS).await?;
    served.stop().await?;
    Ok(figures.texts_per_s / each as f64)
}

/// A program of bench/peers that runs MiniLM on PyTorch.
pub fn peer(setup: &Setup, python: &Path, script: &str) -> anyhow::Result<Command> {
    let mut command = Command::new(python);
    command
        .arg(Path::new("bench/peers").join(script))
        .env("MODEL", std::path::absolute(&setup.model)?)
        .env("THREADS", setup.threads.to_string());
    Ok(command)
}
