//! `models/fetch`: it installs no model whose bytes differ from the expected ones.

use std::path::Path;

use anyhow::{Result, ensure};
use tokio::process::Command;
use vramq_tests::on_one_setup;
use vramq_tests::programs::root;
use vramq_tests::test_env::TestEnv;
use vramq_tests::web_server::WebServer;
use vramq_tests::worker::Ended;

on_one_setup!(a_wrong_hash_is_refused_and_the_folder_stays);

async fn fetch(hub: &WebServer, arguments: &[&str], folder: &Path) -> Result<Ended> {
    let mut command = Command::new(root().join("models/fetch"));
    command
        .args(arguments)
        .arg(folder)
        .env("HF_ENDPOINT", hub.url(""))
        .env("NO_PROXY", "127.0.0.1")
        .env_remove("HF_HUB_OFFLINE");
    vramq_tests::worker::run_to_end(command).await
}

async fn a_wrong_hash_is_refused_and_the_folder_stays(_: &mut TestEnv) -> Result<()> {
    // It answers every path, with something else than the model's files.
    let hub = WebServer::start().await?;
    let around = tempfile::tempdir()?;
    let folder = around.path().join("model");
    let ended = fetch(&hub, &["--from", "hub"], &folder).await?;
    ensure!(ended.code == Some(1), "{ended:?}");
    for part in
        ["what hub sent is not the model that was asked for", "model.safetensors: expected SHA-256 53aa"]
    {
        ensure!(ended.stderr.contains(part), "no `{part}` in {}", ended.stderr);
    }
    ensure!(std::fs::read_dir(around.path())?.next().is_none(), "it leaves files behind");

    // What was there before is not replaced by something wrong, and is not right either.
    std::fs::create_dir(&folder)?;
    std::fs::write(folder.join("config.json"), "mine")?;
    let ended = fetch(&hub, &["--from", "hub"], &folder).await?;
    ensure!(ended.code == Some(1), "{ended:?}");
    ensure!(std::fs::read_to_string(folder.join("config.json"))? == "mine");
    let ended = fetch(&hub, &["--check"], &folder).await?;
    ensure!(ended.code == Some(1) && ended.stderr.contains("config.json: expected SHA-256"), "{ended:?}");
    Ok(())
}
