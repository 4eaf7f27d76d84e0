//! Measures what a pass through a program costs besides what its model computes: the time from the pool's call to the end of the pass. Beside
//! it the same of the engine `echo`, which runs on a thread of the worker.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use tokio::sync::oneshot;
use vramq_inference::device::any::AnyDevice;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::echo::Echo;
use vramq_inference::engine::{Engine as _, Item as EngineItem, PassError};
use vramq_inference::process::child::KeeperProgram;
use vramq_inference::process::launch::Launcher;
use vramq_inference::process::{
    DeviceAccount, HostView, Item, Learned, PassEnd, PassRequest, Place, Pool, PoolOptions, ProcessConfig,
};
use vramq_schemas::{Input, Output, Params};

use crate::{Setup, middle, programs};

/// Items of a pass.
const ITEMS: [usize; 2] = [1, 64];

/// Passes of a round, one after the other; and before it, in which the pool also measures what passes take.
const PASSES: usize = 2_000;
const PASSES_BEFORE: usize = 200;

/// Memory of the device of `echo`: never the limit.
const DEVICE_BYTES: u64 = 1 << 30;

/// Microseconds of passes that return their items.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub items: usize,
    pub by: &'static str,
    pub p50_us: f64,
    pub p95_us: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { items, by, p50_us, p95_us } = self;
        write!(f, "  a pass of {items:>2} texts, {by:<15}: p50 {p50_us:>7.1} us  p95 {p95_us:>7.1} us")
    }
}

/// Measures each number of items `rounds` times in turn; the medians count.
pub async fn measure(setup: &Setup, texts: &[String]) -> anyhow::Result<Vec<Row>> {
    println!(
        "what a pass through a program costs: a program in Python that returns its texts, without a broker; beside it the engine `echo`"
    );
    let Some(python) = &setup.python else {
        println!("  (no VRAMQ_BENCH_PYTHON: left out)");
        return Ok(Vec::new());
    };
    let (pool, echo) = (start(setup, python).await?, BuiltIn::start()?);
    let mut rounds = ITEMS.map(|_| (Vec::new(), Vec::new()));
    for _ in 0..setup.rounds {
        for (items, (by_program, by_echo)) in ITEMS.into_iter().zip(&mut rounds) {
            by_program.push(round(texts, items, async |texts| through_program(&pool, texts).await).await?);
            by_echo.push(round(texts, items, async |texts| echo.pass(texts).await).await?);
        }
    }
    pool.close().await;
    let mut rows = Vec::new();
    for (items, (by_program, by_echo)) in ITEMS.into_iter().zip(rounds) {
        rows.extend([row(items, "in a program", &by_program), row(items, "built in (echo)", &by_echo)]);
    }
    rows.iter().for_each(|row| println!("{row}"));
    Ok(rows)
}

fn row(items: usize, by: &'static str, rounds: &[(f64, f64)]) -> Row {
    let (p50, p95): (Vec<_>, Vec<_>) = rounds.iter().copied().unzip();
    Row { items, by, p50_us: middle(p50), p95_us: middle(p95) }
}

async fn start(setup: &Setup, python: &Path) -> anyhow::Result<Pool> {
    let mut config: toml::Table = programs::program(setup, python, "nothing")?.parse()?;
    let model = config.remove("model").and_then(|mut models| models.as_table_mut()?.remove(programs::MODEL));
    let Some(toml::Value::Table(model)) = model else { anyhow::bail!("no model in its configuration") };
    let place = Place { folder: std::env::current_dir()?, scratch: std::env::temp_dir() };
    let config = ProcessConfig::read(programs::MODEL, model, &place)
        .map_err(|faults| anyhow::anyhow!("configure the program: {faults:?}"))?;
    // A program's keeper is the worker's executable.
    let keeper = KeeperProgram { path: std::path::absolute(&setup.worker)? };
    let options = PoolOptions {
        launcher: Launcher { keeper, ..Launcher::default() },
        account: DeviceAccount::new(Arc::new(HostView)),
        budget: 0,
        learned: Learned::default(),
        shares_device: false,
    };
    Pool::start(config, options).await.context("start the program")
}

/// The 50th and the 95th percentile of passes, in microseconds. `pass` runs one and returns its time.
async fn round(
    texts: &[String],
    items: usize,
    mut pass: impl AsyncFnMut(Vec<String>) -> anyhow::Result<Duration>,
) -> anyhow::Result<(f64, f64)> {
    let mut texts = texts.iter().cycle();
    let mut took = Vec::with_capacity(PASSES);
    for number in 0..PASSES_BEFORE + PASSES {
        let of_pass = pass(texts.by_ref().take(items).cloned().collect()).await?;
        if number >= PASSES_BEFORE {
            took.push(of_pass.as_secs_f64() * 1e6);
        }
    }
    took.sort_by(f64::total_cmp);
    Ok((took[PASSES / 2], took[PASSES * 95 / 100]))
}

async fn through_program(pool: &Pool, texts: Vec<String>) -> anyhow::Result<Duration> {
    let items = texts.into_iter().map(Item::Text).collect();
    let request = PassRequest { items, ..PassRequest::default() };
    let began = Instant::now();
    let (_, end) = pool.run(request)?.finish().await;
    let took = began.elapsed();
    anyhow::ensure!(matches!(end, PassEnd::Done { .. }), "a pass ended so: {end:?}");
    Ok(took)
}

/// The engine that is built in, on a thread of its own, as a worker has one for its device.
struct BuiltIn {
    engine: Arc<Echo>,
    passes: SyncSender<(Vec<EngineItem>, oneshot::Sender<Ended>)>,
}

type Ended = Result<Vec<Output>, PassError>;

impl BuiltIn {
    /// The thread ends when this is dropped.
    fn start() -> anyhow::Result<Self> {
        let engine = Arc::new(Echo::new(AnyDevice::Cpu(CpuDevice::new(DEVICE_BYTES, 1)?)));
        let (passes, waiting) = sync_channel::<(Vec<EngineItem>, oneshot::Sender<Ended>)>(1);
        let served = Arc::clone(&engine);
        std::thread::spawn(move || {
            for (items, ended) in waiting {
                // An `Err`: the benchmark has failed.
                let _ = ended.send(served.run(&items));
            }
        });
        Ok(Self { engine, passes })
    }

    async fn pass(&self, texts: Vec<String>) -> anyhow::Result<Duration> {
        let inputs: Vec<_> = texts.into_iter().map(Input::Text).collect();
        let items = self.engine.prepare(&inputs, &Params::default())?;
        let (ended, end) = oneshot::channel();
        let began = Instant::now();
        self.passes.send((items, ended)).context("the engine's thread has ended")?;
        let outputs = end.await??;
        let took = began.elapsed();
        anyhow::ensure!(outputs.len() == inputs.len(), "{} outputs", outputs.len());
        Ok(took)
    }
}
