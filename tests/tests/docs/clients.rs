//! Clients in other languages: the programs of docs/clients, run as they are against a real worker.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Result, ensure};
use tokio::process::Command;
use vramq_tests::programs::{root, setting};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::worker::{Ended, run_to_end};
use vramq_tests::{on_one_setup, on_queue_types};

const TEXTS: [&str; 2] = ["A man is eating food.", "Someone has a meal."];

/// "In under fifteen lines each."
const LINES_MAX: usize = 14;

on_queue_types!(python_with_pika, node_with_amqplib, a_foreign_client_receives_a_failure);
on_one_setup!(the_page_shows_the_programs_as_they_are, python_with_pika_and_msgpack);

fn example(name: &str) -> PathBuf {
    root().join("docs/clients").join(name)
}

async fn run(program: &Path, source: &Path, arguments: &[&str]) -> Result<Ended> {
    let mut command = Command::new(program);
    command.arg(source).args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    run_to_end(command).await
}

async fn python(arguments: &[&str]) -> Result<Ended> {
    run(&setting("VRAMQ_TEST_PYTHON")?, &example("python.py"), arguments).await
}

async fn node(arguments: &[&str]) -> Result<Ended> {
    // Modules are looked for beside the program, so it runs from where they are.
    let folder = std::env::temp_dir().join(format!("vramq-node-{}", uuid::Uuid::now_v7().simple()));
    std::fs::create_dir(&folder)?;
    std::os::unix::fs::symlink(setting("VRAMQ_TEST_NODE_MODULES")?, folder.join("node_modules"))?;
    std::fs::copy(example("node.mjs"), folder.join("node.mjs"))?;
    let ended = run(&setting("VRAMQ_TEST_NODE")?, &folder.join("node.mjs"), arguments).await;
    std::fs::remove_dir_all(&folder)?;
    ended
}

fn printed_the_answer(ended: &Ended) -> Result<()> {
    let expected = TEXTS.map(|text| format!("done {text}"));
    let lines: Vec<_> = ended.stdout.lines().collect();
    ensure!(ended.code == Some(0) && lines == expected, "{ended:?}");
    Ok(())
}

async fn python_with_pika(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    printed_the_answer(&python(&[&env.url, MODEL]).await?)
}

/// MessagePack as a library of another language writes and reads it, bytes included.
async fn python_with_pika_and_msgpack(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    let program = root().join("tests/foreign/msgpack_job.py");
    let ended = run(&setting("VRAMQ_TEST_PYTHON")?, &program, &[&env.url, MODEL]).await?;
    ensure!(ended.code == Some(0) && ended.stdout == "done\n", "{ended:?}");
    Ok(())
}

async fn node_with_amqplib(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    printed_the_answer(&node(&[&env.url, MODEL]).await?)
}

async fn a_foreign_client_receives_a_failure(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    env.worker(&[]).await?;
    // The queue of one model gets jobs that name another.
    env.client.bind_queue("vramq.jobs.echo", "vramq.jobs", "another").await?;
    for ended in [python(&[&env.url, "another"]).await?, node(&[&env.url, "another"]).await?] {
        ensure!(ended.code == Some(0), "{ended:?}");
        ensure!(ended.stdout.contains("failed") && ended.stdout.lines().count() == 1, "{ended:?}");
    }
    env.dead_letters().await?.take(2).await?;
    Ok(())
}

async fn the_page_shows_the_programs_as_they_are(_: &mut TestEnv) -> Result<()> {
    let page = std::fs::read_to_string(example("README.md"))?;
    for (name, language) in [("python.py", "python"), ("node.mjs", "js")] {
        let source = std::fs::read_to_string(example(name))?;
        let lines = source.lines().count();
        ensure!(lines <= LINES_MAX, "{name} has {lines} lines");
        ensure!(page.contains(&format!("```{language}\n{source}```")), "the page shows another {name}");
        ensure!(page.contains(&format!(": {lines} lines")), "the page has another count for {name}");
    }
    Ok(())
}
