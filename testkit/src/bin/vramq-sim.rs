//! Simulates fleets of workers: many seeds, or one with its trace.

use std::time::Instant;
use vramq_testkit::simulation::{agenda, plan::Plan, run, trace::Detail};

fn main() {
    let mut args = std::env::args().skip(1);
    let from: u64 = args.next().and_then(|a| a.parse().ok()).unwrap_or(1);
    let to: u64 = args.next().and_then(|a| a.parse().ok()).unwrap_or(from);
    let begun = Instant::now();
    let mut bad = 0;
    for seed in from..=to {
        let detail = if from == to { Detail::Print } else { Detail::None };
        let t = Instant::now();
        let history = run(Plan::new(seed, agenda::HOUR), detail);
        if from == to || std::env::var("VERBOSE").is_ok() {
            println!("seed {seed}: {} jobs, {} faults, {} steps, {:?} simulated in {:?}", history.jobs, history.faults, history.steps, history.lasted / 1_000_000, t.elapsed());
        }
        if let Some(violation) = history.violation {
            bad += 1;
            println!("seed {seed}: {violation}");
        }
    }
    println!("{} seeds in {:?}, {bad} bad", to - from + 1, begun.elapsed());
}
