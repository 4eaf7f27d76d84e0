//! The programs' own documentation: help with examples that work, exit codes, completions, manual pages; and the shipped
//! configurations.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tokio::time::timeout;
use vramq_tests::on_one_setup;
use vramq_tests::programs::{program, root, setting};
use vramq_tests::test_env::TestEnv;
use vramq_tests::wait::DEADLINE;
use vramq_tests::worker::{Ended, command, run_to_end};

on_one_setup!(
    every_command_has_an_example_and_exit_codes,
    examples_do_what_they_say,
    shells_take_the_completions,
    the_manual_can_be_read,
    shipped_configurations_are_right,
    pages_name_every_flag_and_variable_of_worker_and_gateway,
);

/// Their words and pages come from one description.
const PROGRAMS: [&str; 3] = ["vramq", "vramq-worker", "vramq-gateway"];

/// It reads its arguments itself. Its page is written by hand, and is that of `vramq run-model`, too.
pub(super) const RUN_MODEL: &str = "vramq-run-model";

/// Commands whose examples are run here. Those of `dlq` and `control` need jobs in a certain state: their own tests.
const RUN: [&str; 13] = [
    "vramq",
    "vramq submit",
    "vramq status",
    "vramq completions",
    "vramq man",
    "vramq-worker doctor",
    "vramq-worker check-config",
    "vramq-worker completions",
    "vramq-worker man",
    "vramq-gateway check-config",
    "vramq-gateway new-key",
    "vramq-gateway completions",
    "vramq-gateway man",
];

/// What a command, with its words, says to `--help`.
pub(super) async fn help(words: &[String]) -> Result<String> {
    let mut command = command(&words[0])?;
    command.args(&words[1..]).arg("--help");
    let Ended { code, stdout, stderr } = run_to_end(command).await?;
    ensure!(code == Some(0), "{words:?} --help: {code:?} {stderr}");
    Ok(stdout)
}

/// The lines of a part of a help text, from its head to the next blank line.
fn part<'a>(help: &'a str, heads: &'a [&str]) -> impl Iterator<Item = &'a str> {
    let after = help.lines().skip_while(move |line| !heads.iter().any(|head| line.starts_with(head))).skip(1);
    after.take_while(|line| !line.is_empty())
}

fn subcommands(help: &str) -> Vec<String> {
    let names = part(help, &["Commands:"]).filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

/// A command, what it says of itself, and what the group says that it is in.
pub(super) struct Said {
    pub(super) words: Vec<String>,
    pub(super) own: String,
    pub(super) above: String,
}

/// All commands of the programs.
pub(super) async fn commands() -> Result<Vec<Said>> {
    let mut found = Vec::new();
    let mut waiting: Vec<_> = PROGRAMS.iter().map(|name| (vec![(*name).to_owned()], String::new())).collect();
    while let Some((words, above)) = waiting.pop() {
        let own = help(&words).await?;
        for name in subcommands(&own) {
            waiting.push(([words.as_slice(), &[name]].concat(), own.clone()));
        }
        found.push(Said { words, own, above });
    }
    ensure!(found.len() > 10, "only {} commands", found.len());
    Ok(found)
}

async fn every_command_has_an_example_and_exit_codes(_: &mut TestEnv) -> Result<()> {
    for Said { words, own, above } in commands().await? {
        // A group documents only its commands. A command in a group may leave the exit codes to the group, if they are the same for all.
        if words.len() > 1 && !subcommands(&own).is_empty() {
            continue;
        }
        ensure!(own.contains(&format!("  {}", words.join(" "))), "{words:?} has no example:\n{own}");
        let codes = own.contains("Exit codes") || above.contains("Exit codes");
        ensure!(codes, "neither {words:?} nor its group tells of exit codes:\n{own}");
    }
    Ok(())
}

fn examples(help: &str) -> Vec<String> {
    part(help, &["Example:", "Examples:"]).map(|line| line.trim().to_owned()).collect()
}

/// A folder with what the examples name.
fn scratch() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("models"))?;
    std::os::unix::fs::symlink(setting("VRAMQ_TEST_MODEL")?, path("models/all-MiniLM-L6-v2"))?;
    std::fs::copy(root().join("models/corpus/passages.txt"), path("all.txt"))?;
    let passages = std::fs::read_to_string(path("all.txt"))?;
    let few: String = passages.lines().take(200).map(|line| format!("{line}\n")).collect();
    std::fs::write(path("passages.txt"), few)?;
    std::fs::write(path("gateway.toml"), "[http]\nlisten = \"127.0.0.1:0\"\n")?;
    std::fs::write(path("worker.toml"), "[model.minilm]\npath = \"models/all-MiniLM-L6-v2\"\n")?;
    Ok(folder)
}

/// A shell for one command, with the programs in its path.
pub(super) fn shell(line: &str, folder: &Path, url: &str) -> Result<Command> {
    let programs = program("vramq")?;
    let path = format!(
        "{}:{}",
        programs.parent().context("no folder")?.display(),
        std::env::var("PATH").unwrap_or_default()
    );
    let mut command = Command::new("bash");
    // exec: so that a signal reaches the program.
    let line = if line.contains('|') { line.to_owned() } else { format!("exec {line}") };
    command.args(["-o", "pipefail", "-c", &line]).current_dir(folder).kill_on_drop(true).stdin(Stdio::null());
    for (variable, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("VRAMQ_"))
    {
        command.env_remove(variable);
    }
    command.env("PATH", path).env("VRAMQ_BROKER_URL", url).env("VRAMQ_HTTP_LISTEN", "127.0.0.1:0");
    Ok(command)
}

async fn examples_do_what_they_say(env: &mut TestEnv) -> Result<()> {
    let folder = scratch()?;
    let model = setting("VRAMQ_TEST_MODEL")?;
    let worker = env.spawn_bare_worker(&[
        &format!("model.minilm.path={}", model.display()),
        "model.echo.engine=echo",
        "worker.heartbeat_s=1",
    ])?;
    worker.consuming().await?;
    for name in RUN {
        let words: Vec<_> = name.split(' ').map(str::to_owned).collect();
        let examples = examples(&help(&words).await?);
        ensure!(!examples.is_empty(), "{name} has no examples");
        // Those that need a terminal are in tests/operators/status.rs.
        for line in examples.iter().filter(|line| !line.contains("--watch")) {
            let output = run_to_end(shell(line, folder.path(), &env.url)?).await?;
            ensure!(output.code == Some(0), "{line}: {output:?}");
        }
    }
    worker.drain().await?;
    for line in examples(&help(&["vramq-worker".to_owned(), "run".to_owned()]).await?) {
        serves(&line, folder.path(), &env.url).await?;
    }
    let rows = std::fs::read(folder.path().join("vectors.npy"))?;
    ensure!(rows.len() == 128 + 200 * 384 * 4, "vectors.npy has {} bytes", rows.len());
    let lines = std::fs::read_to_string(folder.path().join("vectors.jsonl"))?;
    ensure!(lines.lines().count() == 100 && lines.contains("\"text\""), "vectors.jsonl");
    Ok(())
}

/// Starts a worker by an example, and ends it when it takes jobs.
async fn serves(line: &str, folder: &Path, url: &str) -> Result<()> {
    let mut worker = shell(line, folder, url)?.stderr(Stdio::piped()).spawn()?;
    let mut log = BufReader::new(worker.stderr.take().context("no log")?).lines();
    let consuming = async {
        while let Some(line) = log.next_line().await? {
            if line.contains("consuming") {
                return Ok(());
            }
        }
        anyhow::bail!("it ended")
    };
    timeout(DEADLINE, consuming).await.with_context(|| format!("{line} does not consume"))??;
    let pid =
        worker.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw).context("no process")?;
    kill_process(pid, Signal::TERM)?;
    // Not to fill the pipe.
    tokio::spawn(async move { while let Ok(Some(_)) = log.next_line().await {} });
    let status = timeout(DEADLINE, worker.wait()).await.context("it does not drain")??;
    ensure!(status.code() == Some(0), "{line}: {status}");
    Ok(())
}

/// Everything that packages install of the programs' own words.
async fn share() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let programs: PathBuf = program("vramq")?.parent().context("no folder")?.to_owned();
    program("vramq-worker")?;
    program("vramq-gateway")?;
    let mut command = Command::new(root().join("scripts/man"));
    command.arg(programs).arg(folder.path());
    let output = run_to_end(command).await?;
    ensure!(output.code == Some(0), "{output:?}");
    Ok(folder)
}

async fn shells_take_the_completions(_: &mut TestEnv) -> Result<()> {
    let share = share().await?;
    for name in PROGRAMS {
        let file = share.path().join("bash-completion/completions").join(name);
        // As a person does: the name of a command, half typed, and Tab.
        let typed = if name == "vramq" { ("sta", "status") } else { ("che", "check-config") };
        let script = format!(
            "source {}; function=$(complete -p {name} | sed 's/.*-F \\([^ ]*\\).*/\\1/'); \
             COMP_WORDS=({name} {}); COMP_CWORD=1; $function {name} {} {name}; \
             printf 'completed %s\\n' \"${{COMPREPLY[@]}}\"",
            file.display(),
            typed.0,
            typed.0
        );
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-c", &script]);
        let output = run_to_end(bash).await?;
        ensure!(
            output.code == Some(0) && output.stdout.contains(&format!("completed {}\n", typed.1)),
            "{output:?}"
        );
        for (shell, file, word) in [
            ("zsh", format!("zsh/site-functions/_{name}"), format!("#compdef {name}")),
            ("fish", format!("fish/vendor_completions.d/{name}.fish"), format!("complete -c {name}")),
        ] {
            let text = std::fs::read_to_string(share.path().join(file))?;
            ensure!(text.contains(&word) && text.contains(typed.1), "{shell}: {text}");
        }
    }
    Ok(())
}

async fn the_manual_can_be_read(_: &mut TestEnv) -> Result<()> {
    let share = share().await?;
    let folder = share.path().join("man/man1");
    let run_model = Said {
        words: vec![RUN_MODEL.to_owned()],
        own: help(&[RUN_MODEL.to_owned()]).await?,
        above: String::new(),
    };
    for Said { words, own, .. } in commands().await?.into_iter().chain([run_model]) {
        let page = folder.join(format!("{}.1", words.join("-")));
        let mut mandoc = Command::new("mandoc");
        mandoc.args(["-T", "utf8", "-W", "error,stop"]).arg(&page);
        let output = run_to_end(mandoc).await.context("mandoc: scripts/setup terminal installs it")?;
        ensure!(output.code == Some(0), "{}: {output:?}", page.display());
        // mandoc overstrikes bold letters.
        let letters: Vec<char> = output.stdout.chars().collect();
        let plain: String = letters
            .iter()
            .enumerate()
            .filter(|(at, c)| **c != '\u{8}' && letters.get(at + 1) != Some(&'\u{8}'))
            .map(|(_, c)| *c)
            .collect();
        ensure!(plain.contains("SYNOPSIS") && plain.contains(&words.join(" ").replace(' ', "-")), "{plain}");
        let named: Vec<&str> = flags(&plain).collect();
        let missing: Vec<&str> = flags(&own).filter(|flag| !named.contains(flag)).collect();
        ensure!(missing.is_empty(), "{} does not name {missing:?}:\n{plain}", page.display());
    }
    Ok(())
}

/// The flags that a text names.
fn flags(text: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let words = text.split(move |c| !is_part(c));
    words.filter(|word| word.strip_prefix("--").is_some_and(|name| name.starts_with(char::is_alphabetic)))
}

async fn pages_name_every_flag_and_variable_of_worker_and_gateway(_: &mut TestEnv) -> Result<()> {
    for (name, page) in [("vramq-worker", "docs/configuration.md"), ("vramq-gateway", "docs/http.md")] {
        let help = help(&[name.to_owned(), "run".to_owned()]).await?;
        let page_text = std::fs::read_to_string(root().join(page))?;
        let flags = help.split_whitespace().filter(|word| word.starts_with("--"));
        let variables = help.split("[env: ").skip(1).filter_map(|rest| rest.split(['=', ']']).next());
        let own = flags.chain(variables).filter(|word| *word != "--help");
        let words: Vec<_> = own.map(|word| word.trim_end_matches(|c: char| !c.is_alphanumeric())).collect();
        ensure!(words.len() > 10, "{name}: {words:?}");
        let missing: Vec<_> = words.iter().filter(|word| !page_text.contains(**word)).collect();
        ensure!(missing.is_empty(), "{page} does not name {missing:?}");
    }
    Ok(())
}

async fn shipped_configurations_are_right(_: &mut TestEnv) -> Result<()> {
    for file in ["deploy/worker.toml", "deploy/kubernetes/base/worker.toml"] {
        let mut check = command("vramq-worker")?;
        check.args(["check-config", "--config"]).arg(root().join(file));
        let output = run_to_end(check).await?;
        ensure!(output.code == Some(0) && output.stdout.contains("1 model(s)"), "{file}: {output:?}");
    }
    let mut check = command("vramq-gateway")?;
    check.args(["check-config", "--config"]).arg(root().join("deploy/debian/gateway.toml"));
    let output = run_to_end(check).await?;
    ensure!(output.code == Some(0), "{output:?}");
    Ok(())
}
