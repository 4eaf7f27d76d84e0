//! Faults of the configuration: `check-config` and `run` report all of them with the same words.

use std::path::Path;
use std::process::Output;

use crate::harness::gateway_command;

/// Runs a subcommand that ends by itself.
fn ended(subcommand: &str, settings: &[String]) -> Output {
    let mut command = gateway_command();
    command.arg(subcommand);
    for setting in settings {
        command.args(["--set", setting]);
    }
    command.output().unwrap()
}

#[test]
fn the_files_that_the_configuration_names_have_all_their_faults_reported_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("file"), "hunter2").unwrap();
    std::fs::write(at("other"), "").unwrap();
    std::fs::write(at("keys.toml"), "[[key]]\nname = \"a b\"\n[[key]]\nname = \"c\"\nsha256 = \"hunter2\"\n")
        .unwrap();
    let settings = [
        format!("http.keys={}", at("keys.toml")),
        format!("http.tls_certificate={}", at("file")),
        format!("http.tls_key={}", at("nowhere")),
        format!("results.folder={}", at("file")),
        format!("files.folder={}", at("other/below")),
        "operator.broker_url=amqp://operator:hunter2@localhost".to_owned(),
        format!("operator.folder={}", at("file")),
        "http.request_s=soon".to_owned(),
    ];
    let expected = [
        "the configuration has 9 fault(s)".to_owned(),
        format!("http.keys: is {}, line 2, entry 1: `name` needs", at("keys.toml")),
        format!("http.keys: is {}, line 1, entry 1: `sha256` is missing", at("keys.toml")),
        format!("http.keys: is {}, line 5, entry 2 (`c`): `sha256` is not a SHA-256", at("keys.toml")),
        format!("http.tls_certificate: is {}, which holds no certificate", at("file")),
        format!("http.tls_key: is {}, which cannot be read", at("nowhere")),
        format!("results.folder: is {0}, which cannot be a folder, because {0} is a file", at("file")),
        format!(
            "files.folder: is {}, which cannot be a folder, because {} is a file",
            at("other/below"),
            at("other")
        ),
        format!("operator.folder: is {0}, which cannot be a folder, because {0} is a file", at("file")),
        "http.request_s: is a text".to_owned(),
    ];
    let checked = ended("check-config", &settings);
    let text = String::from_utf8(checked.stderr).unwrap();
    assert_eq!(checked.status.code(), Some(2), "{text}");
    for words in expected {
        assert!(text.contains(&words), "{words}\nis not in\n{text}");
    }
    assert!(!text.contains("hunter2"), "{text}");
    let run = ended("run", &settings);
    assert_eq!((run.status.code(), String::from_utf8(run.stderr).unwrap()), (Some(2), text));
}

/// Also by root, who may write to every folder. Nobody makes a folder there.
#[test]
fn folders_of_the_kernel_are_a_fault() {
    let settings = ["results.folder=/proc/x", "files.folder=/proc/y", "broker.connect_s=0"];
    let settings = settings.map(str::to_owned);
    let checked = ended("check-config", &settings);
    let text = String::from_utf8(checked.stderr).unwrap();
    assert_eq!(checked.status.code(), Some(2), "{text}");
    for words in [
        "results.folder: is /proc/x, which cannot be written to: /proc has files of the kernel only",
        "files.folder: is /proc/y, which cannot be written to: /proc has files of the kernel only",
    ] {
        assert!(text.contains(words), "{words}\nis not in\n{text}");
    }
    let run = ended("run", &settings);
    assert_eq!((run.status.code(), String::from_utf8(run.stderr).unwrap()), (Some(2), text));
}

/// It may be mounted later. Nothing listens at the broker's address.
#[test]
fn a_missing_folder_of_outputs_is_told_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let told = |outputs: &Path| {
        let settings = [
            format!("outputs.folder={}", outputs.display()),
            "files.folder=off".to_owned(),
            "http.listen=127.0.0.1:0".to_owned(),
            "broker.url=amqp://127.0.0.1:1".to_owned(),
            "broker.connect_s=0".to_owned(),
        ];
        let run = ended("run", &settings);
        let text = String::from_utf8(run.stderr).unwrap();
        assert_eq!(run.status.code(), Some(3), "{text}");
        text.contains("outputs.folder is not there")
    };
    assert!(told(&folder.path().join("missing")));
    assert!(!told(folder.path()));
}

#[test]
fn a_pipe_that_nobody_writes_to_is_a_fault_and_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    let checked = gateway_command().args(["check-config", "--config"]).arg(&pipe).output().unwrap();
    let text = String::from_utf8(checked.stderr).unwrap();
    assert_eq!(checked.status.code(), Some(2), "{text}");
    assert!(text.contains(&format!("file {}: is empty, and no regular file", pipe.display())), "{text}");
    let keys = ended("check-config", &[format!("http.keys={}", pipe.display())]);
    let text = String::from_utf8(keys.stderr).unwrap();
    assert!(text.contains(&format!("http.keys: is {}, which is no regular file", pipe.display())), "{text}");
}

/// As with `2>&1 | head`.
#[test]
fn a_reader_that_has_gone_ends_no_check() {
    let (reader, pipe) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = gateway_command();
    command.arg("check-config").stdout(pipe.try_clone().unwrap()).stderr(pipe);
    assert_eq!(command.status().unwrap().code(), Some(0));
}
