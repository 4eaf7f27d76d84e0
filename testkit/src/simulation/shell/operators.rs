//! Checks operators' commands and their answers: each command gets one last answer in time, and the worker does what that answer says.

use std::collections::BTreeMap;

use vramq_core::action::Answer;
use vramq_core::event::Event;
use vramq_core::ids::{ModelIndex, RequestId};
use vramq_core::observation::{End, Settled};
use vramq_schemas::Reason;
use vramq_schemas::control::Command;

use super::Shell;
use super::frames::id_of;
use crate::simulation::agenda::{MINUTE, Micros};
use crate::simulation::env::Env;
use crate::simulation::plan::MIB;

/// The longest filter for logs that a worker takes.
const FILTER_BYTES_MAX: usize = 1024;

/// How long a command may wait for its condition, such as a broker's confirm or a job's last pass.
const ANSWERED_WITHIN: Micros = 10 * MINUTE;

/// A command without its last answer.
#[derive(Debug)]
struct Request {
    command: Command,
    at: Micros,
    /// The worker has answered that it is stopping the job.
    is_requested: bool,
    /// A job of that id has ended as cancelled.
    is_cancelled: bool,
    /// How the last job with that id ended.
    end: Option<End>,
}

/// What operators have asked of a process.
#[derive(Debug, Default)]
pub(super) struct Operators {
    open: BTreeMap<RequestId, Request>,
    last: u64,
    pub(super) is_paused: bool,
}

impl Operators {
    /// The session is over, and its requests with it.
    pub(super) fn session_ended(&mut self) {
        self.open.clear();
    }

    /// A job has ended. Requests about it must report this end.
    pub(super) fn settled(&mut self, id: &str, settled: &Settled) {
        let as_asked =
            matches!(settled.end, End::DeadLettered(Reason::Cancelled) | End::Rejected(Reason::Cancelled));
        let is_about =
            |request: &&mut Request| matches!(&request.command, Command::Cancel { job } if job == id);
        for request in self.open.values_mut().filter(is_about) {
            request.is_cancelled |= as_asked;
            request.end = Some(settled.end);
        }
    }
}

impl Shell {
    /// An operator's command.
    pub fn command(&mut self, env: &mut Env, command: Command) {
        if self.session.is_none() || self.exit.is_some() {
            return;
        }
        self.operators.last += 1;
        let request = RequestId(self.operators.last);
        match command {
            Command::Pause if !self.core.is_draining() => self.operators.is_paused = true,
            Command::Resume if !self.core.is_draining() => self.operators.is_paused = false,
            _ => {}
        }
        let asked = Request {
            command: command.clone(),
            at: env.now,
            is_requested: false,
            is_cancelled: false,
            end: None,
        };
        self.operators.open.insert(request, asked);
        self.handle(env, Event::Command { request, command });
        // Only these commands may wait.
        let may_wait = |asked: &Request| match asked.command {
            Command::Pause => true,
            Command::Cancel { .. } => asked.is_requested,
            _ => false,
        };
        let waits_in_vain = self.operators.open.get(&request).is_some_and(|asked| !may_wait(asked));
        if self.exit.is_none() && self.session.is_some() && waits_in_vain {
            let command = &self.operators.open[&request].command;
            let (who, text) = (self.life.worker, format!("{command:?}"));
            env.ledger.fail("an operator's command is answered", || format!("worker-{who}: {text}"));
        }
    }

    /// Memory of an ended program stays missing, so the worker must drain and restart. Like `worker/src`, the shell reports this only
    /// during a session.
    pub fn memory_withheld(&mut self, env: &mut Env, lasted: Micros) {
        if self.session.is_none() {
            return;
        }
        let lasted = std::time::Duration::from_micros(lasted);
        self.handle(env, Event::MemoryWithheld { model: ModelIndex(0), bytes: MIB, lasted, has_ended: true });
        if self.exit.is_none() && !self.core.is_draining() {
            let who = self.life.worker;
            env.ledger.fail("memory that stays missing ends in a restart", || format!("worker-{who}"));
        }
    }

    /// A command that has no effect: it changes nothing, or its result is already reached.
    pub fn idle_command(&mut self, env: &mut Env) {
        let command = match env.operating.below(8) {
            0 => Command::Set { log: "info".to_owned() },
            1 => Command::Set { log: "x".repeat(FILTER_BYTES_MAX + env.operating.below(2)) },
            2 | 3 => Command::Cancel { job: id_of(usize::MAX) },
            4 | 5 if self.core.is_draining() => Command::Drain,
            4 if self.operators.is_paused => Command::Pause,
            6 if self.core.is_draining() => Command::Pause,
            5..=7 if !self.operators.is_paused => Command::Resume,
            _ => return,
        };
        self.command(env, command);
    }

    /// The worker changes what it logs.
    pub(super) fn log_set(&mut self, env: &mut Env, request: RequestId, directives: &str) {
        let asked = self.operators.open.remove(&request);
        let is_meant =
            asked.is_some_and(|asked| matches!(asked.command, Command::Set { log } if log == directives));
        if !is_meant || directives.len() > FILTER_BYTES_MAX {
            let who = self.life.worker;
            env.ledger.fail("a command changes what it names", || format!("worker-{who}: {directives}"));
        }
    }

    /// The worker answers a command.
    pub(super) fn answered(
        &mut self,
        env: &mut Env,
        request: RequestId,
        answer: Answer,
        text: &str,
        last: bool,
    ) {
        let who = self.life.worker;
        let Some(asked) = self.operators.open.get_mut(&request) else {
            return env.ledger.fail("an operator's command is answered", || {
                format!("worker-{who}: {answer:?} to nobody, or twice: {text}")
            });
        };
        let is_requested = asked.is_requested;
        asked.is_requested |= answer == Answer::Requested;
        let (command, is_cancelled, end) = (asked.command.clone(), asked.is_cancelled, asked.end);
        let is_true = match (&command, answer) {
            (Command::Pause, Answer::Done) => self.operators.is_paused && self.takes_nothing() && last,
            (Command::Pause, Answer::Refused) => {
                (self.core.is_draining() || !self.operators.is_paused) && last
            }
            (Command::Resume, Answer::Done) => !self.operators.is_paused && last,
            (Command::Resume, Answer::Refused) => self.core.is_draining() && last,
            (Command::Drain, Answer::Done) => self.core.is_draining() && last,
            (Command::Set { log }, Answer::Refused) => log.len() > FILTER_BYTES_MAX && last,
            (Command::Cancel { job }, Answer::Requested) => self.holds(job) && !is_requested && !last,
            (Command::Cancel { job }, Answer::NotHere) => !self.is_unsettled(job) && last,
            (Command::Cancel { job }, Answer::Stopped) => {
                is_requested && !self.is_in_a_pass(env, job) && !last
            }
            (Command::Cancel { job }, Answer::MemoryBack) => is_cancelled && !self.is_unsettled(job) && last,
            (Command::Cancel { job }, Answer::TooLate) => {
                !is_cancelled && !self.is_unsettled(job) && last && end.is_some_and(|end| is_told(end, text))
            }
            _ => false,
        };
        let held = self.jobs.len();
        let is_right = number_before(text, " unacknowledged").is_none_or(|number| number == held);
        if !is_true || !is_right {
            env.ledger.fail("an answer to a command is true", || {
                format!("worker-{who} with {held} jobs: {command:?} is answered {answer:?}: {text}")
            });
        }
        if let (Command::Cancel { job }, Answer::Requested) = (&command, answer) {
            let of_id = self.jobs.values_mut().filter(|stored| id_of(stored.job.0) == *job);
            of_id.for_each(|stored| stored.is_cancelled = true);
        }
        if last {
            self.operators.open.remove(&request);
        }
    }

    /// Whether there is no consumer and nothing is being taken from the quarantine.
    pub(super) fn takes_nothing(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.leases.is_empty() && session.taking.is_none())
    }

    /// Whether a job with this id is held that the broker does not fully have.
    fn is_unsettled(&self, id: &str) -> bool {
        self.jobs.values().any(|stored| id_of(stored.job.0) == id && stored.end.is_none())
    }

    /// Whether a job with this id is in a pass that its worker still waits for.
    fn is_in_a_pass(&self, env: &Env, id: &str) -> bool {
        let is_given_up = self.lost.is_some() || env.devices[self.device].hung_at(env.now).is_some();
        let mut keys = self.jobs.iter().filter(|(_, stored)| id_of(stored.job.0) == id).map(|(key, _)| *key);
        !is_given_up && keys.any(|key| self.passes_with(key).next().is_some())
    }

    /// Every second: no command waits for too long.
    pub(super) fn check_requests(&self, env: &mut Env) {
        let late = self.operators.open.values().find(|asked| env.now > asked.at + ANSWERED_WITHIN);
        if let Some(asked) = late {
            let (who, command) = (self.life.worker, format!("{:?}", asked.command));
            env.ledger.fail("an operator's command is answered", || format!("worker-{who}: {command}"));
        }
    }
}

/// Whether a text reports this end of a job.
fn is_told(end: End, text: &str) -> bool {
    match end {
        End::Replied | End::AlreadySettled => text.contains("answered"),
        End::Requeued(_) => text.contains("requeued"),
        End::DeadLettered(reason) | End::Rejected(reason) => text.contains(reason.as_str()),
        End::Withdrawn => text.contains("withdrew"),
        End::GivenBack => text.contains("given back"),
    }
}

/// The number directly before these words in a text.
fn number_before(text: &str, words: &str) -> Option<usize> {
    let (before, _) = text.split_once(words)?;
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
