//! A worker's metrics, read by the Prometheus project's own parser, and the tables of docs/metrics.md.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::programs::{root, setting};
use crate::wait::{DEADLINE, until};
use crate::worker::Worker;

/// What a family of series is: its type and the names of its labels.
pub type Shape = (String, BTreeSet<String>);

/// One reading of `/metrics`.
#[derive(Clone, Debug)]
pub struct Scrape(Vec<Value>);

impl Scrape {
    /// # Errors
    /// The worker serves none, or they are not in the format.
    pub async fn of(worker: &Worker) -> Result<Self> {
        let (status, text) = worker.get("/metrics").await?;
        ensure!(status == 200, "/metrics: {status} {text}");
        let mut parser = Command::new(setting("VRAMQ_TEST_PYTHON")?)
            .arg(root().join("tests/foreign/openmetrics.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut stdin = parser.stdin.take().context("no stdin")?;
        stdin.write_all(text.as_bytes()).await?;
        drop(stdin);
        let output = tokio::time::timeout(DEADLINE, parser.wait_with_output()).await??;
        let message = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the parser refuses it: {message}\n{text}");
        Ok(Self(serde_json::from_slice(&output.stdout)?))
    }

    /// The sum of all series of a name that have these labels. The name must have series, so that a renamed or misspelt metric does not
    /// count as 0.
    ///
    /// # Panics
    /// There are none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        assert!(self.has(name), "the worker has no series {name}");
        let fitting = self
            .series(name)
            .filter(|sample| labels.iter().all(|(name, value)| sample["labels"][name] == *value));
        fitting.filter_map(|sample| sample["value"].as_f64()).sum()
    }

    /// Whether there are series of a name. Those of sensors come a while after the start.
    pub fn has(&self, name: &str) -> bool {
        self.series(name).next().is_some()
    }

    fn series<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Value> {
        self.0.iter().flat_map(samples).filter(move |sample| sample["name"] == name)
    }

    /// Every family by the name that queries have for it.
    ///
    /// # Errors
    /// One has no series.
    pub fn shapes(&self) -> Result<BTreeMap<String, Shape>> {
        let shapes = self.0.iter().map(|family| {
            let kind = family["type"].as_str().context("no type")?;
            let name = family["name"].as_str().context("no name")?;
            let suffix = if kind == "counter" { "_total" } else { "" };
            let first = samples(family).next().with_context(|| format!("{name} has no series"))?;
            let labels = first["labels"].as_object().context("no labels")?.keys().cloned();
            // The bounds of a histogram are no label of its own.
            let labels = labels.filter(|label| kind != "histogram" || label != "le").collect();
            Ok((format!("{name}{suffix}"), (kind.to_owned(), labels)))
        });
        shapes.collect()
    }
}

/// One reading of `/metrics` as text: cheap enough to be taken often. [`Scrape`] checks the format as well.
#[derive(Clone, Debug)]
pub struct Figures(String);

impl Figures {
    /// # Errors
    /// The worker serves none.
    pub async fn of(worker: &Worker) -> Result<Self> {
        let (status, text) = worker.get("/metrics").await?;
        ensure!(status == 200, "/metrics: {status} {text}");
        Ok(Self(text))
    }

    /// The sum of all series of a name, of which there have to be some. All that are asked for are whole numbers.
    ///
    /// # Panics
    /// There are none.
    pub fn sum(&self, name: &str) -> usize {
        self.sum_of(name, "")
    }

    /// The same of those with this label, written `name="value"`.
    ///
    /// # Panics
    /// There are no series of the name.
    pub fn sum_of(&self, name: &str, label: &str) -> usize {
        let mut series = self.series(name).peekable();
        assert!(series.peek().is_some(), "the worker has no series {name}");
        let values = series
            .filter(|rest| rest.contains(label))
            .filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok());
        values.sum::<f64>() as usize
    }

    /// The lines of a name, without it.
    fn series<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let rest_of = move |line: &'a str| {
            let rest = line.strip_prefix(name)?;
            rest.starts_with(['{', ' ']).then_some(rest)
        };
        self.0.lines().filter_map(rest_of)
    }
}

/// Waits until a worker's figures are as wanted.
///
/// # Errors
/// They never are.
pub async fn figures(worker: &Worker, what: &str, wanted: impl Fn(&Figures) -> bool) -> Result<Figures> {
    until(what, async || Ok(Some(Figures::of(worker).await?).filter(|figures| wanted(figures))))
        .await
        .with_context(|| worker.log.text())
}

/// Waits until so many processes of a worker's programs run a pass.
///
/// # Errors
/// They never do.
pub async fn processes_run(worker: &Worker, count: usize) -> Result<()> {
    let running = figures(worker, "processes that run passes", |figures| {
        figures.sum_of("vramq_program_processes", "state=\"running\"") == count
    });
    running.await.map(drop)
}

fn samples(family: &Value) -> impl Iterator<Item = &Value> {
    family["samples"].as_array().into_iter().flatten()
}

/// The tables of docs/metrics.md about workers: of every worker, and besides of one on a CUDA device and of one with programs.
///
/// # Errors
/// There are others.
pub fn documented() -> Result<[BTreeMap<String, Shape>; 3]> {
    let page = std::fs::read_to_string(root().join("docs/metrics.md"))?;
    let (of_workers, _) = page.split_once("## The gateway").context("no gateway")?;
    let (every, more) = of_workers.split_once("A CUDA device has").context("no second table")?;
    let (cuda, programs) = more.split_once("Models that are [programs]").context("no third table")?;
    Ok([table(every)?, table(cuda)?, table(programs)?])
}

fn table(text: &str) -> Result<BTreeMap<String, Shape>> {
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    let ticked = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
    rows.map(|row| {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let [_, name, kind, labels, ..] = cells[..] else { anyhow::bail!("a row without cells: {row}") };
        Ok((name.trim_matches('`').to_owned(), (kind.to_owned(), ticked(labels))))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_summed_over_the_series_of_a_name() {
        let figures = Figures("a_total{x=\"1\"} 2\na_total{x=\"2\"} 3\na_total_more 7\nb 4\n".to_owned());
        let sums = ["x=\"2\"", "x=\"3\""].map(|label| figures.sum_of("a_total", label));
        assert_eq!((figures.sum("a_total"), sums, figures.sum("b")), (5, [3, 0], 4));
    }

    #[test]
    #[should_panic(expected = "no series a_totals")]
    fn a_name_without_series_is_no_zero() {
        let figures = Figures("a_total 2\n".to_owned());
        assert_eq!(figures.sum("a_totals"), 0);
    }
}
