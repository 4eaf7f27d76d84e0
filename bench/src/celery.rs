//! Measures the message path in Celery, with its default settings and with those of its guide to optimizing for short tasks.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::{middle, process};

/// The pool, the prefetch per process, and the kind of queue or messages.
type Setting = (&'static str, u16, &'static str);

/// A prefetch of 4 is Celery's default.
const SETTINGS: [Setting; 8] = [
    ("solo", 4, "classic"),
    ("solo", 64, "classic"),
    ("solo", 64, "quorum"),
    ("solo", 64, TRANSIENT),
    ("prefork", 4, "classic"),
    ("prefork", 64, "classic"),
    ("prefork", 64, "quorum"),
    ("prefork", 64, TRANSIENT),
];

/// Messages that are not written to disk, and acknowledged before their task runs: a restart of the broker or the worker loses them.
const TRANSIENT: &str = "transient";

/// A Celery worker, and its rates.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `classic` or `quorum`, with persistent messages and acks late; or `transient`. `bench/peers/celery_echo.py` has the settings.
    pub messages: &'static str,
    pub pool: &'static str,
    pub processes: usize,
    pub prefetch: u16,
    /// The median of its runs.
    pub jobs_per_s: f64,
    pub best_jobs_per_s: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { messages, pool, processes, prefetch, jobs_per_s, best_jobs_per_s } = self;
        write!(
            f,
            "  Celery   {messages:<9} {pool:<7} {processes} process(es), prefetch {prefetch:<2} each {jobs_per_s:>7.0}/s, at best \
             {best_jobs_per_s:>7.0}/s"
        )
    }
}

/// Celery's best round with messages that are as durable as vramq's, and its best round of all.
#[derive(Clone, Copy, Debug)]
pub struct Best {
    pub persistent: f64,
    pub any: f64,
}

impl Best {
    pub fn of(rows: &[Row]) -> Self {
        let persistent = rows.iter().filter(|row| row.messages != TRANSIENT);
        Self {
            persistent: persistent.map(|row| row.best_jobs_per_s).fold(0.0, f64::max),
            any: rows.iter().map(|row| row.best_jobs_per_s).fold(0.0, f64::max),
        }
    }
}

/// What a run prints.
#[derive(Debug, Deserialize)]
struct Figures {
    jobs_per_s: f64,
}

/// Runs each of the settings `rounds` times in turn. `cores` is how many processes the pool of several has.
pub async fn run(
    url: &str,
    python: &Path,
    jobs: usize,
    cores: usize,
    rounds: usize,
) -> anyhow::Result<Vec<Row>> {
    let mut rates = SETTINGS.map(|_| Vec::new());
    for _ in 0..rounds {
        for (&(pool, prefetch, messages), rates) in SETTINGS.iter().zip(&mut rates) {
            let mut command = Command::new(python);
            command
                .args(["bench/peers/celery_echo.py", &jobs.to_string(), pool])
                .args([processes(pool, cores).to_string(), prefetch.to_string()])
                .env("BROKER_URL", url)
                .env("MESSAGES", messages);
            let Figures { jobs_per_s } = process::figures(&mut command).await?;
            rates.push(jobs_per_s);
        }
    }
    let row = |((pool, prefetch, messages), rates): (Setting, Vec<f64>)| {
        let best_jobs_per_s = rates.iter().copied().fold(0.0, f64::max);
        let processes = processes(pool, cores);
        Row { messages, pool, processes, prefetch, jobs_per_s: middle(rates), best_jobs_per_s }
    };
    Ok(SETTINGS.into_iter().zip(rates).map(row).collect())
}

fn processes(pool: &str, cores: usize) -> usize {
    if pool == "solo" { 1 } else { cores }
}
