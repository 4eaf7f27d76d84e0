//! Compares the machine's AMX unit, if it has one, with the model of AMX tiles, as `examples/amx.rs` does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[allow(dead_code, reason = "its `main` is the example's")]
#[path = "../examples/amx.rs"]
mod example;

use std::path::Path;
use std::process::Command;

use vramq_testkit::not_run::not_run;

/// What the child process runs.
const CHILD: &str = "this_process_computes_as_the_model";

/// In a process of its own, because a fault of the unit ends it.
#[test]
fn the_unit_computes_as_its_model() {
    let child = std::env::current_exe().unwrap();
    let output = Command::new(child).args(["--exact", CHILD, "--ignored", "--nocapture"]).output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{}: {out}{err}", output.status);
    let absent = out.lines().find_map(|line| line.split_once("amx: not checked here: "));
    let compared = out.matches("are those of the model, to the bit").count();
    match absent {
        Some((_, why)) => not_run(why),
        None => assert_eq!(compared, 2, "neither compared nor left out: {out}{err}"),
    }
}

#[test]
#[ignore = "the_unit_computes_as_its_model runs it"]
fn this_process_computes_as_the_model() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    example::compare(&folder.join("tiny-mean")).unwrap();
}
