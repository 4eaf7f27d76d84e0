//! Starts and ends the faults of the plan.

use vramq_core::device::Loss;
use vramq_schemas::control::Command;

use super::agenda::{Happening, Micros, SECOND};
use super::env::{Env, Owner};
use super::fault::Targets;
use super::plan::{Fault, FaultKind};
use super::shell::id_of;
use super::world::World;

impl World {
    pub(super) fn fault(&mut self, number: usize, ends: bool) {
        let Some(Fault { kind, lasts, .. }) = self.env.plan.faults.get(number).copied() else { return };
        let kind = kind.hits(self.targets());
        let text = if ends { "is over" } else { "begins" };
        self.env.trace.line(self.env.now, "fault", || format!("{kind:?} {text}"));
        // A flood does not count as a fault: jobs of others must not wait longer because of it.
        if !matches!(kind, FaultKind::Flood { .. }) {
            self.env.disturbed();
        }
        if ends {
            self.env.faults_now -= 1;
            return self.fault_ends(kind);
        }
        self.env.faults_now += 1;
        self.fault_begins(kind, lasts);
        self.env.agenda.at(self.env.now + lasts, Happening::Fault { number, ends: true });
    }

    fn targets(&self) -> Targets {
        let plan = &self.env.plan;
        Targets {
            workers: plan.workers.len(),
            devices: plan.devices.len(),
            models: plan.models.len(),
            further_queues: plan.sharing.further().len(),
            callers: plan.callers.len(),
        }
    }

    fn fault_begins(&mut self, kind: FaultKind, lasts: Micros) {
        let env = &mut self.env;
        match kind {
            FaultKind::BrokerRestart => self.restart_broker(),
            FaultKind::Alarm => {
                let _nobody_is_blocked_yet = env.broker.set_alarm(true);
            }
            FaultKind::SlowConfirms => env.confirms_are_slow = true,
            FaultKind::Leaderless { model } => {
                let queue = env.names.models[model].jobs.clone();
                env.broker.set_leaderless(&queue, true);
            }
            FaultKind::DeafCaller { caller } => self.callers.set_deaf(env, caller, true),
            FaultKind::RepliesDeleted { caller } => self.callers.delete_replies(env, caller, true),
            FaultKind::DeadDeleted { model } => {
                let queue = env.names.models[model].dead.clone();
                env.delete_if_empty(&queue);
            }
            FaultKind::Stranger { device, percent } => {
                let bytes = env.plan.devices[device].total * u64::from(percent) / 100;
                env.devices[device].set_strangers(bytes);
            }
            FaultKind::Sick { device } => env.devices[device].set_sick(true),
            // If the broker's limit is shorter than the worker's, such a job is redelivered until someone raises the limit.
            FaultKind::Hang { device } if !env.plan.has_short_timeout() => env.devices[device].hang_next(),
            FaultKind::Hang { .. } => {}
            FaultKind::FurtherDeleted { queue, is_forbidden } => {
                if let Some((model, queue)) = further(env, queue) {
                    env.delete_further(model, queue, is_forbidden);
                }
            }
            FaultKind::SilentReplies { caller } => {
                let queue = env.names.replies[env.plan.callers[caller].number].clone();
                env.broker.set_leaderless(&queue, true);
            }
            FaultKind::LargerStands => self.callers.listen_larger(env, false),
            FaultKind::DiskFull { worker, room } => env.disks.fill(worker, room),
            FaultKind::Flood { caller, jobs } => self.callers.flood(env, caller, jobs),
            other => self.worker_fault(other, lasts),
        }
    }

    fn worker_fault(&mut self, kind: FaultKind, lasts: Micros) {
        let (FaultKind::Kill { worker, .. }
        | FaultKind::HostLost { worker }
        | FaultKind::Cut { worker }
        | FaultKind::DeviceLost { worker, .. }
        | FaultKind::ProgramDies { worker }
        | FaultKind::CannotLoad { worker }
        | FaultKind::Pause { worker }
        | FaultKind::Drain { worker }
        | FaultKind::Stop { worker, .. }
        | FaultKind::MemoryWithheld { worker }
        | FaultKind::Cancel { worker }) = kind
        else {
            return;
        };
        let Some(shell) = &mut self.workers[worker] else { return };
        let env = &mut self.env;
        match kind {
            FaultKind::Kill { after_actions, .. } => shell.die_after(after_actions),
            FaultKind::HostLost { .. } => {
                self.noticed_late = Some(env.now + lasts);
                shell.die();
            }
            FaultKind::Cut { .. } => {
                for connection in shell.connections() {
                    env.forget(connection);
                    env.agenda.at(env.now + lasts, Happening::ConnectionNoticed(connection));
                }
                shell.session_cut(env);
            }
            FaultKind::DeviceLost { is_late, .. } => {
                shell.lose_device(Loss { error: "fell off the bus".to_owned(), is_late });
            }
            FaultKind::ProgramDies { .. } => {
                let (device, life) = (shell.device(), shell.life());
                if let Some(ticket) = env.devices[device].kill_program(life) {
                    env.agenda.at(env.now, Happening::PassEnds { device, ticket });
                }
            }
            FaultKind::MemoryWithheld { .. } => shell.memory_withheld(env, lasts),
            FaultKind::CannotLoad { .. } => shell.set_loadable(env, false),
            FaultKind::Pause { .. } => shell.command(env, Command::Pause),
            FaultKind::Drain { .. } => shell.command(env, Command::Drain),
            FaultKind::Stop { twice, .. } => {
                shell.stop(env);
                if twice {
                    shell.stop(env);
                }
            }
            FaultKind::Cancel { .. } => {
                let choice = env.random.below(64);
                if let Some(job) = shell.any_job(choice) {
                    env.ledger.excuses_mut(job).cancelled = true;
                    shell.command(env, Command::Cancel { job: id_of(job.0) });
                }
            }
            _ => {}
        }
        self.after(worker);
    }

    fn fault_ends(&mut self, kind: FaultKind) {
        let env = &mut self.env;
        match kind {
            FaultKind::BrokerRestart => {
                env.broker_is_down = false;
                env.declare_topology();
                self.callers.connect(env);
                env.wake_broker(env.now);
            }
            FaultKind::Alarm => {
                for emitted in env.broker.set_alarm(false) {
                    env.agenda.at(env.now + 1, Happening::Frame(Box::new(emitted)));
                }
                env.wake_broker(env.now);
            }
            FaultKind::SlowConfirms => {
                env.confirms_are_slow = false;
                env.wake_broker(env.now);
            }
            FaultKind::Leaderless { model } => {
                let queue = env.names.models[model].jobs.clone();
                env.broker.set_leaderless(&queue, false);
                env.wake_broker(env.now);
            }
            FaultKind::DeafCaller { caller } => self.callers.set_deaf(env, caller, false),
            FaultKind::RepliesDeleted { caller } => self.callers.delete_replies(env, caller, false),
            FaultKind::DeadDeleted { model } => {
                env.declare_topology();
                env.ledger.forgive(model);
                self.callers.read_dead(env, model);
            }
            FaultKind::Stranger { device, .. } => env.devices[device].set_strangers(0),
            FaultKind::Sick { device } => env.devices[device].set_sick(false),
            FaultKind::SilentReplies { caller } => {
                let queue = env.names.replies[env.plan.callers[caller].number].clone();
                env.broker.set_leaderless(&queue, false);
                env.wake_broker(env.now);
            }
            FaultKind::LargerStands => self.callers.listen_larger(env, true),
            FaultKind::DiskFull { worker, .. } => env.disks.clear(worker),
            FaultKind::FurtherDeleted { queue, .. } => {
                if let Some((model, queue)) = further(env, queue) {
                    env.restore_further(model, queue);
                }
            }
            other => self.worker_fault_ends(other),
        }
    }

    fn worker_fault_ends(&mut self, kind: FaultKind) {
        let (FaultKind::Pause { worker } | FaultKind::CannotLoad { worker }) = kind else { return };
        let env = &mut self.env;
        if let Some(shell) = &mut self.workers[worker] {
            match kind {
                FaultKind::CannotLoad { .. } => shell.set_loadable(env, true),
                _ => shell.command(env, Command::Resume),
            }
        }
        self.after(worker);
    }

    fn restart_broker(&mut self) {
        self.env.broker_is_down = true;
        for owner in self.env.restart_broker() {
            if let Owner::Worker(life) = owner
                && let Some(shell) = self.workers[life.worker].as_mut().filter(|shell| shell.life() == life)
            {
                shell.session_cut(&mut self.env);
                self.after(life.worker);
            }
        }
        self.env.agenda.at(self.env.now + 5 * SECOND, Happening::Broker);
    }
}

/// The model and index of a further queue.
fn further(env: &Env, which: usize) -> Option<(usize, usize)> {
    env.plan.sharing.further().get(which).copied()
}
