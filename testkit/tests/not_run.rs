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

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// What `scripts/test` says, with a `cargo` that runs tests by one command and lists ignored tests by another, on a machine without
/// NVIDIA's programs.
fn scripts_test(runs: &str, lists: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let cargo = folder.path().join("cargo");
    let script = format!(
        "#!/bin/sh\n[ \"$1 $2\" = 'test --workspace' ] || exit 9\ncase \"$*\" in *--list*) {lists} ;; *) {runs} ;; esac\n"
    );
    std::fs::write(&cargo, script).unwrap();
    std::fs::set_permissions(&cargo, std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(root().join("scripts/test"))
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
    let twice = "\"$THIS_BINARY\" --ignored says_it_ && \"$THIS_BINARY\" --ignored says_it_";
    let said = scripts_test(
        twice,
        "printf 'slow: test\nassembler::one: test\ntinygrad::two: test\nlate: test\nlong: test\n'",
    );
    // After what the tests themselves say, each once.
    let summary: Vec<_> = said.lines().filter(|line| line.starts_with("scripts/test: ")).collect();
    let listed = |line: &str| summary.iter().filter(|found| **found == line).count();
    assert_eq!(listed("scripts/test: not run: not_run::says_it_twice: no unit is here"), 1, "{said}");
    assert_eq!(summary.iter().filter(|line| line.ends_with(": nothing is here")).count(), 1, "{said}");
    for test in ["ptx::assembler::one", "ptx::tinygrad::two"] {
        assert_eq!(
            listed(&format!("scripts/test: not run: {test}: scripts/setup cuda-tools got nothing")),
            1,
            "{said}"
        );
    }
    let is_ignored = "scripts/test: tests that are marked as ignored, and did not run: 3";
    assert_eq!(listed(is_ignored), 1, "{said}");
    // The site is no test, and is counted where it was not built.
    let site = "scripts/test: not run: the build of the site and its links: scripts/setup mdbook got nothing";
    let sites = usize::from(!root().join(".cache/mdbook/bin/mdbook").exists());
    assert_eq!(listed(site), sites, "{said}");
    let count = format!("scripts/test: {} tests did not run, or only in part", 4 + sites);
    assert_eq!(summary.last(), Some(&count.as_str()), "{said}");
}

#[test]
fn the_script_says_nothing_of_tests_that_ran() {
    let said = scripts_test("exit 0", "exit 0");
    let mut listed = said.lines().filter(|line| line.starts_with("scripts/test: not run:"));
    assert!(listed.all(|line| line.contains("the site and its links")), "{said}");
    assert!(said.contains("marked as ignored, and did not run: 0\n"), "{said}");
    assert!(scripts_test("exit 0", "exit 1").contains("how many, is not known"));
}
