//! Measures the message path in Celery, with its default settings and with those of its guide to optimizing for short tasks.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::{middle, process};

/// Pools, and jobs that the broker may send ahead for each process. 4 is Celery's default.
const SETTINGS: [(&str, u16); 4] = [("solo", 4), ("solo", 64), ("prefork", 4), ("prefork", 64)];

/// A Celery worker, and its rates.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub pool: &'static str,
    pub processes: usize,
    pub prefetch: u16,
    /// The median of its runs.
    pub jobs_per_s: f64,
    pub best_jobs_per_s: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, processes, prefetch, jobs_per_s, best_jobs_per_s } = self;
        write!(
            f,
            "  Celery   {pool:<7} {processes} process(es), prefetch {prefetch:<2} each {jobs_per_s:>7.0}/s, at best \
             {best_jobs_per_s:>7.0}/s"
        )
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
        for (&(pool, prefetch), rates) in SETTINGS.iter().zip(&mut rates) {
            let mut command = Command::new(python);
            command
                .args(["bench/peers/celery_echo.py", &jobs.to_string(), pool])
                .args([processes(pool, cores).to_string(), prefetch.to_string()])
                .env("BROKER_URL", url);
            let Figures { jobs_per_s } = process::figures(&mut command).await?;
            rates.push(jobs_per_s);
        }
    }
    let row = |((pool, prefetch), rates): ((&'static str, u16), Vec<f64>)| {
        let best_jobs_per_s = rates.iter().copied().fold(0.0, f64::max);
        Row { pool, processes: processes(pool, cores), prefetch, jobs_per_s: middle(rates), best_jobs_per_s }
    };
    Ok(SETTINGS.into_iter().zip(rates).map(row).collect())
}

fn processes(pool: &str, cores: usize) -> usize {
    if pool == "solo" { 1 } else { cores }
}
