//! Serves a process model without a broker, items on standard input: for a person who writes one.

use std::process::ExitCode;

use vramq_inference::process::keeper;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|argument| argument == keeper::ARGUMENT) {
        return keeper::keeper_main();
    }
    ExitCode::SUCCESS
}
