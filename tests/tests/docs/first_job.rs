//! Runs the commands of docs/first-job.md as a reader types them, except for the broker's address and the gateway's port.

use std::os::unix::fs::symlink;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use vramq_schemas::topology::default_reply_queue;
use vramq_tests::doc_runner::DocRunner;
use vramq_tests::on_one_setup;
use vramq_tests::ports::free_port;
use vramq_tests::programs::{program, root, setting};
use vramq_tests::test_env::TestEnv;

use super::readme::{BROKER, PORT};

on_one_setup!(the_first_job_goes_as_the_page_says);

const MODEL: &str = "minilm";

/// Words of commands that are not run here, and why.
const NOT_RUN: [(&str, &str); 2] = [
    ("cargo install", "the tests have built the programs, and set up model and packages"),
    ("docker run", "a broker runs"),
];

/// The folder in which the reader sits: what the page uses of a clone.
fn clone() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    std::fs::create_dir(folder.path().join("models"))?;
    let model = setting("VRAMQ_TEST_MODEL")?.canonicalize()?;
    symlink(model, folder.path().join("models/all-MiniLM-L6-v2"))?;
    symlink(root().canonicalize()?.join("models/corpus"), folder.path().join("models/corpus"))?;
    symlink(root().canonicalize()?.join("docs"), folder.path().join("docs"))?;
    Ok(folder)
}

/// What the reader types before the page: where the programs are, and both environments of Python as one. The tests' environment
/// with pika is not the one with the package.
fn preparations(folder: &TempDir) -> Result<Vec<String>> {
    // They are beside `vramq`; none may be of yesterday.
    for name in ["vramq-worker", "vramq-gateway"] {
        program(name)?;
    }
    let vramq = program("vramq")?;
    let programs = vramq.parent().context("no folder")?;
    let (pika, package) = (setting("VRAMQ_TEST_PYTHON")?, setting("VRAMQ_TEST_PACKAGE")?);
    Ok(vec![
        format!("cd {}; export HOME=$PWD XDG_STATE_HOME=$PWD", folder.path().display()),
        format!("export PATH={}:$PATH VRAMQ__WORKER__HEARTBEAT_S=1", programs.display()),
        format!(
            "python() {{ case $1 in docs/clients/*) {} \"$@\" ;; *) {} \"$@\" ;; esac; }}",
            pika.display(),
            package.display()
        ),
    ])
}

async fn the_first_job_goes_as_the_page_says(env: &mut TestEnv) -> Result<()> {
    // The reply to the job of the dead letter, which names no reply queue: `failed`, and after the retry `done`.
    env.leave(&default_reply_queue(MODEL));
    let page = std::fs::read_to_string(root().join("docs/first-job.md"))?;
    let source = std::fs::read_to_string(root().join("docs/first-job/nearest.py"))?;
    ensure!(
        page.contains(&format!("```python\n{source}```")),
        "the page shows another program than docs/first-job/nearest.py"
    );
    let not_run = NOT_RUN.map(|(word, _)| word);
    ensure!(not_run.iter().all(|word| page.contains(word)), "what is not run is not in the page any more");
    let install =
        page.lines().find(|line| line.contains("cargo install")).context("no line that installs")?;
    let readme = std::fs::read_to_string(root().join("README.md"))?;
    ensure!(readme.lines().any(|line| line == install), "the README does not install by `{install}`");
    let port = free_port()?;
    let page = page.replace(BROKER, &env.url).replace(PORT, &format!(":{port}"));
    let folder = clone()?;
    let runner = DocRunner::new(&preparations(&folder)?).await?;
    let count = runner.walk(&page, &not_run).await?;
    ensure!(count >= 25, "only {count} commands were run");
    Ok(())
}
