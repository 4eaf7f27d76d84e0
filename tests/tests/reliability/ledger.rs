//! The ledger test: publishers, workers that share a device and run out of memory, and random faults of everything between them.
//! At the end every job that the broker confirmed is answered or dead-lettered, as it must be.
//!
//! `VRAMQ_SOAK_SECONDS` says for how long jobs are published (`make soak` sets it), `VRAMQ_SOAK_SEED` repeats a run's
//! choices, `VRAMQ_SOAK_FAULTS=0` leaves the faults out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use vramq_schemas::topology::dead_queue;
use vramq_tests::fleet::Fleet;
use vramq_tests::flow::sessions_are_right;
use vramq_tests::job_ledger::Count;
use vramq_tests::losses::{Loss, NOTICED, explain};
use vramq_tests::management::Depth;
use vramq_tests::node::Node;
use vramq_tests::on_own_nodes;
use vramq_tests::proxy::{Cut, Proxy};
use vramq_tests::publishers::{Ends, Shared};
use vramq_tests::random::Random;
use vramq_tests::setup::{Queue, number_from};
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{DEADLINE, until_within};

on_own_nodes!(every_job_ends_once_whatever_fails);

const WORKERS: usize = 3;
const SLOTS: u64 = 16;
const PUBLISHERS: usize = 3;

/// Small enough that workers meet on it.
const DEVICE_MIB: u64 = 1;

const SECONDS: u64 = 15;

/// How likely a pass is to run out of memory though there is room. On a busy machine a short run has a few hundred passes, of which at
/// 0.01 none ran out in one run of a hundred.
const OOM: &str = "0.02";
const OUT_OF_MEMORY: &str = "\"out of memory\"";

/// A worker that waits to connect again does so for 45 s at most, and a job for memory of other processes for 30 s.
const SETTLE_MAX: Duration = Duration::from_secs(180);

/// What fails. Of each kind one comes before any comes twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// SIGKILL for a worker.
    Kill,
    /// SIGTERM for a worker.
    Drain,
    /// All connections of the workers, or of the publishers, at once.
    Cut,
    /// They stand, and nothing passes: for longer than heartbeats bear, or not.
    Stall,
    Slow,
    /// SIGKILL for the broker, and another start from its data.
    Restart,
}

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "a worker killed",
            Self::Drain => "a worker drained",
            Self::Cut => "connections cut",
            Self::Stall => "connections stalled",
            Self::Slow => "connections slowed",
            Self::Restart => "the broker killed",
        }
    }
}

const ALL: [Fault; 6] = [Fault::Kill, Fault::Drain, Fault::Cut, Fault::Stall, Fault::Slow, Fault::Restart];

/// After one of each: workers and connections fail more often than brokers.
const OFTEN: [Fault; 12] = [
    Fault::Kill,
    Fault::Kill,
    Fault::Kill,
    Fault::Kill,
    Fault::Drain,
    Fault::Drain,
    Fault::Cut,
    Fault::Cut,
    Fault::Cut,
    Fault::Stall,
    Fault::Slow,
    Fault::Restart,
];

/// What the error of a lost session says where the worker is at fault, and not the network.
const FAULTS_OF_WORKERS: [&str; 15] = [
    "PRECONDITION_FAILED",
    "COMMAND_INVALID",
    "UNEXPECTED_FRAME",
    "FRAME_ERROR",
    "SYNTAX_ERROR",
    "CHANNEL_ERROR",
    "NOT_ALLOWED",
    "NOT_FOUND",
    "RESOURCE_LOCKED",
    "RESOURCE_ERROR",
    "ACCESS_REFUSED",
    "CONTENT_TOO_LARGE",
    "NOT_IMPLEMENTED",
    "no queue takes",
    "delivers no jobs",
];

struct Chaos<'a> {
    node: &'a Node,
    of_workers: Arc<Proxy>,
    of_publishers: Arc<Proxy>,
    random: Random,
    faults: BTreeMap<Fault, usize>,
    losses: Vec<Loss>,
}

impl Chaos<'_> {
    /// Lets things fail for so long.
    async fn reign(&mut self, env: &mut TestEnv, fleet: &mut Fleet, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        let mut first = ALL.to_vec();
        // A slow machine runs few passes meanwhile, of which none need run out of memory.
        let is_over = |fleet: &Fleet| {
            let now = Instant::now();
            now >= end && (fleet.count_lines(OUT_OF_MEMORY) > 0 || now >= end + DEADLINE)
        };
        while !first.is_empty() || !is_over(&*fleet) {
            tokio::time::sleep(Duration::from_millis(100 + self.random.below(700) as u64)).await;
            fleet.reap(env)?;
            let fault = match first.len() {
                0 => *self.random.one_of(&OFTEN),
                left => first.swap_remove(self.random.below(left)),
            };
            self.commit(fault, fleet).await.with_context(|| format!("{fault:?}"))?;
        }
        Ok(())
    }

    async fn commit(&mut self, fault: Fault, fleet: &mut Fleet) -> Result<()> {
        let proxy =
            Arc::clone(self.random.one_of(&[Arc::clone(&self.of_workers), Arc::clone(&self.of_publishers)]));
        let millis = |random: &mut Random, most| Duration::from_millis(random.below(most) as u64);
        // Who may lose unacknowledged jobs: no worker, one worker, or all of them.
        let everybody = Some(None);
        let mut hit = if Arc::ptr_eq(&proxy, &self.of_workers) { everybody.clone() } else { None };
        let from = Instant::now();
        match fault {
            Fault::Kill | Fault::Drain => {
                let signal = if fault == Fault::Kill { Signal::KILL } else { Signal::TERM };
                let Some(worker) = fleet.signal_one(signal)? else { return Ok(()) };
                hit = Some(Some(worker));
            }
            Fault::Cut => drop(proxy.cut(*self.random.one_of(&[Cut::Reset, Cut::Finish]))),
            Fault::Stall => {
                proxy.stall();
                tokio::time::sleep(millis(&mut self.random, 6000)).await;
                proxy.pass();
            }
            Fault::Slow => {
                proxy.slow(5_000 + self.random.below(100_000) as u64);
                tokio::time::sleep(millis(&mut self.random, 3000)).await;
                proxy.pass();
            }
            Fault::Restart => {
                self.node.kill().await?;
                tokio::time::sleep(millis(&mut self.random, 1000)).await;
                self.node.restart().await?;
                hit = everybody;
            }
        }
        *self.faults.entry(fault).or_default() += 1;
        if let Some(worker) = hit {
            self.losses.push(Loss { what: fault.name(), worker, from, to: Instant::now() });
        }
        Ok(())
    }

    /// Times that a worker may have lost its unacknowledged jobs.
    fn lost(&self) -> usize {
        self.losses.iter().map(|loss| if loss.worker.is_some() { 1 } else { WORKERS }).sum()
    }

    /// Adds the sessions that workers lost without a fault of this test: heartbeats are missed when the machine stands still. Errors that
    /// the broker reports to a worker do not count as that.
    fn add_silences(&mut self, fleet: &Fleet) {
        for (worker, line) in fleet.find_lines("session lost") {
            let is_silence = !FAULTS_OF_WORKERS.iter().any(|code| line.text().contains(code));
            if is_silence && !self.losses.iter().any(|loss| loss.covers(&worker, line.at())) {
                // The broker may have noticed it before, and delivered the jobs to another worker.
                let (from, to) = (line.at().checked_sub(NOTICED).unwrap_or(line.at()), line.at());
                let silence = Loss { what: "a session lost by silence", worker: Some(worker), from, to };
                self.losses.insert(0, silence);
            }
        }
    }
}

fn settings(device: &SharedDevice, proxy: &Proxy) -> Vec<String> {
    let mut settings = device.settings().to_vec();
    settings.extend([
        format!("broker.url={}?heartbeat=2", proxy.url()),
        // A broker that restarts is away for longer than a worker's patience at its start.
        "broker.connect_s=120".to_owned(),
        "worker.drain_s=10".to_owned(),
        format!("model.{MODEL}.slots_max={SLOTS}"),
        format!("model.{MODEL}.pass_tokens=256"),
        format!("device.cpu.fault=random={OOM},seed=SEED"),
    ]);
    settings
}

async fn every_job_ends_once_whatever_fails(env: &mut TestEnv, node: &Node) -> Result<()> {
    let seconds = number_from("VRAMQ_SOAK_SECONDS")?;
    let time = Duration::from_secs(seconds.unwrap_or(SECONDS));
    let now = std::time::UNIX_EPOCH.elapsed()?.as_millis() as u64;
    let seed = number_from("VRAMQ_SOAK_SEED")?.unwrap_or(now);
    let faulty = number_from("VRAMQ_SOAK_FAULTS")? != Some(0);
    println!("VRAMQ_SOAK_SEED={seed}");
    for text in [
        "session lost",
        "will redeliver the unacknowledged jobs",
        "no session yet",
        "out of memory",
        "made to fail",
        "job dead-lettered",
        "drain deadline passed",
        "it will run in isolation",
    ] {
        env.announce(text);
    }
    let mut random = Random::new(seed);
    let device = SharedDevice::new(DEVICE_MIB)?;
    let mut chaos = Chaos {
        node,
        of_workers: env.proxy().await?,
        of_publishers: env.proxy().await?,
        random: Random::new(random.below(usize::MAX) as u64),
        faults: BTreeMap::new(),
        losses: Vec::new(),
    };
    let settings = settings(&device, &chaos.of_workers);
    let seeds = Random::new(random.below(usize::MAX) as u64);
    let mut fleet = Fleet::start(env, WORKERS, settings, seeds).await?;
    let shared = Shared::default();
    let letters = dead_queue(MODEL);
    let mut ends =
        Ends::start(&shared, chaos.of_publishers.url(), PUBLISHERS, &env.url, &letters, &mut random);
    let started = Instant::now();
    if faulty {
        chaos.reign(env, &mut fleet, time).await?;
    } else {
        tokio::time::sleep(time).await;
    }
    ends.stop_publishing().await?;
    let published_for = started.elapsed();

    fleet.settle(env).await?;
    env.reconnect().await?;
    all_ended(env, &shared).await?;
    sessions_are_right(env, WORKERS, SLOTS).await?;
    let resident = fleet.drain().await?;
    drop(ends);
    chaos.add_silences(&fleet);
    tell(&shared, &chaos, &fleet, &resident, published_for, started.elapsed());
    fleet.nobody_panicked()?;
    ensure!(fleet.count_lines(OUT_OF_MEMORY) > 0, "nothing ran out of memory");
    judge(&shared, &chaos, env.setup.queue)
}

/// Waits until every job of the ledger has ended and the broker holds nothing any more.
async fn all_ended(env: &TestEnv, shared: &Shared) -> Result<()> {
    let ended = until_within(SETTLE_MAX, "the end of every job", async || {
        Ok((shared.ledger().open() == 0).then_some(()))
    });
    // Jobs of whose publish nobody is sure, and what the collectors have not acknowledged yet.
    let empty =
        until_within(SETTLE_MAX, "empty queues", async || Ok(held(env).await?.is_empty().then_some(())));
    let both = async {
        ended.await?;
        empty.await
    };
    if let Err(error) = both.await {
        // One lock after the other: both in one expression would wait for each other.
        let missing = shared.ledger().missing();
        let wrong = shared.ledger().faults().to_vec();
        let (held, consumers) = (held(env).await?, env.vhost.consumers().await?);
        return Err(error.context(format!(
            "missing {missing:#?}, wrong {wrong:#?}, in queues {held:?}, read by {consumers:?}"
        )));
    }
    Ok(())
}

/// Queues that are not empty.
async fn held(env: &TestEnv) -> Result<Vec<(String, Depth)>> {
    let mut held = Vec::new();
    for queue in env.vhost.queues().await? {
        // A queue that was idle since its node came back may never be counted.
        let ready = env.client.ready(&queue).await?.into();
        let depth = env.vhost.depth(&queue).await?.unwrap_or(Depth { ready, unacked: 0 });
        if depth != (Depth { ready: 0, unacked: 0 }) {
            held.push((queue, depth));
        }
    }
    Ok(held)
}

fn tell(
    shared: &Shared,
    chaos: &Chaos<'_>,
    fleet: &Fleet,
    resident: &[(u64, u64)],
    published_for: Duration,
    took: Duration,
) {
    let ledger = shared.ledger();
    let Count { published, answered, dead, missing, both, duplicated, unsure, unsure_ended, .. } =
        ledger.count();
    let letters = &ledger.letters;
    let ooms = fleet.count_lines(OUT_OF_MEMORY);
    let (causes, unexplained) = explain(&ledger.duplicates, &chaos.losses);
    println!("published            {published} in {published_for:.0?}, all over after {took:.0?}");
    println!("answered             {answered}, {} items", ledger.items);
    println!("dead-lettered        {dead} {letters:?}");
    println!("missing, both        {missing}, {both}");
    println!(
        "duplicates           {} of {duplicated} jobs; bound: {} losses of {SLOTS}",
        ledger.duplicates.len(),
        chaos.lost()
    );
    println!("explained by         {causes:?}");
    println!("unexplained          {}", unexplained.len());
    println!("publish unconfirmed  {unsure}, of which {unsure_ended} ended all the same");
    println!("came to us again     {}", ledger.came_again);
    println!("faults               {:?}", chaos.faults);
    println!("worker exits         {:?}", fleet.exits);
    println!("out of memory        {ooms} passes");
    println!("resident MiB         {resident:?} (at first, at last)");
}

fn judge(shared: &Shared, chaos: &Chaos<'_>, queue: Queue) -> Result<()> {
    let ledger = shared.ledger();
    let count = ledger.count();
    ensure!(ledger.faults().is_empty(), "{:#?}", ledger.faults());
    ensure!(count.missing == 0 && count.both == 0, "{count:?}");
    ensure!(count.published == count.answered + count.dead, "{count:?}");
    ensure!(count.not_told == 0, "{} callers do not know that their job failed", count.not_told);
    let restarts = chaos.faults.get(&Fault::Restart).copied().unwrap_or(0);
    let forgotten = if queue == Queue::Classic { restarts * FORGOTTEN } else { 0 };
    let most = chaos.lost() * SLOTS as usize + forgotten;
    ensure!(count.duplicated <= most, "{} jobs came twice, at most {most} were in hand", count.duplicated);
    let (_, unexplained) = explain(&ledger.duplicates, &chaos.losses);
    ensure!(unexplained.is_empty(), "came twice for no reason: {unexplained:#?}");
    Ok(())
}

/// Acks that a killed node had not written yet, of a classic queue.
const FORGOTTEN: usize = 300;
