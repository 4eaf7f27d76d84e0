//! The progress of `vramq submit` on a terminal: a bar while jobs wait and run, and a line at the end.

use anyhow::{Result, ensure};
use tempfile::NamedTempFile;
use vramq_tests::on_one_setup;
use vramq_tests::programs::program;
use vramq_tests::terminal::Terminal;
use vramq_tests::test_env::{MODEL, TestEnv};

on_one_setup!(a_bar_is_drawn_and_removed, a_terminal_that_takes_no_bar_shows_lines);

async fn a_bar_is_drawn_and_removed(env: &mut TestEnv) -> Result<()> {
    // Its queue stays, so that jobs wait in it.
    env.worker(&[]).await?.drain().await?;
    let folder = tempfile::tempdir()?;
    let output = folder.path().join("out.jsonl");
    let terminal = Terminal::open(100, 24).await?;
    terminal.type_line(&format!("export VRAMQ_BROKER_URL={}; clear", env.url)).await?;
    let arguments = format!("submit --model {MODEL} --job-items 1 -o {} one two three", output.display());
    terminal.run("vramq", &arguments).await?;
    let bar = terminal.shows("the bar", |screen| screen.contains("0/3 items, ")).await?;
    ensure!(bar.contains("left"), "{bar}");

    // Each item fills a pass, and the second pass waits while the file exists.
    let held = NamedTempFile::new()?;
    env.announce("a failpoint is set");
    let drill = format!("worker.drill=pass=hang,skip=1,while={}", held.path().display());
    let worker = env.worker(&[&drill, &format!("model.{MODEL}.pass_tokens=1")]).await?;
    terminal.shows("the bar after the first item", |screen| screen.contains("1/3 items, ")).await?;
    held.close()?;
    let through = terminal.shows("the summary", |screen| screen.contains("3 items answered in ")).await?;
    ensure!(!through.contains("/3 items"), "the bar is still there:\n{through}");
    ensure!(terminal.is_restored().await?, "{through}");
    ensure!(std::fs::read_to_string(&output)?.lines().count() == 3);
    worker.drain().await
}

/// Such as a console in an editor: it would show the control characters of each bar.
async fn a_terminal_that_takes_no_bar_shows_lines(env: &mut TestEnv) -> Result<()> {
    // Its queue stays, so that jobs wait in it.
    env.worker(&[]).await?.drain().await?;
    let terminal = Terminal::open(100, 24).await?;
    terminal.type_line(&format!("export VRAMQ_BROKER_URL={}; clear", env.url)).await?;
    let arguments = format!("submit --model {MODEL} -o /dev/null one two three");
    terminal.type_line(&format!("TERM=dumb {} {arguments}", program("vramq")?.display())).await?;
    terminal.shows("a line", |screen| screen.contains("0 of 3 items")).await?;
    let worker = env.worker(&[]).await?;
    let through = terminal.shows("the summary", |screen| screen.contains("3 items answered in ")).await?;
    ensure!(!through.contains("0/3 items"), "{through}");
    worker.drain().await
}
