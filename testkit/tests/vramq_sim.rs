//! The program `vramq-sim`: what it says of one history by its exit status.

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
