//! A real Prometheus with the shipped configuration, which scrapes the workers and the broker of a test.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::http::{get, segment};
use crate::ports::free_port;
use crate::programs::{root, setting};
use crate::wait::until;

/// A running server. Ends, with what it stored, when it is dropped.
#[derive(Debug)]
pub struct Prometheus {
    server: Child,
    address: String,
    folder: TempDir,
}

/// One of the package's programs.
///
/// # Errors
/// `make test` did not set it up.
pub fn program(name: &str) -> Result<PathBuf> {
    Ok(setting("VRAMQ_TEST_PROMETHEUS")?.join(name))
}

/// Where the shipped configuration is.
pub fn shipped() -> PathBuf {
    root().join("deploy/prometheus")
}

impl Prometheus {
    /// Starts it, and waits until it has asked everybody. Of the shipped configuration only the addresses are others,
    /// and the time between scrapes.
    ///
    /// # Errors
    /// It does not start, or somebody does not answer it.
    pub async fn start(workers: &[String], broker: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        std::fs::copy(shipped().join("rules.yml"), folder.path().join("rules.yml"))?;
        let config =
            with_addresses(&std::fs::read_to_string(shipped().join("prometheus.yml"))?, workers, broker)?;
        std::fs::write(folder.path().join("prometheus.yml"), config)?;
        let log = std::fs::File::create(folder.path().join("log"))?;
        // The server takes no port of the system's choice.
        let address = format!("127.0.0.1:{}", free_port()?);
        let server = Command::new(program("prometheus")?)
            .arg(format!("--config.file={}", folder.path().join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("start Prometheus")?;
        let mut this = Self { server, address, folder };
        let targets = workers.len() + 2;
        until("Prometheus to have asked everybody", async || this.has_asked(targets).await)
            .await
            .with_context(|| format!("its log:\n{}", this.log()))?;
        Ok(this)
    }

    async fn has_asked(&mut self, targets: usize) -> Result<Option<()>> {
        if let Some(status) = self.server.try_wait()? {
            bail!("Prometheus ended with {status}");
        }
        // Until it listens.
        let Ok(up) = self.query("up == 1").await else { return Ok(None) };
        Ok((up.len() == targets).then_some(()))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// What a query comes to at this moment: an element per series.
    ///
    /// # Errors
    /// Prometheus does not answer, or refuses the query.
    pub async fn query(&self, query: &str) -> Result<Vec<Value>> {
        let data = self.api(&format!("query?query={}", segment(query))).await?;
        list(&data, "/result").with_context(|| query.to_owned())
    }

    /// The series that a selector finds.
    ///
    /// # Errors
    /// As for [`query`](Self::query).
    pub async fn series(&self, selector: &str) -> Result<Vec<Value>> {
        let data = self.api(&format!("series?match[]={}", segment(selector))).await?;
        list(&data, "")
    }

    /// The alerting rules that it loaded, with their states.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn rules(&self) -> Result<Vec<Value>> {
        let mut rules = Vec::new();
        for group in list(&self.api("rules?type=alert").await?, "/groups")? {
            rules.extend(list(&group, "/rules")?);
        }
        Ok(rules)
    }

    async fn api(&self, what: &str) -> Result<Value> {
        let (status, body) = get(&self.address, &format!("/api/v1/{what}")).await?;
        let value: Value = serde_json::from_str(&body).with_context(|| format!("{what}: {status} {body}"))?;
        ensure!(status == 200 && value["status"] == "success", "{what}: {status} {body}");
        Ok(value["data"].clone())
    }
}

fn list(of: &Value, pointer: &str) -> Result<Vec<Value>> {
    of.pointer(pointer)
        .and_then(Value::as_array)
        .cloned()
        .with_context(|| format!("no list at `{pointer}` of {of}"))
}

fn with_addresses(config: &str, workers: &[String], broker: &str) -> Result<String> {
    let discovered = "dns_sd_configs:\n      - names: [workers]\n        type: A\n        port: 9464\n";
    let listed = format!("static_configs:\n      - targets: {workers:?}\n");
    let mut changed = config.to_owned();
    for (from, to) in [
        (discovered, listed.as_str()),
        ("rabbitmq:15692", broker),
        ("scrape_interval: 15s", "scrape_interval: 1s"),
        ("evaluation_interval: 15s", "evaluation_interval: 1s"),
    ] {
        ensure!(changed.contains(from), "deploy/prometheus/prometheus.yml has no `{from}` any more");
        changed = changed.replace(from, to);
    }
    Ok(changed)
}

/// Runs promtool to its end; what it prints.
///
/// # Errors
/// It finds something, which is the message.
pub async fn promtool(arguments: &[&str], folder: &Path) -> Result<String> {
    let output = Command::new(program("promtool")?).args(arguments).current_dir(folder).output().await?;
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "promtool {arguments:?}:\n{text}");
    Ok(text)
}
