//! Measures what a pass through a program costs besides what its model computes: the time from the pool's call to the end of the pass.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use serde::Serialize;
use vramq_inference::process::child::KeeperProgram;
use vramq_inference::process::launch::Launcher;
use vramq_inference::process::{
    DeviceAccount, HostView, Item, Learned, PassEnd, PassRequest, Place, Pool, PoolOptions, ProcessConfig,
};

use crate::{Setup, middle, programs};

/// Items of a pass.
const ITEMS: [usize; 2] = [1, 64];

/// Passes of a round, one after the other; and before it, in which the pool also measures what passes take.
const PASSES: usize = 2_000;
const PASSES_BEFORE: usize = 200;

/// Microseconds of passes of a program that returns its items.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub items: usize,
    pub p50_us: f64,
    pub p95_us: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { items, p50_us, p95_us } = self;
        write!(
            f,
            "  a pass of {items:>2} texts through a program: p50 {p50_us:>6.0} us  p95 {p95_us:>6.0} us"
        )
    }
}

/// Measures each number of items `rounds` times in turn; the medians count.
pub async fn measure(setup: &Setup, texts: &[String]) -> anyhow::Result<Vec<Row>> {
    println!(
        "what a pass through a program costs: a program in Python that returns its texts, without a broker"
    );
    let Some(python) = &setup.python else {
        println!("  (no VRAMQ_BENCH_PYTHON: left out)");
        return Ok(Vec::new());
    };
    let pool = start(setup, python).await?;
    let mut rounds = ITEMS.map(|_| Vec::new());
    for _ in 0..setup.rounds {
        for (items, rounds) in ITEMS.into_iter().zip(&mut rounds) {
            rounds.push(round(&pool, texts, items).await?);
        }
    }
    pool.close().await;
    let rows: Vec<_> = ITEMS.into_iter().zip(rounds).map(|(items, rounds)| row(items, &rounds)).collect();
    rows.iter().for_each(|row| println!("{row}"));
    Ok(rows)
}

fn row(items: usize, rounds: &[(f64, f64)]) -> Row {
    let (p50, p95): (Vec<_>, Vec<_>) = rounds.iter().copied().unzip();
    Row { items, p50_us: middle(p50), p95_us: middle(p95) }
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

/// The 50th and the 95th percentile of passes, in microseconds.
async fn round(pool: &Pool, texts: &[String], items: usize) -> anyhow::Result<(f64, f64)> {
    let mut texts = texts.iter().cycle();
    let mut took = Vec::with_capacity(PASSES);
    for number in 0..PASSES_BEFORE + PASSES {
        let items = texts.by_ref().take(items).cloned().map(Item::Text).collect();
        let request = PassRequest { items, ..PassRequest::default() };
        let began = Instant::now();
        let (_, end) = pool.run(request)?.finish().await;
        if number >= PASSES_BEFORE {
            took.push(began.elapsed().as_secs_f64() * 1e6);
        }
        anyhow::ensure!(matches!(end, PassEnd::Done { .. }), "a pass ended so: {end:?}");
    }
    took.sort_by(f64::total_cmp);
    Ok((took[PASSES / 2], took[PASSES * 95 / 100]))
}
