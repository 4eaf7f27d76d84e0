//! `vramq-worker`: see [`vramq_worker::app`].

use std::process::ExitCode;

/// mimalloc, because a job makes about a hundred small allocations that other threads free: docs/bench/README.md.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match vramq_worker::app::keep() {
        Some(code) => code,
        None => vramq_worker::app::main(),
    }
}
