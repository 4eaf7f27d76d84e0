//! Time passes: the checks of every second (the device, its memory, the time that jobs have been held, parts that are due, the queues), and
//! timers that are due.

use std::time::Duration;

use crate::Core;
use crate::action::{Action, SessionEnd};
use crate::credit::TIME_AHEAD;
use crate::device::Memory;
use crate::event::Reading;
use crate::ids::ModelIndex;
use crate::timers::Timer;
use crate::units::{FreeMib, Mib};

impl Core {
    pub(crate) fn tick(&mut self, reading: &Reading) {
        self.watch_device(reading);
        self.count_stalled();
        self.read_overdue_successors();
        self.watch_memory(reading);
        self.watch_time(reading);
        self.end_overdue_fetches();
        self.publish_due_parts();
        self.health.tick(self.now.at);
        self.watch_isolation();
        self.count_queues();
    }

    pub(crate) fn timers_due(&mut self) {
        while let Some(timer) = self.timers.take_due(self.now.at) {
            match timer {
                Timer::PublishAgain(job) => self.publish_again(job),
                Timer::GiveBack(job) => self.give_back(job),
                Timer::LookForQueue(model, queue) => self.look_for_queue(model, queue),
                Timer::HalfTime if self.lifecycle.has_deadline() => self.half_time(),
                Timer::DrainDeadline if self.lifecycle.has_deadline() => {
                    tracing::error!(
                        jobs = self.unacked(),
                        "drain deadline passed: stopping; the broker delivers the unacknowledged jobs again"
                    );
                    self.end_session(SessionEnd::Killed);
                }
                Timer::HalfTime | Timer::DrainDeadline => {}
            }
        }
    }

    /// A program's process has ended, but its memory stays missing; or it does not end. This process cannot get the memory back, so the worker
    /// drains and restarts.
    pub(crate) fn memory_withheld(
        &mut self,
        model: ModelIndex,
        bytes: u64,
        lasted: Duration,
        has_ended: bool,
    ) {
        if self.lifecycle.is_draining() || self.lifecycle.restarts() {
            return;
        }
        let (model, missing, seconds) = (&self.models[model.0].name, Mib(bytes), lasted.as_secs());
        if has_ended {
            tracing::error!(
                model,
                %missing,
                seconds,
                "device memory of an ended process is still not free after withheld_s: draining for a restart"
            );
        } else {
            tracing::error!(
                model,
                held = %missing,
                seconds,
                "a process does not end after withheld_s although it was killed, and may hold device memory: draining for a restart"
            );
        }
        self.lifecycle.restart();
        self.drain();
    }

    /// A program was exchanged on the disk. A worker serves one revision of a model, so that replies never have outputs of another one.
    pub(crate) fn other_revision(&mut self, model: ModelIndex, revision: &str) {
        if self.lifecycle.is_draining() || self.lifecycle.restarts() {
            return;
        }
        let model = &self.models[model.0].name;
        tracing::warn!(
            model,
            revision,
            "the model has another revision than the one that this worker serves, because its program, its files, or the revision that it names has changed: draining for a restart"
        );
        self.lifecycle.restart();
        self.drain();
    }

    /// Jobs that wait for a store, or whose messages the broker does not take, for example because reply queues are full, do not keep the
    /// device busy. The worker may hold other jobs in their place, up to twice its credit. It does not while the broker blocks all
    /// publishers, because the replies of those jobs would wait too.
    fn count_stalled(&mut self) {
        let mut stalled = vec![0; self.models.len()];
        if !self.session.is_blocked() {
            self.jobs.stalled_for(TIME_AHEAD, self.now.at).for_each(|model| stalled[model.0] += 1);
        }
        self.credit.iter_mut().zip(stalled).for_each(|(credit, jobs)| credit.set_stalled(jobs));
    }

    /// Follows the device's memory: the budget at once, slots with hysteresis. A device that stays nearly full causes a restart.
    fn watch_memory(&mut self, reading: &Reading) {
        let free = reading.passes.free_after(reading.memory);
        let reserve = self.settings.reserve;
        self.scheduler.set_budget(free.saturating_sub(reserve));
        let wanted = |at: usize| {
            let is_busy = self.consumers[at].unacked() > 0;
            let wanted = self.credit[at].wanted(self.models[at].pass_cost_max);
            is_busy.then(|| wanted.jobs.saturating_add(wanted.beside))
        };
        let wanted: Vec<_> = (0..self.models.len()).map(wanted).collect();
        self.memory.follow(free, reserve, &self.models, &wanted, self.now.at);
        if self.memory.is_under_pressure(reading, self.now.at) && !self.lifecycle.is_draining() {
            let Memory { free, total, foreign } = reading.memory;
            let (free, total, foreign, own) =
                (FreeMib(free), FreeMib(total), Mib(foreign), Mib(reading.memory.own()));
            tracing::error!(%own, %foreign, %free, %total, "the device stays nearly full: draining for a restart");
            self.lifecycle.restart();
            self.drain();
        }
        if self.memory.tick(self.scheduler.passes()) {
            self.act(Action::TrimDevice);
        }
        self.adjust_consumers();
    }
}
