//! The monitoring of the compose file: alert rules and dashboard, with a real Prometheus that scrapes a real worker and a real
//! RabbitMQ.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use tokio::process::Command;
use vramq_tests::fake_cuda::{driver, library_path, nvml};
use vramq_tests::node::Node;
use vramq_tests::programs::{echo_program, root};
use vramq_tests::prometheus::{Prometheus, program, promtool, shipped};
use vramq_tests::promql::{grouped_by, selectors};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{Ended, Worker, run_to_end};
use vramq_tests::{on_one_setup, on_own_node};

on_one_setup!(
    the_rules_fire_when_they_should_and_not_otherwise,
    every_alert_is_explained,
    alerts_lead_to_the_documentation_where_it_is_served,
    the_image_checks_the_health_of_its_worker,
);
on_own_node!(every_query_finds_what_it_asks_for);

/// Metrics that are there only when there is something to tell.
const NOT_ALWAYS: [&str; 1] = ["ALERTS"];

async fn the_rules_fire_when_they_should_and_not_otherwise(_: &mut TestEnv) -> Result<()> {
    let folder = shipped();
    promtool(&["check", "config", "prometheus.yml"], &folder).await?;
    promtool(&["check", "rules", "rules.yml"], &folder).await?;
    promtool(&["test", "rules", "rules-test.yml"], &folder).await?;
    // Each is expected to fire somewhere, with its annotations, and somewhere not.
    let tests = std::fs::read_to_string(folder.join("rules-test.yml"))?;
    for alert in alerts()? {
        let fires = tests.contains(&format!("alertname: {alert}\n        exp_alerts:"));
        let keeps_quiet = tests.contains(&format!("alertname: {alert}}}"));
        ensure!(
            fires && keeps_quiet,
            "{alert}: fires: {fires}, keeps quiet: {keeps_quiet} in rules-test.yml"
        );
    }
    Ok(())
}

/// Names of the alerts, as they are written.
fn alerts() -> Result<Vec<String>> {
    let rules = std::fs::read_to_string(shipped().join("rules.yml"))?;
    Ok(rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).map(str::to_owned).collect())
}

async fn every_alert_is_explained(_: &mut TestEnv) -> Result<()> {
    let rules = std::fs::read_to_string(shipped().join("rules.yml"))?;
    let of_chart = std::fs::read_to_string(root().join("deploy/helm/vramq/rules.yml"))?;
    ensure!(of_chart == rules, "deploy/helm/vramq/rules.yml is not a copy of deploy/prometheus/rules.yml");
    let guide = std::fs::read_to_string(root().join("docs/operating.md"))?;
    let explained: BTreeSet<_> = guide.lines().filter_map(|line| line.strip_prefix("### Vramq")).collect();
    let alerts = alerts()?;
    ensure!(!alerts.is_empty());
    for alert in &alerts {
        let runbook = format!("runbook: docs/operating.md#{}\n", alert.to_lowercase());
        ensure!(rules.contains(&runbook), "{alert} does not say where it is explained");
        let name = alert.strip_prefix("Vramq").context("another name")?;
        ensure!(explained.contains(name), "docs/operating.md has no heading {alert}");
    }
    ensure!(
        explained.len() == alerts.len(),
        "docs/operating.md explains alerts that there are not: {explained:?}"
    );
    Ok(())
}

/// Runs Prometheus as docker-compose.yml does, with its folders in `folder`, up to the point where it prints its version.
async fn start_of_compose(folder: &Path, runbooks: &str) -> Result<Ended> {
    let file = std::fs::read_to_string(root().join("docker-compose.yml"))?;
    let service = file.split_once("\n  prometheus:\n").context("no Prometheus")?.1;
    let script = service.split_once("      - >-\n").context("no script")?.1;
    let script = script.split_once("      - prometheus\n").context("not under its name")?.0;
    let (shipped, data) = (shipped(), folder.join("data"));
    let script = script
        .replace("/etc/prometheus", &shipped.to_string_lossy())
        .replace("/prometheus/config", &data.to_string_lossy())
        .replace("$$", "$")
        .replace('\n', " ");
    let path = program("prometheus")?.parent().context("no folder")?.to_owned();
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &script, "prometheus", "--version"]).env("VRAMQ_RUNBOOKS", runbooks);
    command.env("PATH", format!("{}:/usr/bin:/bin", path.display()));
    run_to_end(command).await
}

async fn alerts_lead_to_the_documentation_where_it_is_served(_: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let written = folder.path().join("data/rules.yml");
    let started = start_of_compose(folder.path(), "").await?;
    ensure!(started.code == Some(0) && started.stdout.contains("prometheus, version"), "{started:?}");
    let shipped = std::fs::read_to_string(shipped().join("rules.yml"))?;
    ensure!(
        std::fs::read_to_string(&written)? == shipped,
        "without an address they are not as they are shipped"
    );

    let started = start_of_compose(folder.path(), "https://docs.internal/vramq/").await?;
    ensure!(started.code == Some(0), "{started:?}");
    let rules = std::fs::read_to_string(&written)?;
    for alert in alerts()? {
        let name = alert.to_lowercase();
        let runbook = format!("runbook_url: https://docs.internal/vramq/operating.html#{name}\n");
        ensure!(rules.contains(&runbook), "{alert} does not lead there:\n{rules}");
    }
    ensure!(!rules.contains("runbook:"), "{rules}");
    promtool(&["check", "config", "prometheus.yml"], &folder.path().join("data")).await?;

    for wrong in
        ["docs.internal/vramq", "https://docs.internal/a#b", "https://docs.internal/a&b", "https:///", "'"]
    {
        let started = start_of_compose(folder.path(), wrong).await?;
        ensure!(started.code == Some(2) && started.stdout.is_empty(), "{wrong}: {started:?}");
        ensure!(started.stderr.contains("not the address of a documentation"), "{wrong}: {started:?}");
    }
    Ok(())
}

/// Where a worker's metrics are.
async fn address(worker: &Worker) -> Result<String> {
    let line = worker.log.wait_for("serving /livez").await?;
    Ok(line.field("address").and_then(Value::as_str).context("no address")?.to_owned())
}

async fn the_image_checks_the_health_of_its_worker(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let address = address(&worker).await?;
    let recipe = std::fs::read_to_string(root().join("Dockerfile"))?;
    let after = recipe.rsplit_once("HEALTHCHECK").context("no health check")?.1;
    let words = after.lines().find_map(|line| line.trim().strip_prefix("CMD ")).context("no command")?;
    let words: Vec<String> = serde_json::from_str(words)?;
    ensure!(words.iter().any(|word| word.contains("/127.0.0.1/9464")), "{words:?}");
    let here: Vec<_> =
        words.iter().map(|word| word.replace("127.0.0.1/9464", &address.replace(':', "/"))).collect();
    let check = async || {
        let mut command = Command::new(&here[0]);
        command.args(&here[1..]);
        anyhow::Ok(run_to_end(command).await?.code == Some(0))
    };
    ensure!(check().await?, "a worker that lives");
    worker.drain().await?;
    ensure!(!check().await?, "a worker that has ended");
    Ok(())
}

/// Queries of the dashboard's panels and variables, with the variables at all there is.
fn panel_queries() -> Result<Vec<String>> {
    let text = std::fs::read_to_string(root().join("deploy/grafana/dashboards/vramq.json"))?;
    let dashboard: Value = serde_json::from_str(&text)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let mut queries: Vec<_> =
        targets.filter_map(|target| target["expr"].as_str().map(str::to_owned)).collect();
    for variable in dashboard["templating"]["list"].as_array().context("no variables")? {
        if let Some(query) = variable["query"]["query"].as_str() {
            let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
            let (metric, label) =
                inner.and_then(|inner| inner.split_once(", ")).context("another kind of query")?;
            queries.push(format!("count by ({label}) ({metric})"));
        }
    }
    let all = |query: String| {
        query.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$instance", ".*")
    };
    let queries: Vec<_> = queries.into_iter().map(all).collect();
    ensure!(
        !queries.iter().any(|query| query.contains('$')),
        "a variable that the test does not know: {queries:#?}"
    );
    Ok(queries)
}

async fn every_query_finds_what_it_asks_for(env: &mut TestEnv, node: &Node) -> Result<()> {
    // On a fake GPU, of which there is most to be asked.
    env.set_environment("LD_LIBRARY_PATH", library_path(&[driver()?, nvml()?])?);
    let [engine, command] = echo_program("program")?;
    let worker = env.worker(&["device.kind=cuda", "device.cuda.reserve_mib=0", &engine, &command]).await?;
    let prometheus = Prometheus::start(&[address(&worker).await?], &node.broker().metrics).await?;
    env.client.publish(MODEL, env.job("a", ["text"])?).await?;
    env.replies().await?.next().await?;

    let rules = prometheus.rules().await?;
    ensure!(rules.len() == alerts()?.len(), "{rules:#?}");
    let asked = |rule: &Value| rule["query"].as_str().map(str::to_owned).context("a rule without a query");
    let of_rules = rules.iter().map(asked).collect::<Result<Vec<_>>>()?;
    let of_panels = panel_queries()?;
    ensure!(of_panels.len() > 30, "{of_panels:#?}");

    for query in of_rules.iter().chain(&of_panels) {
        prometheus.query(query).await?;
        let mut labels = BTreeSet::new();
        for selector in selectors(query) {
            if NOT_ALWAYS.iter().any(|name| selector.starts_with(name)) {
                continue;
            }
            // The broker counts its queues at intervals.
            let found = until(&format!("series of {selector}, which is asked for by {query}"), async || {
                let found = prometheus.series(&selector).await?;
                Ok((!found.is_empty()).then_some(found))
            })
            .await?;
            labels
                .extend(found.iter().filter_map(Value::as_object).flat_map(|series| series.keys().cloned()));
        }
        for label in grouped_by(query) {
            ensure!(labels.contains(&label), "no series of {query} has the label {label}");
        }
    }
    // Not only are there series: every panel shows something, but for what has not happened.
    for query in of_panels.iter().filter(|query| !query.contains("ALERTS")) {
        until(&format!("something to show for {query}"), async || {
            Ok((!prometheus.query(query).await?.is_empty()).then_some(()))
        })
        .await?;
    }

    // The backlog has a value, once a job was answered: none waits.
    until("the backlog in seconds", async || {
        let backlog = prometheus.query(&format!("vramq:backlog_device_seconds{{model={MODEL:?}}}")).await?;
        Ok((backlog.len() == 1).then_some(()))
    })
    .await?;

    // A scrape that takes longer than its second makes an alert pending for a moment, and no alert fire.
    let mut firing = Vec::new();
    let quiet = until("a moment without an alert", async || {
        firing = prometheus.query("ALERTS").await?;
        let fires = |alert: &Value| alert["metric"]["alertstate"] == "firing";
        ensure!(!firing.iter().any(fires), "an alert fires: {firing:#?}");
        Ok(firing.is_empty().then_some(()))
    })
    .await;
    quiet.with_context(|| format!("all is well, and yet: {firing:#?}"))?;
    worker.signal(Signal::KILL)?;
    worker.exited().await?;
    until("an alert over the dead worker", async || {
        Ok((!prometheus.query(r#"ALERTS{alertname="VramqWorkerDown"}"#).await?.is_empty()).then_some(()))
    })
    .await
}
