//! Broker addresses: several hosts of which some do not work; TLS with a private authority.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result, ensure};
use tokio::net::TcpListener;
use vramq_schemas::ReplyKind;
use vramq_tests::authority::Authority;
use vramq_tests::node::Node;
use vramq_tests::ports::ClosedPort;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{command, run_to_end};
use vramq_tests::{on_one_setup, on_own_node};

on_one_setup!(the_next_host_is_tried, the_next_host_is_tried_when_one_swallows_frames);
on_own_node!(a_private_authority_is_trusted_if_told);

/// Workers begin with any of the hosts: with so many, both ways are tried but for one case in 16.
const WORKERS: usize = 5;

/// How long a worker waits for a host. The broker answers within that time on a slow machine, too.
const ANSWER_MS: u64 = 5_000;

async fn the_next_host_is_tried(env: &mut TestEnv) -> Result<()> {
    let (user, rest) = env.url.split_once('@').context("no host")?;
    // Accepts, and says nothing; and nobody at all.
    let mute = TcpListener::bind("127.0.0.1:0").await?;
    let nobody = ClosedPort::new()?;
    let hosts =
        format!("{user}@{},{},{rest}?connection_timeout={ANSWER_MS}", nobody.address, mute.local_addr()?);
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((connection, _)) = mute.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            open.push(connection);
        }
    });
    for _ in 0..WORKERS {
        let worker = env.spawn_worker(&[&format!("broker.url={hosts}")])?;
        worker.consuming().await?;
        // The second connection begins with the host that answered the first.
        let tries = tries.swap(0, Ordering::Relaxed);
        ensure!(tries <= 1, "the mute host was tried {tries} times");
        worker.drain().await?;
        ensure!(worker.log.find("guest:guest").is_none(), "credentials in the log");
    }
    Ok(())
}

/// A host where connections open, and nothing on them is ever answered.
async fn the_next_host_is_tried_when_one_swallows_frames(env: &mut TestEnv) -> Result<()> {
    env.announce("the broker does not answer, trying the next host");
    let proxies = [env.proxy().await?, env.proxy().await?];
    for proxy in &proxies {
        proxy.swallow();
    }
    let (first, second) = (proxies[0].url(), proxies[1].url());
    let host = second.split_once('@').and_then(|(_, rest)| rest.split_once('/')).context("no host")?.0;
    let (before, vhost) = first.rsplit_once('/').context("no virtual host")?;
    let worker = env.spawn_worker(&[&format!("broker.url={before},{host}/{vhost}")])?;
    // It begins with either of them: the other one is in order.
    let swallower = until("a connection", async || Ok((0..2).find(|at| proxies[*at].accepted() > 0))).await?;
    proxies[1 - swallower].pass();
    worker.consuming().await?;
    worker.log.counts("trying the next host", 1).await?;
    until("no connection to the silent host", async || Ok((proxies[swallower].open() == 0).then_some(())))
        .await?;
    env.client.publish(MODEL, env.job("next", ["x"])?).await?;
    ensure!(env.replies().await?.next().await?.kind()? == ReplyKind::Done);
    Ok(())
}

async fn a_private_authority_is_trusted_if_told(env: &mut TestEnv, node: &Node) -> Result<()> {
    let authority = Authority::new()?;
    let folder = tempfile::tempdir()?;
    let ca = folder.path().join("ca.pem");
    std::fs::write(&ca, &authority.ca)?;
    let ca = ca.display().to_string();
    let port = authority.serve_tls(node, "").await?;
    env.reconnect().await?;
    let url = format!("amqps://guest:guest@127.0.0.1:{port}/{}", env.vhost.name);

    env.announce("no session yet");
    env.announce("cannot start");
    let stranger = env.spawn_worker(&[&format!("broker.url={url}"), "broker.connect_s=0"])?;
    ensure!(stranger.exited().await? == Some(3), "{}", stranger.log.text());
    ensure!(stranger.log.find("UnknownIssuer").is_some(), "{}", stranger.log.text());

    let worker = env.spawn_worker(&[&format!("broker.url={url}"), &format!("broker.ca={ca}")])?;
    worker.consuming().await?;
    let mut submit = command("vramq")?;
    submit.args(["submit", "--model", MODEL, "--broker-url", &url, "--broker-ca", &ca, "over TLS"]);
    let ended = run_to_end(submit).await?;
    ensure!(ended.code == Some(0) && ended.stdout.contains("over TLS"), "{ended:?}");
    worker.drain().await
}
