//! The program `vramq-sim`: the exit status and the trace of one history.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

/// Runs one history of half an hour, with these further arguments.
fn replay(further: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_vramq-sim"));
    program.args(["--seed", "1", "--hours", "0.5"]).args(further).output().expect("vramq-sim starts")
}

/// `git bisect run` needs this exit status.
#[test]
fn a_history_that_breaks_a_rule_is_a_failure() {
    let well = replay(&[]);
    let told = String::from_utf8_lossy(&well.stdout);
    assert!(well.status.success() && told.contains("every rule held"), "{}", well.status);
    // 2 would mean wrong arguments.
    let broken = replay(&["--sabotage", "PartSkipped"]);
    assert_eq!(broken.status.code(), Some(1));
}

/// A seed gives another history when the generator of plans changes. A plan in a file does not.
#[test]
fn a_history_that_was_found_is_kept_as_the_plan_in_a_file() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("found.json");
    let found = replay(&["--sabotage", "PartSkipped", "--shrink", "--save", file.to_str().unwrap()]);
    let again =
        Command::new(env!("CARGO_BIN_EXE_vramq-sim")).arg("--plan").arg(&file).output().expect("it starts");
    let last = |output: &Output| {
        String::from_utf8_lossy(&output.stdout).lines().last().map(str::to_owned).expect("a trace")
    };
    assert_eq!((found.status.code(), again.status.code()), (Some(1), Some(1)));
    assert!(last(&found).starts_with("seed 1: "), "{}", last(&found));
    assert_eq!(last(&again), last(&found));
    std::fs::write(&file, "{}").unwrap();
    let no_plan = Command::new(env!("CARGO_BIN_EXE_vramq-sim")).arg("--plan").arg(&file).output().unwrap();
    assert_eq!(no_plan.status.code(), Some(2));
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
