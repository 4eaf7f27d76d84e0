//! `vramq-run-model`: a model that is tried without a broker.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output, Stdio};

use crate::env::{PROGRAM, models, processes_of, python, repository};

#[test]
fn a_model_is_tried_without_a_broker() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("model.toml");
    std::fs::write(&config, trial(folder.path())).unwrap();
    let mut run_model = Command::new(PROGRAM)
        .args(["--params", "{\"size\": 7}"])
        .arg(&config)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The second line is not UTF-8; those after it still are items.
    let mut input = run_model.stdin.take().unwrap();
    let lines = b"echo a\necho \xff\nraise a \x1b[31mbad day\n{\"json\": [1]}\nparams\n{\"json\": [1\n";
    input.write_all(lines).unwrap();
    drop(input);
    let output = run_model.wait_with_output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let outputs: Vec<&str> = printed.lines().collect();
    assert_eq!(outputs[..2], ["{\"json\":\"a\"}", "{\"json\":[1]}"], "{printed}");
    assert!(outputs.len() == 3 && outputs[2].contains("\"params\":{\"size\":7}"), "{printed}");
    assert_eq!(output.status.code(), Some(1), "not all was done");
    let told = String::from_utf8(output.stderr).unwrap();
    let failed = "vramq-run-model: line 3: failed: ValueError: a [31mbad day\n";
    assert!(told.contains("vramq-run-model: line 6: begins with { and is no JSON: "), "{told}");
    assert!(told.contains("vramq-run-model: line 2: read an item: ") && told.contains(failed), "{told}");
    assert!(!told.contains('\u{1b}'), "colours in a pipe: {told}");
    assert!(processes_of(folder.path()).is_empty());
}

/// An editor's terminal takes no control sequences.
#[test]
fn the_log_of_a_trial_has_colours_on_terminals_that_take_them() {
    let folder = tempfile::tempdir().unwrap();
    let (config, items) = (folder.path().join("model.toml"), folder.path().join("items"));
    std::fs::write(&config, trial(folder.path())).unwrap();
    std::fs::write(&items, "echo a\n").unwrap();
    let line = format!("'{PROGRAM}' '{}' < '{}'", config.display(), items.display());
    for (term, no_color, is_coloured) in [("xterm", "", true), ("xterm", "1", false), ("dumb", "", false)] {
        // `script`, of Debian's bsdutils, runs the line on a terminal of its own.
        let output = Command::new("script")
            .args(["-qec", &line, "/dev/null"])
            .envs([("TERM", term), ("NO_COLOR", no_color)])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let shown = text(&output.stdout);
        assert!(shown.contains("process loaded"), "{shown:?}");
        assert_eq!(shown.contains('\u{1b}'), is_coloured, "TERM={term} NO_COLOR={no_color}: {shown:?}");
    }
}

#[test]
fn a_trial_says_what_is_wrong_with_its_arguments() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("worker.toml");
    let models = "[model.a]\nengine = 'process'\n[model.b]\nengine = 'process'\n[model.e]\nengine = 'echo'\n";
    std::fs::write(&config, models).unwrap();
    let config = config.to_str().unwrap();
    for (arguments, said) in [
        (&["--fast", config][..], "`--fast` is not known"),
        (&[], "CONFIG or PROGRAM is missing"),
        (&["--env", "A", "serve.py"], "--env is `A`; it must be NAME=VALUE"),
        (&["--python", "python3", config], "--python and --env are for a program"),
        (&["--env", "A=b", config], "--python and --env are for a program"),
        (&["missing.py"], "read missing.py: No such file"),
        (&["--python", "no-such-python", "missing"], "read missing: No such file"),
        (&["--batch", "0", config], "--batch is `0`; it must be a number from 1"),
        (&["--params", "[1]", config], "--params is `[1]`, which is no JSON object"),
        (&[config, "a", "b"], "`b` is one argument too many"),
        (&[config], "has several models with engine = \"process\"; name one of a, b"),
        (&[config, "e"], "has no model `e` with engine = \"process\"; it has a, b"),
        (&[config, "a"], "command: is missing; it names the program and its arguments"),
    ] {
        let output = Command::new(PROGRAM).args(arguments).stdin(Stdio::null()).output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && told.contains(said), "{arguments:?}: {told}");
    }
}

/// The configuration of `models/probe.py`, with its scratch folders in this folder.
pub(crate) fn trial(scratch: &std::path::Path) -> String {
    let python_path = format!("{}:{}", repository().join("python").display(), models().display());
    format!(
        "[model.probe]\nengine = \"process\"\ncommand = [{:?}, \"probe.py\"]\nfolder = {:?}\nscratch = {scratch:?}\nenv = {{ PYTHONPATH = {python_path:?} }}\n",
        python(),
        models(),
    )
}

/// Runs a trial of these lines to its end.
fn tried(arguments: &[&str], lines: &[u8]) -> Output {
    let command = Command::new(PROGRAM)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut running = command.unwrap();
    running.stdin.take().unwrap().write_all(lines).unwrap();
    running.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn options_of_a_trial_stand_before_and_after_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("model.toml");
    std::fs::write(&config, trial(folder.path())).unwrap();
    let config = config.to_str().unwrap();
    for arguments in [
        &["--params={\"size\": 7}", config, "--batch", "2", "probe"][..],
        &[config, "probe", "--batch=2", "--params", "{\"size\": 7}"],
        &["--batch", "2", "--params", "{\"size\": 7}", "--", config, "probe"],
    ] {
        let output = tried(arguments, b"params\nparams\n");
        let (printed, told) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && printed.matches("\"params\":{\"size\":7}").count() == 2, "{told}");
        assert_eq!(told.matches("done; ").count(), 1, "one pass: {told}");
    }
    for option in ["--version", "-V"] {
        let output = tried(&[config, option], b"");
        let version = format!("vramq-run-model {}\n", env!("CARGO_PKG_VERSION"));
        assert_eq!((text(&output.stdout), output.status.code()), (&version[..], Some(0)));
    }
}

#[test]
fn a_trial_runs_what_a_worker_would_run() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("model.toml");
    let rules = "items_max = 2
        [[model.probe.rule]]
        when = \"characters > 30\"
        refuse = \"texts of at most 30 characters are taken\"
        [[model.probe.rule]]
        when = \"characters > 20\"
        to = \"long\"\n";
    std::fs::write(&config, trial(folder.path()) + rules).unwrap();
    let lines =
        format!("echo a\n{}\n{}\necho d\necho e\n", "x".repeat(31), format_args!("echo {}", "y".repeat(16)));
    let output = tried(&[config.to_str().unwrap(), "--batch", "5"], lines.as_bytes());
    let told = text(&output.stderr);
    let expected = format!(
        "{{\"json\":\"a\"}}\n{{\"json\":\"{}\"}}\n{{\"json\":\"d\"}}\n{{\"json\":\"e\"}}\n",
        "y".repeat(16)
    );
    assert_eq!((text(&output.stdout), output.status.code()), (&expected[..], Some(1)), "{told}");
    for line in [
        "passes have at most 2 items (items_max), as in a worker\n",
        "vramq-run-model: line 2: the item is refused: texts of at most 30 characters are taken\n",
        "line 3: a worker moves the job of this item to the workers with key = \"long\"; it runs here\n",
    ] {
        assert!(told.contains(line), "{told}");
    }
    // Two passes of two items. The rejected item is in neither.
    assert_eq!(told.matches("done; ").count(), 2, "{told}");
}

#[test]
fn a_trial_takes_the_inputs_of_jobs() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("model.toml");
    std::fs::write(&config, trial(folder.path())).unwrap();
    let lines = b"{\"bytes\": \"AQID\"}\n{\"bytes\": \"A\"}\n{\"json\": 1, \"uri\": \"s3://b/k\"}\n{\"text\": \"echo {}\"}\n{\"uri\": \"s3://b/k\"}\n";
    let output = tried(&[config.to_str().unwrap()], lines);
    let told = text(&output.stderr);
    let expected = "{\"json\":{\"bytes\":3,\"media_type\":null,\"sum\":6}}\n{\"json\":\"{}\"}\n{\"json\":\"s3://b/k\"}\n";
    assert_eq!((text(&output.stdout), output.status.code()), (expected, Some(1)), "{told}");
    assert!(told.contains("line 2: ") && told.contains("bytes are not base64"), "{told}");
    assert!(told.contains("line 3: ") && told.contains("unexpected second key `uri`"), "{told}");
}

/// The first passes of a size are measured, later ones are not.
#[test]
fn a_trial_says_the_peak_of_a_pass_that_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("model.toml");
    std::fs::write(&config, trial(folder.path())).unwrap();
    let output = tried(&[config.to_str().unwrap()], &b"echo a\n".repeat(6));
    let told: Vec<&str> = text(&output.stderr).lines().filter(|line| line.starts_with("done; ")).collect();
    assert_eq!(told.len(), 6, "{told:?}");
    let is_measured = |line: &&str| line.starts_with("done; need unknown, peak ") && line.ends_with(" MiB");
    assert!(told[..3].iter().all(is_measured), "{told:?}");
    assert!(told[3].contains(", peak unknown: this pass was not measured"), "{told:?}");
    assert!(told[4..].iter().all(|line| !line.contains("peak") && line.ends_with(" MiB")), "{told:?}");
}

#[test]
fn a_trial_ends_quietly_when_nobody_reads_its_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("model.toml");
    std::fs::write(&config, trial(folder.path())).unwrap();
    let mut running = Command::new(PROGRAM)
        .arg(&config)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut input, mut outputs) =
        (running.stdin.take().unwrap(), BufReader::new(running.stdout.take().unwrap()));
    input.write_all(b"echo a\n").unwrap();
    let mut line = String::new();
    outputs.read_line(&mut line).unwrap();
    assert_eq!(line, "{\"json\":\"a\"}\n");
    drop(outputs);
    // The input stays open. The trial ends because the reader of its outputs has left.
    input.write_all(b"echo b\n").unwrap();
    let ended = running.wait_with_output().unwrap();
    let told = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(141), "{told}");
    assert!(!told.contains("panicked") && !told.contains("write an output"), "{told}");
    assert!(processes_of(folder.path()).is_empty());
    // Standard error is closed too.
    let config = config.to_str().unwrap();
    for (arguments, lines, code) in [
        (&["--help"][..], &b""[..], 141),
        (&["--version"], b"", 141),
        (&["--fast"], b"", 2),
        (&[config], b"echo a\nsay b\n", 141),
    ] {
        let closed = || {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            writer
        };
        let command = Command::new(PROGRAM)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(closed())
            .stderr(closed())
            .spawn();
        let mut running = command.unwrap();
        running.stdin.take().unwrap().write_all(lines).unwrap();
        assert_eq!(running.wait().unwrap().code(), Some(code), "{arguments:?}");
    }
}

/// A person has a program, and no configuration.
#[test]
fn a_program_is_tried_without_a_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let python_path = format!("PYTHONPATH={}", repository().join("python").display());
    let program = "import os, sys\nimport vramq\n\nclass Small(vramq.Model):\n    def run(self, items, params):\n        \
                   return [[item.text, sys.executable, os.environ.get('SIZE'), sys.argv[1:], os.getcwd(), len(items)] for item in items]\n\n\
                   vramq.serve(Small)\n";
    let plain = folder.path().join("serve.py");
    std::fs::write(&plain, program).unwrap();
    // Names its interpreter itself, and not by the file's name.
    let script = folder.path().join("serve");
    std::fs::write(&script, format!("#!{}\n{program}", python().display())).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (plain, script) = (plain.to_str().unwrap(), script.to_str().unwrap());
    let interpreter = python().to_str().unwrap().to_owned();
    let in_folder = std::fs::canonicalize(folder.path()).unwrap();
    for (arguments, path) in [
        (
            &[
                "--python",
                &interpreter,
                "--env",
                &python_path,
                "--env=SIZE=a=b",
                "--batch",
                "9",
                plain,
                "--",
                "-x",
                "y",
            ][..],
            "",
        ),
        (&["--env", &python_path, "--env", "SIZE=a=b", "--batch", "9", script, "--", "-x", "y"], ""),
        // The first python3 of PATH.
        (&["--env", &python_path, "--env", "SIZE=a=b", "--batch", "9", plain, "--", "-x", "y"], &interpreter),
    ] {
        let mut command = Command::new(PROGRAM);
        let links = tempfile::tempdir().unwrap();
        if !path.is_empty() {
            std::os::unix::fs::symlink(path, links.path().join("python3")).unwrap();
            command.env("PATH", links.path());
        }
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = command.spawn().unwrap();
        running.stdin.take().unwrap().write_all("x\n".repeat(9).as_bytes()).unwrap();
        let output = running.wait_with_output().unwrap();
        let told = text(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {told}");
        let first: serde_json::Value =
            serde_json::from_str(text(&output.stdout).lines().next().unwrap()).unwrap();
        let given = &first["json"];
        // All nine items are one pass.
        assert_eq!(
            (&given[2], &given[3], &given[5]),
            (&"a=b".into(), &serde_json::json!(["-x", "y"]), &9.into()),
            "{first}"
        );
        assert_eq!(given[4].as_str().map(std::path::Path::new), Some(&*in_folder), "{first}");
        for line in ["a worker serves it with this configuration:", "engine = \"process\"", "folder = "] {
            assert!(told.contains(line), "{line} is not in {told}");
        }
    }
    let neither = folder.path().join("serve.txt");
    std::fs::write(&neither, program).unwrap();
    let output = tried(&["--python", "no-such-python", neither.to_str().unwrap()], b"");
    assert!(
        output.status.code() == Some(2) && text(&output.stderr).contains("`no-such-python` is not in PATH"),
        "{output:?}"
    );
}
