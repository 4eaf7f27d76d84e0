//! `vramq-worker`: see [`vramq_worker::app`].

use std::process::ExitCode;

fn main() -> ExitCode {
    match vramq_worker::app::keep() {
        Some(code) => code,
        None => vramq_worker::app::main(),
    }
}
