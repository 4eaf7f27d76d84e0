//! Workers that die and are replaced: what a supervisor does for them, and how each of them ended.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;

use crate::random::Random;
use crate::test_env::TestEnv;
use crate::worker::Worker;

/// A worker, and what it was told.
#[derive(Debug)]
struct Hand {
    worker: Worker,
    told: Option<Signal>,
    resident_at_first: Option<u64>,
}

/// So many workers at any time. Those that end are replaced.
#[derive(Debug)]
pub struct Crew {
    settings: Vec<String>,
    hands: Vec<Hand>,
    /// Ended workers by exit code, or `killed`.
    pub exits: BTreeMap<String, usize>,
    ended: Vec<Worker>,
    /// For the faults of each worker's device.
    random: Random,
}

impl Crew {
    /// Starts the workers. `random=P` faults get a seed for each.
    ///
    /// # Errors
    /// One does not come to consume.
    pub async fn start(
        env: &mut TestEnv,
        size: usize,
        settings: Vec<String>,
        random: Random,
    ) -> Result<Self> {
        let mut crew =
            Self { settings, hands: Vec::new(), exits: BTreeMap::new(), ended: Vec::new(), random };
        for _ in 0..size {
            let hand = crew.hire(env)?;
            hand.worker.consuming().await?;
            crew.hands.push(hand);
        }
        crew.look();
        Ok(crew)
    }

    fn hire(&mut self, env: &mut TestEnv) -> Result<Hand> {
        let seed = self.random.below(1 << 30);
        let settings: Vec<_> =
            self.settings.iter().map(|setting| setting.replace("SEED", &seed.to_string())).collect();
        let settings: Vec<_> = settings.iter().map(String::as_str).collect();
        Ok(Hand { worker: env.spawn_worker(&settings)?, told: None, resident_at_first: None })
    }

    /// Signals one of those that were not told anything yet. The name of that worker, if there was one.
    ///
    /// # Errors
    /// The system refuses.
    pub fn tell(&mut self, signal: Signal) -> Result<Option<String>> {
        let untold: Vec<_> = (0..self.hands.len()).filter(|at| self.hands[*at].told.is_none()).collect();
        if untold.is_empty() {
            return Ok(None);
        }
        let hand = &mut self.hands[*self.random.one_of(&untold)];
        hand.told = Some(signal);
        hand.worker.signal(signal)?;
        Ok(Some(hand.worker.name.clone()))
    }

    /// Replaces those that have ended.
    ///
    /// # Errors
    /// One ended that should not have, or with a code that it should not have.
    pub fn tend(&mut self, env: &mut TestEnv) -> Result<()> {
        self.look();
        for at in 0..self.hands.len() {
            let Some(code) = self.hands[at].worker.ended() else { continue };
            let next = self.hire(env)?;
            let hand = std::mem::replace(&mut self.hands[at], next);
            self.count(&hand, code)?;
            self.ended.push(hand.worker);
        }
        Ok(())
    }

    fn count(&mut self, hand: &Hand, code: Option<i32>) -> Result<()> {
        let name = code.map_or_else(|| "killed".to_owned(), |code| code.to_string());
        *self.exits.entry(name).or_default() += 1;
        let expected: &[Option<i32>] = match hand.told {
            Some(Signal::KILL) => &[None],
            // Before it listens for signals, a signal ends any process; it has nothing in hand then.
            Some(_) if hand.worker.log.find("session").is_none() => &[None, Some(0)],
            // Past the deadline of a drain, 1.
            Some(_) => &[Some(0), Some(1)],
            None => &[],
        };
        let (name, told) = (&hand.worker.name, hand.told);
        ensure!(
            expected.contains(&code),
            "{name} ended with {code:?} after {told:?}; its log:\n{}",
            hand.worker.log.text()
        );
        Ok(())
    }

    /// Notes what each holds of memory when it is first seen to consume.
    fn look(&mut self) {
        for hand in &mut self.hands {
            if hand.resident_at_first.is_none() && hand.worker.log.find("\"consuming\"").is_some() {
                hand.resident_at_first = hand.worker.resident_bytes();
            }
        }
    }

    /// Waits for the end of those that were told, and until all the others consume.
    ///
    /// # Errors
    /// As for [`tend`](Self::tend), or one does not come back.
    pub async fn settle(&mut self, env: &mut TestEnv) -> Result<()> {
        for hand in &self.hands {
            if hand.told.is_some() {
                hand.worker.exited().await?;
            }
        }
        self.tend(env)?;
        for hand in &self.hands {
            hand.worker.consuming().await?;
        }
        self.look();
        Ok(())
    }

    /// Drains all, and takes their memory before that: MiB at first and at last.
    ///
    /// # Errors
    /// One does not drain.
    pub async fn dismiss(&mut self) -> Result<Vec<(u64, u64)>> {
        let mut resident = Vec::new();
        for hand in std::mem::take(&mut self.hands) {
            let last = hand.worker.resident_bytes().context("a worker has ended by itself")?;
            resident.push((hand.resident_at_first.unwrap_or(0) >> 20, last >> 20));
            hand.worker.drain().await?;
            *self.exits.entry("0".to_owned()).or_default() += 1;
            self.ended.push(hand.worker);
        }
        Ok(resident)
    }

    /// Lines with this text in the logs of all that were ever in the crew.
    pub fn count_lines(&self, text: &str) -> usize {
        let now = self.hands.iter().map(|hand| &hand.worker);
        now.chain(&self.ended).map(|worker| worker.log.count(text)).sum()
    }

    /// # Errors
    /// A worker panicked.
    pub fn nobody_panicked(&self) -> Result<()> {
        for worker in self.hands.iter().map(|hand| &hand.worker).chain(&self.ended) {
            if worker.log.find("panicked").is_some() {
                bail!("{} panicked:\n{}", worker.name, worker.log.text());
            }
        }
        Ok(())
    }
}
