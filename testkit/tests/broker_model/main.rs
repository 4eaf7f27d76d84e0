//! Checks the model of RabbitMQ against a real one. Random scripts run on both, and the model must explain every frame that the broker
//! sends, and the final content of every queue.
//!
//! `VRAMQ_BROKER_SCRIPTS` is the number of scripts for each type of queue, `VRAMQ_BROKER_SEED` the first seed.

mod accept;
mod client;
mod content;
mod pool;
mod run;
mod script;
mod words;

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result, bail, ensure};
use vramq_testkit::not_run::not_run;
use vramq_testkit::simulation::broker::{Mistake, QueueKind};

use client::Address;
use pool::{Pool, Ran};

/// Scripts for each type of queue: a minute or two.
const SCRIPTS: u64 = 40;
/// The same at night.
const SCRIPTS_AT_NIGHT: u64 = 500;
/// The most percent of scripts that the check gives up because too many orders are possible. Their number depends on when frames come.
const CUT_OFF_PERCENT_MAX: u64 = 10;
/// The most percent of scripts that run again. Measured: 0 of 40, and 3 of 200.
const AGAIN_PERCENT_MAX: u64 = 10;
/// The most scripts until a mistake must be detected.
const SCRIPTS_FOR_MISTAKE: u64 = 150;

/// Scripts run one at a time, so that brokers answer at once.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn number(name: &str, default: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} is '{text}'")),
        Err(_) => Ok(default),
    }
}

/// Connections to the real broker. Without a broker that the model knows, the check is skipped.
fn pool() -> Result<Option<Pool>> {
    let Some(address) = Address::from_environment()? else {
        not_run("VRAMQ_TEST_AMQP_URL is not set: `make test` starts a RabbitMQ");
        return Ok(None);
    };
    let pool = Pool::new(address)?;
    if pool.is_none() {
        not_run("the model knows RabbitMQ up to 4.2, and this broker is newer");
    }
    Ok(pool)
}

fn agrees(kind: QueueKind, usual: u64) -> Result<()> {
    let _alone = alone();
    let Some(mut pool) = pool()? else { return Ok(()) };
    let first = number("VRAMQ_BROKER_SEED", 1)?;
    let scripts = number("VRAMQ_BROKER_SCRIPTS", usual)?;
    ensure!(scripts > 0, "VRAMQ_BROKER_SCRIPTS is 0: nothing would be checked");
    let mut total = Ran::default();
    let (mut disagreements, mut cut_off, mut again) = (Vec::new(), 0, 0);
    for seed in first..first + scripts {
        match pool.run_until_explained(seed, kind) {
            Ok(ran) => {
                total.frames += ran.frames;
                total.states += ran.states;
                cut_off += u64::from(ran.is_cut_off);
                again += u64::from(ran.runs > 1);
            }
            Err(report) => disagreements.push((seed, report)),
        }
    }
    for (seed, report) in &disagreements {
        let what: Vec<String> = format!("{report:#}").lines().take(4).map(str::to_owned).collect();
        println!("seed {seed}: {}", what.join(" "));
    }
    if let Some((_, report)) = disagreements.first() {
        let seeds: Vec<u64> = disagreements.iter().map(|(seed, _)| *seed).collect();
        bail!("{} of {scripts} scripts disagree: seeds {seeds:?}. The first:\n{report:#}", seeds.len());
    }
    let Ran { frames, states, .. } = total;
    println!(
        "{scripts} scripts on {kind:?} queues of {:?}: {frames} frames, {states} states, {cut_off} checked in part, {again} run again",
        pool.generation
    );
    ensure!(
        cut_off * 100 <= scripts * CUT_OFF_PERCENT_MAX,
        "{cut_off} of {scripts} scripts were checked in part"
    );
    ensure!(again * 100 <= scripts * AGAIN_PERCENT_MAX, "{again} of {scripts} scripts had to run again");
    Ok(())
}

#[test]
fn the_model_explains_classic_queues() -> Result<()> {
    agrees(QueueKind::Classic, SCRIPTS)
}

#[test]
fn the_model_explains_quorum_queues() -> Result<()> {
    agrees(QueueKind::Quorum, SCRIPTS)
}

#[test]
#[ignore = "takes a quarter of an hour"]
fn the_model_explains_five_hundred_scripts_on_classic_queues() -> Result<()> {
    agrees(QueueKind::Classic, SCRIPTS_AT_NIGHT)
}

#[test]
#[ignore = "takes a quarter of an hour"]
fn the_model_explains_five_hundred_scripts_on_quorum_queues() -> Result<()> {
    agrees(QueueKind::Quorum, SCRIPTS_AT_NIGHT)
}

#[test]
#[ignore = "takes minutes"]
fn mistakes_of_the_model_are_seen() -> Result<()> {
    let _alone = alone();
    let Some(mut pool) = pool()? else { return Ok(()) };
    let mut unseen = Vec::new();
    for mistake in Mistake::ALL {
        let mut caught = None;
        'scripts: for seed in 1..=SCRIPTS_FOR_MISTAKE {
            for kind in [QueueKind::Classic, QueueKind::Quorum] {
                let is_refuted = pool.run(seed, kind, Some(mistake)).is_err();
                // Because of the mistake: without it the model explains the script.
                if is_refuted && pool.run_until_explained(seed, kind).is_ok() {
                    caught = Some((seed, kind));
                    break 'scripts;
                }
            }
        }
        println!("{mistake:?}: {caught:?}");
        if caught.is_none() {
            unseen.push(mistake);
        }
    }
    ensure!(unseen.is_empty(), "not seen: {unseen:?}");
    Ok(())
}
