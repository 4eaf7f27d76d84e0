//! The programs of the README and of the packages' pages, run as they are written except for the broker's address, with the packages.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use tempfile::{NamedTempFile, TempDir};
use tokio::process::Command;
use vramq_schemas::topology::dead_queue;
use vramq_tests::on_one_setup;
use vramq_tests::programs::{root, setting};
use vramq_tests::proxy::Cut;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{Worker, run_to_end_within};

use crate::common::package::DEADLINE;

on_one_setup!(
    the_readmes_program_says_how_it_went,
    the_readmes_program_survives_a_lost_connection,
    the_pages_of_the_packages_have_programs_that_run,
    what_the_page_reads_of_references_is_there,
);

/// What the pages name as broker.
const BROKER: &str = "amqp://guest:guest@localhost:5672/%2f";

/// The program at this place of a page's programs in a language. A page with more or fewer of them fails: each is run somewhere.
fn sample(page: &str, language: &str, at: usize, count: usize) -> Result<String> {
    let text = std::fs::read_to_string(root().join(page))?;
    let fence = format!("```{language}\n");
    let programs: Vec<&str> =
        text.split(&fence).skip(1).filter_map(|rest| Some(rest.split_once("```")?.0)).collect();
    ensure!(programs.len() == count, "{page} has {} programs in {language}, not {count}", programs.len());
    Ok(programs[at].to_owned())
}

/// Runs a Python program with the package; what it printed.
async fn python(folder: &TempDir, program: &str) -> Result<String> {
    let file = folder.path().join("program.py");
    std::fs::write(&file, program)?;
    printed(Command::new(setting("VRAMQ_TEST_PACKAGE")?), &file).await
}

/// The same in JavaScript.
async fn javascript(folder: &TempDir, program: &str) -> Result<String> {
    let (file, modules) = (folder.path().join("program.mjs"), folder.path().join("node_modules"));
    std::fs::write(&file, program)?;
    if !modules.exists() {
        std::os::unix::fs::symlink(setting("VRAMQ_TEST_NODE_PACKAGE")?, modules)?;
    }
    printed(Command::new(setting("VRAMQ_TEST_NODE")?), &file).await
}

async fn printed(mut command: Command, program: &Path) -> Result<String> {
    command.arg(program).current_dir(program.parent().context("no folder")?);
    command.stdin(Stdio::null()).kill_on_drop(true);
    let ended = run_to_end_within(command, DEADLINE).await?;
    ensure!(ended.code == Some(0), "{ended:?}");
    Ok(ended.stdout)
}

fn readme_program(url: &str) -> Result<String> {
    Ok(sample("README.md", "python", 0, 1)?.replace(BROKER, url))
}

async fn encoder(env: &mut TestEnv, more: &[&str]) -> Result<Worker> {
    let path = format!("model.minilm.path={}", setting("VRAMQ_TEST_MODEL")?.display());
    env.worker(&[&[path.as_str()], more].concat()).await
}

async fn the_readmes_program_says_how_it_went(env: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let program = readme_program(&env.url)?;
    let printed = python(&folder, &program).await?;
    ensure!(printed.starts_with("try again later: no exchange vramq.jobs"), "{printed}");
    // Nobody listens there.
    let printed = python(&folder, &readme_program("amqp://guest:guest@127.0.0.1:1/%2f")?).await?;
    ensure!(printed.starts_with("try again later: cannot reach the broker at 127.0.0.1:1"), "{printed}");

    let worker = encoder(env, &[]).await?;
    let printed = python(&folder, &program).await?;
    ensure!(printed == "(2, 384)\n", "{printed}");
    worker.drain().await?;

    // A model that takes no such job.
    env.announce("job dead-lettered");
    env.leave(&dead_queue("minilm"));
    env.worker(&["model.minilm.engine=echo"]).await?;
    let printed = python(&folder, &program).await?;
    ensure!(printed.starts_with("failed: invalid-input "), "{printed}");
    Ok(())
}

/// The connection is cut while a worker has the job.
async fn the_readmes_program_survives_a_lost_connection(env: &mut TestEnv) -> Result<()> {
    let held = NamedTempFile::new()?;
    env.announce("a failpoint is set");
    let drill = format!("worker.drill=pass=hang,while={}", held.path().display());
    let worker = encoder(env, &[&drill]).await?;
    let proxy = env.proxy().await?;
    let folder = tempfile::tempdir()?;
    let program = readme_program(proxy.url())?;
    let cut = async {
        until("the worker to have the job", async || {
            let (_, metrics) = worker.get("/metrics").await?;
            let mut received =
                metrics.lines().filter(|line| line.starts_with("vramq_jobs_received_total{model=\"minilm\""));
            Ok(received.any(|line| line.ends_with(" 1")).then_some(()))
        })
        .await?;
        let before = proxy.accepted();
        ensure!(proxy.cut(Cut::Reset) > 0, "the program had no connection");
        until("the program to be back", async || Ok((proxy.accepted() > before).then_some(()))).await?;
        held.close()?;
        Ok(())
    };
    let (printed, ()) = tokio::try_join!(python(&folder, &program), cut)?;
    ensure!(printed == "(2, 384)\n", "{printed}");
    Ok(())
}

async fn the_pages_of_the_packages_have_programs_that_run(env: &mut TestEnv) -> Result<()> {
    encoder(env, &[]).await?;
    let folder = tempfile::tempdir()?;
    // The second of each language needs OpenTelemetry; `docs/clients.rs` runs the third.
    let program = sample("docs/clients/README.md", "python", 0, 3)?.replace(BROKER, &env.url);
    let printed = python(&folder, &program).await?;
    ensure!(printed.starts_with("2 of 2\n[[") && printed.ends_with("]]\n"), "{printed}");
    let program = sample("docs/clients/README.md", "js", 0, 3)?.replace(BROKER, &env.url);
    let more = "console.log(outputs.length, outputs[1].embedding.length)\n";
    let printed = javascript(&folder, &format!("{program}{more}")).await?;
    ensure!(printed == "2 384\n", "{printed}");
    let program = sample("node/README.md", "js", 0, 1)?.replace(BROKER, &env.url);
    let printed = javascript(&folder, &program).await?;
    ensure!(printed.starts_with("Float32Array(384) ["), "{printed}");

    let program = sample("python/README.md", "python", 0, 2)?.replace(BROKER, &env.url);
    let after = "print(vectors.shape, result.outputs[0].dtype, result.worker, len(outputs))\n";
    let printed = python(&folder, &format!("{program}{after}")).await?;
    let last = printed.lines().last().unwrap_or_default();
    ensure!(printed.contains("100 of 100\n") && last == "(2, 384) f16 worker-0 100", "{printed}");
    Ok(())
}

async fn what_the_page_reads_of_references_is_there(env: &mut TestEnv) -> Result<()> {
    let place = tempfile::tempdir()?;
    // The folder's name without links: the client compares references with it.
    let out = place.path().canonicalize()?.display().to_string();
    let (store, output_store) =
        (format!("store.out.url=file://{out}"), format!("model.{MODEL}.output_store=out"));
    env.worker(&[&store, &output_store, &format!("model.{MODEL}.output_above_kib=1")]).await?;
    let folder = tempfile::tempdir()?;
    let program = sample("python/README.md", "python", 1, 2)?.replace("/srv/out", &out);
    let before = format!(
        "import vramq\nwith vramq.Client({:?}) as client:\n    result = client.run({MODEL:?}, [\"x\" * 2048])\n",
        env.url
    );
    let after = "assert picture == open(\"picture.png\", \"rb\").read()\nprint(len(picture))\n";
    let printed = python(&folder, &format!("{before}{program}{after}")).await?;
    // The JSON text of the item.
    ensure!(printed == "2050\n", "{printed}");
    Ok(())
}
