//! `vramq-worker`: see [`vramq_worker::app`].

use std::process::ExitCode;

/// A job takes some hundred small allocations, and its memory comes and goes in different threads: docs/bench/README.md.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match vramq_worker::app::keep() {
        Some(code) => code,
        None => vramq_worker::app::main(),
    }
}
