//! What the packages for Python and Node.js send and receive, seen from outside of them as well.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{ReplyKind, fields, headers};
use vramq_tests::authority::{Authority, CLIENT};
use vramq_tests::node::Node;
use vramq_tests::programs::{root, setting};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::vramq;
use vramq_tests::{on_one_setup, on_own_node};

use crate::common::package::{DEADLINE, UNSERVED, dead_letters_are_expected, succeeds, unserved_model};
use crate::{node, python};

on_one_setup!(reports_of_a_model_arrive_as_it_made_them, a_job_names_its_application_and_its_trace);
on_own_node!(
    a_private_authority_and_certificates_of_clients,
    an_operator_who_closes_connections_ends_no_job,
    a_silent_queue_holds_up_no_job_of_another_model,
    there_may_be_more_models_than_channels,
);

/// The same scenario with each package, in a folder that Node.js needs.
fn scenarios(folder: &TempDir, name: &str, url: &str) -> Result<[Command; 2]> {
    Ok([python::scenario(name, url)?, node::scenario(folder.path(), name, url)?])
}

async fn reports_of_a_model_arrive_as_it_made_them(env: &mut TestEnv) -> Result<()> {
    let script = root().canonicalize()?.join("python/tests/reports.py");
    let command = format!("model.{MODEL}.command=[{:?}, {script:?}]", setting("VRAMQ_TEST_PACKAGE")?);
    env.worker(&[&format!("model.{MODEL}.engine=process"), &command]).await?;
    let folder = tempfile::tempdir()?;
    for mut scenario in scenarios(&folder, "progress", &env.url)? {
        let files = tempfile::tempdir()?;
        scenario.arg(files.path());
        succeeds(scenario).await?;
    }
    Ok(())
}

async fn a_job_names_its_application_and_its_trace(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    let folder = tempfile::tempdir()?;
    for scenario in scenarios(&folder, "published", &env.url)? {
        succeeds(scenario).await?;
    }
    let mut replies = env.replies().await?;
    for _ in 0..2 {
        let reply = replies.next().await?;
        ensure!(reply.kind()? == ReplyKind::Done, "{:?}", reply.properties);
        let app = reply.properties.app_id().as_ref().map(|app| app.as_str());
        ensure!(app == Some("shop, ñ"), "{}: {app:?}", reply.id());
        let table = reply.headers();
        let header = |name: &str| table.inner().get(name).and_then(fields::as_text);
        let trace = header(headers::TRACEPARENT);
        let expected = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        ensure!(trace.as_deref() == Some(expected), "{}: {trace:?}", reply.id());
        let state = header(headers::TRACESTATE);
        ensure!(state.as_deref() == Some("vendor=value"), "{}: {state:?}", reply.id());
    }

    let submitted =
        vramq(&env.url, &["submit", "--model", MODEL, "--no-wait", "--app-id", "shell", "a"]).await?;
    ensure!(submitted.code == Some(0), "{submitted:?}");
    let mut replies = env.client.mailbox(&vramq_schemas::topology::default_reply_queue(MODEL)).await?;
    let reply = replies.next().await?;
    let app = reply.properties.app_id().as_ref().map(|app| app.as_str());
    ensure!(app == Some("shell"), "{app:?}");
    Ok(())
}

async fn a_private_authority_and_certificates_of_clients(env: &mut TestEnv, node: &Node) -> Result<()> {
    let authority = Authority::new()?;
    // From Erlang 29 on, the default is that every client needs one.
    let optional = "ssl_options.verify = verify_peer\nssl_options.fail_if_no_peer_cert = false\n";
    let port = authority.serve_tls(node, optional).await?;
    env.reconnect().await?;
    let files = tempfile::tempdir()?;
    for (name, text) in [
        ("ca.pem", &authority.ca),
        ("client.pem", &authority.client_certificate),
        ("client.key", &authority.client_key),
    ] {
        std::fs::write(files.path().join(name), text)?;
    }
    env.worker(&[]).await?;
    let url = format!("amqps://guest:guest@127.0.0.1:{port}/{}", env.vhost.name);
    let folder = tempfile::tempdir()?;
    for scenario in scenarios(&folder, "tls", &url)? {
        shows_its_certificate(scenario, files.path(), node).await?;
    }
    Ok(())
}

/// Runs a program that prints a line once it is connected, and goes on until the end of its input.
async fn shows_its_certificate(mut program: Command, files: &Path, node: &Node) -> Result<()> {
    program.arg(files).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = program.spawn()?;
    let mut lines = BufReader::new(client.stdout.take().context("no standard output")?).lines();
    let line = tokio::time::timeout(DEADLINE, lines.next_line()).await??;
    let subjects = match line {
        Some(_) => node.ctl(&["list_connections", "--quiet", "peer_cert_subject"]).await?,
        None => String::new(),
    };
    drop(client.stdin.take());
    let ended = tokio::time::timeout(DEADLINE, client.wait_with_output()).await??;
    ensure!(ended.status.success(), "{}: {}", ended.status, String::from_utf8_lossy(&ended.stderr));
    ensure!(subjects.contains(CLIENT), "{subjects}");
    Ok(())
}

/// While the broker is short of memory, so that the jobs of the clients wait for their confirms.
async fn an_operator_who_closes_connections_ends_no_job(env: &mut TestEnv, node: &Node) -> Result<()> {
    env.announce("the broker blocks publishers");
    env.announce("session lost, connecting again");
    // A job that was published twice may be answered after the client has gone, with its reply queue.
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    let folder = tempfile::tempdir()?;
    for scenario in scenarios(&folder, "forced", &env.url)? {
        is_closed_by_an_operator(scenario, node).await?;
    }
    env.reconnect().await
}

/// Runs a program that asks for what is to happen, a line each.
async fn is_closed_by_an_operator(mut program: Command, node: &Node) -> Result<()> {
    program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = program.spawn()?;
    let mut input = client.stdin.take().context("no standard input")?;
    let mut lines = BufReader::new(client.stdout.take().context("no standard output")?).lines();
    let ended = tokio::time::timeout(DEADLINE, async {
        while let Some(line) = lines.next_line().await? {
            match line.as_str() {
                "connected" => {
                    node.ctl(&["set_vm_memory_high_watermark", "0.0000001"]).await?;
                    input.write_all(b"short of memory\n").await?;
                }
                "waiting" => drop(node.ctl(&["close_all_connections", "--global", "maintenance"]).await?),
                _ => drop(node.ctl(&["set_vm_memory_high_watermark", "0.4"]).await?),
            }
        }
        anyhow::Ok(client.wait_with_output().await?)
    })
    .await??;
    ensure!(ended.status.success(), "{}: {}", ended.status, String::from_utf8_lossy(&ended.stderr));
    Ok(())
}

/// Jobs that a client sends to the silent queue.
const SENT_TO_SILENT: u32 = 899;

/// The process of the queue stands still: RabbitMQ waits for it as for a quorum queue without its majority.
async fn a_silent_queue_holds_up_no_job_of_another_model(env: &mut TestEnv, node: &Node) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    let queue = jobs_queue(UNSERVED);
    let folder = tempfile::tempdir()?;
    let [python, node_js] = scenarios(&folder, "silent", &env.url)?;
    let oldest_python = python::scenario_with("VRAMQ_TEST_PACKAGE_OLDEST", "silent", &env.url)?;
    // The Python packages also have a client with one channel, which sends one job.
    for (scenario, sent) in
        [(python, SENT_TO_SILENT + 1), (oldest_python, SENT_TO_SILENT + 1), (node_js, SENT_TO_SILENT)]
    {
        node.suspend(&env.vhost.name, std::slice::from_ref(&queue)).await?;
        succeeds_beside_silence(scenario, env, node, &queue).await?;
        until("the jobs that were sent, and no others", async || {
            Ok((env.client.ready(&queue).await? == sent).then_some(()))
        })
        .await?;
        env.client.purge(&queue).await?;
    }
    Ok(())
}

/// Runs a program that prints a line when the queue may go on.
async fn succeeds_beside_silence(
    mut program: Command,
    env: &TestEnv,
    node: &Node,
    queue: &str,
) -> Result<()> {
    program.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = program.spawn()?;
    let mut lines = BufReader::new(client.stdout.take().context("no standard output")?).lines();
    let line = tokio::time::timeout(DEADLINE, lines.next_line()).await??;
    node.resume(&env.vhost.name, &[queue.to_owned()]).await?;
    let ended = tokio::time::timeout(DEADLINE, client.wait_with_output()).await??;
    ensure!(ended.status.success(), "{}: {}", ended.status, String::from_utf8_lossy(&ended.stderr));
    ensure!(line.as_deref() == Some("answered"), "{line:?}");
    Ok(())
}

async fn there_may_be_more_models_than_channels(env: &mut TestEnv, node: &Node) -> Result<()> {
    let mut limited = Vec::new();
    for (user, channels) in [("small", 4), ("tiny", 1)] {
        node.ctl(&["add_user", user, user]).await?;
        node.ctl(&["set_permissions", "-p", &env.vhost.name, user, ".*", ".*", ".*"]).await?;
        node.ctl(&["set_user_limits", user, &format!(r#"{{"max-channels": {channels}}}"#)]).await?;
        limited.push(env.url.replace("guest:guest@", &format!("{user}:{user}@")));
    }
    let folder = tempfile::tempdir()?;
    let oldest_python = python::scenario_with("VRAMQ_TEST_PACKAGE_OLDEST", "many_models", &env.url)?;
    for mut scenario in scenarios(&folder, "many_models", &env.url)?.into_iter().chain([oldest_python]) {
        scenario.args(&limited);
        succeeds(scenario).await?;
    }
    Ok(())
}
