//! Starts workers, replaces those that end, as a supervisor does, and records how each of them ended.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;

use crate::logs::Line;
use crate::random::Random;
use crate::test_env::TestEnv;
use crate::worker::Worker;

/// A worker, and the last signal that it got.
#[derive(Debug)]
struct Member {
    worker: Worker,
    signalled: Option<Signal>,
    resident_at_first: Option<u64>,
}

/// Keeps this many workers running: those that end are replaced.
#[derive(Debug)]
pub struct Fleet {
    settings: Vec<String>,
    members: Vec<Member>,
    /// Ended workers by exit code, or `killed`.
    pub exits: BTreeMap<String, usize>,
    ended: Vec<Worker>,
    /// For the faults of each worker's device.
    random: Random,
}

impl Fleet {
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
        let mut fleet =
            Self { settings, members: Vec::new(), exits: BTreeMap::new(), ended: Vec::new(), random };
        for _ in 0..size {
            let member = fleet.spawn(env)?;
            member.worker.consuming().await?;
            fleet.members.push(member);
        }
        fleet.note_memory();
        Ok(fleet)
    }

    fn spawn(&mut self, env: &mut TestEnv) -> Result<Member> {
        let seed = self.random.below(1 << 30);
        let settings: Vec<_> =
            self.settings.iter().map(|setting| setting.replace("SEED", &seed.to_string())).collect();
        let settings: Vec<_> = settings.iter().map(String::as_str).collect();
        Ok(Member { worker: env.spawn_worker(&settings)?, signalled: None, resident_at_first: None })
    }

    /// Signals one of those that were not signalled anything yet. The name of that worker, if there was one.
    ///
    /// # Errors
    /// The system refuses.
    pub fn signal_one(&mut self, signal: Signal) -> Result<Option<String>> {
        let unsignalled: Vec<_> =
            (0..self.members.len()).filter(|at| self.members[*at].signalled.is_none()).collect();
        if unsignalled.is_empty() {
            return Ok(None);
        }
        let member = &mut self.members[*self.random.one_of(&unsignalled)];
        member.signalled = Some(signal);
        member.worker.signal(signal)?;
        Ok(Some(member.worker.name.clone()))
    }

    /// Replaces those that have ended.
    ///
    /// # Errors
    /// One ended that should not have, or with a code that it should not have.
    pub fn reap(&mut self, env: &mut TestEnv) -> Result<()> {
        self.note_memory();
        for at in 0..self.members.len() {
            let Some(code) = self.members[at].worker.ended() else { continue };
            let next = self.spawn(env)?;
            let member = std::mem::replace(&mut self.members[at], next);
            self.count(&member, code)?;
            self.ended.push(member.worker);
        }
        Ok(())
    }

    fn count(&mut self, member: &Member, code: Option<i32>) -> Result<()> {
        let name = code.map_or_else(|| "killed".to_owned(), |code| code.to_string());
        *self.exits.entry(name).or_default() += 1;
        let expected: &[Option<i32>] = match member.signalled {
            Some(Signal::KILL) => &[None],
            // A signal kills a process that does not listen for signals yet. Such a worker holds nothing.
            Some(_) if member.worker.log.find("session").is_none() => &[None, Some(0)],
            // 1: the drain exceeded its deadline.
            Some(_) => &[Some(0), Some(1)],
            None => &[],
        };
        let (name, signalled) = (&member.worker.name, member.signalled);
        ensure!(
            expected.contains(&code),
            "{name} ended with {code:?} after {signalled:?}; its log:\n{}",
            member.worker.log.text()
        );
        Ok(())
    }

    /// Notes what each holds of memory when it is first seen to consume.
    fn note_memory(&mut self) {
        for member in &mut self.members {
            if member.resident_at_first.is_none() && member.worker.log.find("\"consuming\"").is_some() {
                member.resident_at_first = member.worker.resident_bytes();
            }
        }
    }

    /// Waits for the end of those that were signalled, and until all the others consume.
    ///
    /// # Errors
    /// As for [`reap`](Self::reap), or one does not come back.
    pub async fn settle(&mut self, env: &mut TestEnv) -> Result<()> {
        for member in &self.members {
            if member.signalled.is_some() {
                member.worker.exited().await?;
            }
        }
        self.reap(env)?;
        for member in &self.members {
            member.worker.consuming().await?;
        }
        self.note_memory();
        Ok(())
    }

    /// Drains all, and takes their memory before that: MiB at first and at last.
    ///
    /// # Errors
    /// One does not drain.
    pub async fn drain(&mut self) -> Result<Vec<(u64, u64)>> {
        let mut resident = Vec::new();
        for member in std::mem::take(&mut self.members) {
            let last = member.worker.resident_bytes().context("a worker has ended by itself")?;
            resident.push((member.resident_at_first.unwrap_or(0) >> 20, last >> 20));
            member.worker.drain().await?;
            *self.exits.entry("0".to_owned()).or_default() += 1;
            self.ended.push(member.worker);
        }
        Ok(resident)
    }

    /// All workers that were ever in the fleet.
    fn all(&self) -> impl Iterator<Item = &Worker> {
        self.members.iter().map(|member| &member.worker).chain(&self.ended)
    }

    /// Lines with this text in the logs of all that were ever in the fleet.
    pub fn count_lines(&self, text: &str) -> usize {
        self.all().map(|worker| worker.log.count(text)).sum()
    }

    /// These lines, each with the name of its worker.
    pub fn find_lines(&self, text: &str) -> Vec<(String, Line)> {
        let of = |worker: &Worker| {
            let name = worker.name.clone();
            worker.log.find_all(text).into_iter().map(move |line| (name.clone(), line))
        };
        self.all().flat_map(of).collect()
    }

    /// # Errors
    /// A worker panicked.
    pub fn nobody_panicked(&self) -> Result<()> {
        for worker in self.all() {
            if worker.log.find("panicked").is_some() {
                bail!("{} panicked:\n{}", worker.name, worker.log.text());
            }
        }
        Ok(())
    }
}
