//! The program `vramq-sim`: the exit status and the trace of one history.

use std::collections::BTreeSet;
use std::process::{Command, Output};

/// One history of half an hour, which breaks a rule if parts are left out on purpose.
fn replay(further: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_vramq-sim"));
    program.args(["--seed", "1", "--hours", "0.5"]).args(further).output().expect("vramq-sim starts")
}

/// `git bisect run` asks for it.
#[test]
fn a_history_that_breaks_a_rule_is_a_failure() {
    let well = replay(&[]);
    let told = String::from_utf8_lossy(&well.stdout);
    assert!(well.status.success() && told.contains("every rule held"), "{}", well.status);
    // 2 would be a mistake in its arguments.
    let broken = replay(&["--sabotage", "PartSkipped"]);
    assert_eq!(broken.status.code(), Some(1));
}

/// A person follows a job by its number, and finds the worker that a fault hits.
#[test]
fn the_trace_has_one_number_for_a_job_and_names_workers_that_are_there() {
    let history = replay(&[]);
    let trace = String::from_utf8_lossy(&history.stdout);
    let with_keys: Vec<_> = trace.lines().filter(|line| line.contains("JobKey")).collect();
    assert!(with_keys.is_empty(), "{with_keys:#?}");
    let started: BTreeSet<_> = trace
        .lines()
        .filter(|line| line.ends_with("process started"))
        .filter_map(|line| number_after(line, "worker-"))
        .collect();
    let hit: BTreeSet<_> = trace
        .lines()
        .filter(|line| line.contains(" begins"))
        .filter_map(|line| number_after(line, "worker: "))
        .collect();
    assert!(!hit.is_empty() && hit.is_subset(&started), "faults hit {hit:?} of {started:?}");
}

fn number_after<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(name)?;
    rest.split(|c: char| !c.is_ascii_digit()).next()
}
