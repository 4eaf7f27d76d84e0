//! A test that does not run is named where people look: by a bare `cargo test`, which throws away what tests that pass print, and at the end
//! of `scripts/test`, with the number of such tests.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use vramq_testkit::not_run::{LIST, not_run};

#[test]
#[ignore = "the other tests run it"]
fn says_it_twice() {
    println!("captured");
    not_run("no unit\nis here");
    not_run("no unit\nis here");
}

#[test]
#[ignore = "the other tests run it"]
fn says_it_on_another_thread() {
    std::thread::spawn(|| not_run("nothing is here")).join().unwrap();
}

/// What a process of this binary writes to standard error: it runs the tests above and captures what they print.
fn run_the_tests_above(list: &Path) -> (bool, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "says_it_"])
        .env(LIST, list)
        .output()
        .unwrap();
    let is_captured = !String::from_utf8_lossy(&output.stdout).contains("captured");
    assert!(
        is_captured || !output.status.success(),
        "what tests that pass print is not captured here: {output:?}"
    );
    (output.status.success(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_test_that_did_not_run_is_named_though_it_passes() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("list");
    std::fs::write(&list, "what was there before\n").unwrap();
    let (passed, said) = run_the_tests_above(&list);
    assert!(passed, "{said}");
    assert_eq!(said.matches("not run: not_run::says_it_twice: no unit is here\n").count(), 2, "{said}");
    let written = std::fs::read_to_string(&list).unwrap();
    let (before, written) = written.split_once('\n').unwrap();
    assert_eq!(before, "what was there before");
    let mut written: Vec<_> = written.lines().collect();
    written.sort_unstable();
    let [by_place, first, second] = written[..] else { panic!("{written:?}") };
    assert_eq!([first, second], ["not_run::says_it_twice\tno unit is here"; 2]);
    let place =
        by_place.strip_suffix("\tnothing is here").and_then(|place| place.strip_prefix("not_run, at "));
    assert!(place.is_some_and(|place| place.contains("tests/not_run.rs:")), "{by_place}");
}

#[test]
fn a_test_whose_word_is_lost_does_not_pass() {
    let folder = tempfile::tempdir().unwrap();
    let (passed, said) = run_the_tests_above(&folder.path().join("no such folder/list"));
    assert!(!passed, "{said}");
}

/// `scripts/test`, with a `cargo` that runs the tests above, each of them twice.
fn scripts_test(runs: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let cargo = folder.path().join("cargo");
    std::fs::write(&cargo, format!("#!/bin/sh\n[ \"$1 $2\" = 'test --workspace' ] || exit 9\n{runs}\n"))
        .unwrap();
    std::fs::set_permissions(&cargo, std::fs::Permissions::from_mode(0o755)).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let output = Command::new(root.join("scripts/test"))
        .env("PATH", format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap()))
        .env("VRAMQ_TEST_RUNNER", "cargo")
        .env("VRAMQ_TEST_CUDA_TOOLS", folder.path())
        .env("THIS_BINARY", std::env::current_exe().unwrap())
        .env("TMPDIR", folder.path())
        .env_remove(LIST)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 1, "only the program that stands for cargo is left");
    said
}

#[test]
fn the_script_lists_and_counts_the_tests_that_did_not_run() {
    let said = scripts_test("\"$THIS_BINARY\" --ignored says_it_ && \"$THIS_BINARY\" --ignored says_it_");
    // After what the tests themselves say, each once.
    let summary: Vec<_> = said.lines().filter(|line| line.starts_with("scripts/test: ")).collect();
    let listed = |line: &str| summary.iter().filter(|found| **found == line).count();
    assert_eq!(listed("scripts/test: not run: not_run::says_it_twice: no unit is here"), 1, "{said}");
    assert_eq!(summary.iter().filter(|line| line.ends_with(": nothing is here")).count(), 1, "{said}");
    assert_eq!(summary.last(), Some(&"scripts/test: 2 tests did not run, or only in part"), "{said}");
    // Where all ran there is nothing to say.
    assert!(!scripts_test("exit 0").contains("did not run"));
}
