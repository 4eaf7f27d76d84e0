//! Devices that workers and other processes share: memory, time, the device lock, and faults.

use std::collections::VecDeque;

use vramq_core::device::{Memory, OutOfMemory, PassError};
use vramq_core::event::OnDevice;
use vramq_core::ids::PassId;

use super::agenda::{Life, MILLI, Micros};

/// A pass as a device sees it.
#[derive(Clone, Debug)]
pub struct DevicePass {
    pub life: Life,
    pub pass: PassId,
    /// Bytes that it really needs, whatever the model declares.
    pub bytes: u64,
    pub exclusive: bool,
    pub takes: Micros,
    pub fate: Fate,
    /// The program's time limit if a program runs the pass, otherwise `None`. A crash then kills only the program, and no pass hangs for
    /// ever.
    pub program_limit: Option<Micros>,
}

/// The effect of a pass's items on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Ends,
    Fails,
    /// The engine reports this for one of its items.
    IsInvalid,
    Hangs,
    KillsProcess,
    KillsDevice,
}

/// How a pass on a device ends.
#[derive(Clone, Debug)]
pub enum PassFate {
    Done,
    Failed(PassError),
    /// A program stopped it.
    Cancelled,
    ProcessDies,
}

#[derive(Debug)]
struct Running {
    ticket: u64,
    pass: DevicePass,
    since: Micros,
    /// `None`: it never ends by itself.
    fate: Option<PassFate>,
}

/// A device.
#[derive(Debug)]
pub struct Device {
    total: u64,
    /// Bytes of weights and contexts, by process.
    residents: Vec<(Life, u64)>,
    strangers: u64,
    running: Vec<Running>,
    waiting: VecDeque<(DevicePass, Micros)>,
    is_sick: bool,
    hangs_next: bool,
    /// When a pass that never ends was last on the device.
    hung_at: Option<Micros>,
    tickets: u64,
}

/// A pass that was let onto the device: when it ends, if it does.
#[derive(Clone, Copy, Debug)]
pub struct Started {
    pub ticket: u64,
    pub ends_at: Option<Micros>,
}

impl Device {
    pub fn new(total: u64) -> Self {
        Self {
            total,
            residents: Vec::new(),
            strangers: 0,
            running: Vec::new(),
            waiting: VecDeque::new(),
            is_sick: false,
            hangs_next: false,
            hung_at: None,
            tickets: 0,
        }
    }

    pub fn settle_in(&mut self, life: Life, bytes: u64) {
        self.residents.push((life, bytes));
    }

    /// Adds bytes that a process holds for ever.
    pub fn leak(&mut self, life: Life, bytes: u64) {
        let own = self.residents.iter_mut().find(|(of, _)| *of == life);
        own.into_iter().for_each(|(_, held)| *held += bytes);
    }

    pub fn set_strangers(&mut self, bytes: u64) {
        self.strangers = bytes;
    }

    pub fn set_sick(&mut self, sick: bool) {
        self.is_sick = sick;
    }

    pub fn hang_next(&mut self) {
        self.hangs_next = true;
    }

    fn used(&self) -> u64 {
        let residents: u64 = self.residents.iter().map(|(_, bytes)| bytes).sum();
        let passes: u64 = self.running.iter().map(|running| running.pass.bytes).sum();
        residents + passes + self.strangers
    }

    fn own(&self, life: Life) -> u64 {
        let residents: u64 =
            self.residents.iter().filter(|(of, _)| *of == life).map(|(_, bytes)| bytes).sum();
        residents + self.active_bytes(life)
    }

    /// Bytes of a process's passes that run.
    pub fn active_bytes(&self, life: Life) -> u64 {
        let own = self.running.iter().filter(|running| running.pass.life == life);
        own.map(|running| running.pass.bytes).sum()
    }

    pub fn memory(&self, life: Life) -> Memory {
        let used = self.used().min(self.total);
        Memory { free: self.total - used, total: self.total, foreign: used.saturating_sub(self.own(life)) }
    }

    /// The oldest pass of a process, as its reading tells it.
    pub fn on_device(&self, life: Life, base: std::time::Instant) -> Option<OnDevice> {
        let at = |micros| base + std::time::Duration::from_micros(micros);
        let running = self.running.iter().find(|running| running.pass.life == life);
        let running = running.map(|r| OnDevice { pass: r.pass.pass, since: at(r.since), waits: false });
        running.or_else(|| {
            let (pass, since) = self.waiting.iter().find(|(pass, _)| pass.life == life)?;
            Some(OnDevice { pass: pass.pass, since: at(*since), waits: true })
        })
    }

    /// When a pass that never ends was last on it.
    pub fn hung_at(&self, now: Micros) -> Option<Micros> {
        if self.is_hanging() { Some(now) } else { self.hung_at }
    }

    /// A pass is on it that never ends.
    pub fn is_hanging(&self) -> bool {
        self.running.iter().any(|running| running.fate.is_none())
    }

    /// The pass of this process that never ends, if there is one.
    pub fn hanging_pass(&self, life: Life) -> Option<PassId> {
        let mut own =
            self.running.iter().filter(|running| running.pass.life == life && running.fate.is_none());
        own.next().map(|running| running.pass.pass)
    }

    /// A pass arrives at the device lock. Returns all passes that start.
    pub fn enter(&mut self, pass: DevicePass, now: Micros) -> Vec<Started> {
        self.waiting.push_back((pass, now));
        self.admit(now)
    }

    /// Starts the passes whose turn it is. An exclusive pass has the device to itself.
    fn admit(&mut self, now: Micros) -> Vec<Started> {
        let mut started = Vec::new();
        while let Some((next, _)) = self.waiting.front() {
            let is_held = self.running.iter().any(|running| running.pass.exclusive);
            if is_held || (next.exclusive && !self.running.is_empty()) {
                break;
            }
            if let Some((pass, _)) = self.waiting.pop_front() {
                started.push(self.start(pass, now));
            }
        }
        started
    }

    fn start(&mut self, mut pass: DevicePass, now: Micros) -> Started {
        self.tickets += 1;
        let memory = self.memory(pass.life);
        let half = pass.takes / 2;
        let (fate, takes) = if pass.bytes > memory.free {
            let Memory { free, total, foreign } = memory;
            let oom = OutOfMemory { asked: pass.bytes, free, total, foreign };
            pass.bytes = 0;
            (Some(PassFate::Failed(PassError::from(oom))), MILLI)
        } else if std::mem::take(&mut self.hangs_next) || pass.fate == Fate::Hangs {
            match pass.program_limit {
                None => (None, 0),
                Some(limit) => {
                    (Some(PassFate::Failed(PassError::TimedOut("took too long".to_owned()))), limit)
                }
            }
        } else if self.is_sick || pass.fate == Fate::Fails {
            (Some(PassFate::Failed(PassError::Failed("the engine cannot run this".to_owned()))), half)
        } else if pass.fate == Fate::IsInvalid {
            let text = "no picture".to_owned();
            (Some(PassFate::Failed(PassError::InvalidInput { item: None, text })), half)
        } else if pass.fate == Fate::KillsDevice {
            (Some(PassFate::Failed(PassError::DeviceLost("illegal address".to_owned()))), half)
        } else if pass.fate == Fate::KillsProcess {
            let fate = pass.program_limit.map_or(PassFate::ProcessDies, |_| program_dies());
            (Some(fate), half)
        } else {
            (Some(PassFate::Done), pass.takes)
        };
        let ends_at = fate.is_some().then_some(now + takes);
        self.running.push(Running { ticket: self.tickets, pass, since: now, fate });
        Started { ticket: self.tickets, ends_at }
    }

    /// Ends a pass. Returns the pass, how it ended, how long it took, and all passes that start in its place.
    pub fn end(&mut self, ticket: u64, now: Micros) -> Option<(DevicePass, PassFate, Micros, Vec<Started>)> {
        let at = self.running.iter().position(|running| running.ticket == ticket)?;
        let Running { pass, since, fate, .. } = self.running.remove(at);
        let started = self.admit(now);
        Some((pass, fate?, now - since, started))
    }

    /// Kills the program that runs a worker's oldest program pass. Returns the pass's ticket: it ends now.
    pub fn kill_program(&mut self, life: Life) -> Option<u64> {
        let mut running = self.running.iter_mut();
        let running =
            running.find(|running| running.pass.life == life && running.pass.program_limit.is_some())?;
        running.fate = Some(program_dies());
        Some(running.ticket)
    }

    /// Makes a program stop its pass. Returns the pass's ticket: it ends when the caller says so, or before.
    pub fn cancel(&mut self, life: Life, pass: PassId) -> Option<u64> {
        let mut running = self.running.iter_mut();
        let running = running.find(|running| running.pass.life == life && running.pass.pass == pass)?;
        running.fate = Some(PassFate::Cancelled);
        Some(running.ticket)
    }

    /// A process is gone and its memory is free. Returns all passes that start in its place.
    pub fn leave(&mut self, life: Life, now: Micros) -> Vec<Started> {
        self.hung_at = self.hung_at(now);
        self.residents.retain(|(of, _)| *of != life);
        self.running.retain(|running| running.pass.life != life);
        self.waiting.retain(|(pass, _)| pass.life != life);
        self.admit(now)
    }

    /// Whether an exclusive pass shares the device.
    pub fn crowded(&self) -> bool {
        self.running.len() > 1 && self.running.iter().any(|running| running.pass.exclusive)
    }
}

fn program_dies() -> PassFate {
    PassFate::Failed(PassError::Crashed("the process was killed by SIGKILL".to_owned()))
}
