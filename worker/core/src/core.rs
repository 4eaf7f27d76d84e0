//! The state of a worker. An event comes in, its handler (`handlers/`) adds actions, and these go out. Each sub-state owns its own fields.

use std::time::{Duration, Instant};

use vramq_schemas::status::WorkerState;

use crate::action::{Action, SessionEnd};
use crate::admission::Budget;
use crate::consumers::ModelConsumers;
use crate::credit::Credit;
use crate::destinations::Destinations;
use crate::device::Memory;
use crate::event::{Event, Now, SessionFacts};
use crate::health_watch::HealthWatch;
use crate::ids::ModelIndex;
use crate::jobs::JobTable;
use crate::large_turns::RepublishAllowance;
use crate::learned_limits::LearnedLimits;
use crate::lifecycle::Lifecycle;
use crate::memory_watch::MemoryWatch;
use crate::observation::Observation;
use crate::quarantine::Quarantine;
use crate::random::Random;
use crate::redelivery::Redelivery;
use crate::scheduling::Scheduler;
use crate::session::SessionState;
use crate::settings::{ModelFacts, Settings};
use crate::silent_stores::SilentStores;
use crate::sizes::Size;
use crate::standstill::Standstills;
use crate::status::{MemoryStatus, ModelStatus, Status};
use crate::successors::Successors;
use crate::time_limits::TimeLimits;
use crate::timers::{Timer, Timers};
use crate::withdrawals::Withdrawals;

/// A worker's decisions. It lives as long as the process and through all its sessions with the broker.
#[derive(Debug)]
pub struct Core {
    pub(crate) settings: Settings,
    pub(crate) models: Vec<ModelFacts>,
    pub(crate) now: Now,
    pub(crate) random: Random,
    pub(crate) timers: Timers,
    pub(crate) standstills: Standstills,
    pub(crate) time_limits: TimeLimits,
    pub(crate) session: SessionState,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) jobs: JobTable,
    pub(crate) consumers: Vec<ModelConsumers>,
    pub(crate) credit: Vec<Credit>,
    pub(crate) scheduler: Scheduler,
    pub(crate) memory: MemoryWatch,
    pub(crate) health: HealthWatch,
    pub(crate) quarantine: Quarantine,
    pub(crate) redelivery: Redelivery,
    pub(crate) destinations: Destinations,
    pub(crate) silent_stores: SilentStores,
    pub(crate) republish_allowance: RepublishAllowance,
    pub(crate) withdrawals: Withdrawals,
    pub(crate) successors: Successors,
    actions: Vec<Action>,
}

impl Core {
    /// A worker that has loaded its models and has no session yet. `budget`: the device's bytes for passes.
    pub fn new(settings: Settings, models: Vec<ModelFacts>, limits: LearnedLimits, budget: Budget) -> Self {
        // A placeholder until the first event brings the time: nothing is compared with it.
        let now = Now { at: settings.started_at, unix_ms: 0 };
        Self {
            now,
            random: Random::new(settings.seed),
            timers: Timers::default(),
            standstills: Standstills::default(),
            time_limits: TimeLimits::new(settings.job_limit),
            session: SessionState::default(),
            lifecycle: Lifecycle::default(),
            jobs: JobTable::default(),
            consumers: consumers_of(&models),
            credit: vec![Credit::default(); models.len()],
            scheduler: Scheduler::new(&models, &settings.executors, budget),
            memory: MemoryWatch::new(&settings, &models, limits),
            health: HealthWatch::default(),
            quarantine: Quarantine::new(false, now.at),
            redelivery: Redelivery::new(settings.poison),
            destinations: Destinations::new(settings.confirm_max),
            silent_stores: SilentStores::default(),
            republish_allowance: RepublishAllowance::default(),
            withdrawals: Withdrawals::default(),
            successors: Successors::default(),
            actions: Vec::new(),
            models,
            settings,
        }
    }

    /// Applies an event. The shell starts the returned actions in their order before it applies the next event, and does not wait for their
    /// answers.
    pub fn apply(&mut self, event: Event, now: Now) -> Vec<Action> {
        self.now = now;
        self.note_standstill();
        self.handle(event);
        if self.session.is_active() {
            self.answer_pauses();
            if self.lifecycle.has_deadline() && self.unacked() == 0 && self.has_stopped_consuming() {
                self.end_session(SessionEnd::Drained);
            }
        }
        std::mem::take(&mut self.actions)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::SessionOpened(facts) => self.session_opened(facts),
            Event::SessionFailed(error) => self.end_session(SessionEnd::Lost(error)),
            Event::SessionClosed => self.session_closed(),
            Event::Delivered(delivery) => self.delivered(*delivery),
            Event::ConsumerEnded { consumer } => self.consumer_ended(consumer),
            Event::QueueLost { model, queue, error } => self.queue_lost(model, queue, error),
            Event::QueueLookedFor { model, queue, result } => self.queue_looked_for(model, queue, result),
            Event::QueuesCounted { model, counts } => self.queues_counted(model, counts),
            Event::QuarantineEmpty => self.quarantine_empty(),
            Event::Decoded { job, result } => self.decoded(job, result),
            Event::Moved { job, key } => self.moved(job, key),
            Event::Referring { job, stores } => self.referring(job, stores),
            Event::Fetched { job, result } => self.fetched(job, result),
            Event::Prepared { job, result } => self.prepared(job, result),
            Event::PassEnded(end) => self.pass_ended(end),
            Event::RepliesTaken { job, up_to } => self.replies_taken(job, up_to),
            Event::Published { job, outcome } => self.published(job, outcome),
            Event::AcksSent { channel, sent } => self.acks_sent(channel, &sent),
            Event::NackSent { job, sent } => self.nack_sent(job, sent),
            Event::BrokerBlocked { reason } => {
                self.session.set_blocked(true);
                tracing::warn!(reason, "the broker blocks publishers: replies wait");
            }
            Event::BrokerUnblocked => {
                self.session.set_blocked(false);
                tracing::info!("the broker accepts publishes again");
            }
            Event::ConsumerTimeoutLearned { timeout } => self.learn_consumer_timeout(timeout),
            Event::Command { request, command } => self.command(request, command),
            Event::Withdrawn(withdrawn) => self.withdrawn(withdrawn),
            Event::StopRequested { signal } => self.stop_requested(signal),
            Event::ModelAvailable { model } => self.model_available(model),
            Event::MemoryWithheld { model, bytes, lasted, has_ended } => {
                self.memory_withheld(model, bytes, lasted, has_ended);
            }
            Event::MemoryRead { memory, passes } => self.memory_read(memory, passes),
            Event::OtherRevision { model, revision } => self.other_revision(model, &revision),
            Event::Tick(reading) => self.tick(&reading),
            Event::Timer => {
                self.scheduler.round_is_due(self.now.at);
                self.timers_due();
            }
            Event::Idle => self.idle(),
        }
    }

    fn note_standstill(&mut self) {
        if !self.session.is_open() {
            return self.standstills.no_session();
        }
        if let Some(lasted) = self.standstills.event_came(self.now.at) {
            let seconds = lasted.as_secs();
            tracing::info!(
                seconds,
                "the process stood still: it was stopped, its machine was paused, or the event loop was blocked"
            );
        }
    }

    /// When the shell must send `Event::Timer` next, if at all.
    pub fn next_timer(&self) -> Option<Instant> {
        self.timers.next().into_iter().chain(self.scheduler.next_round()).min()
    }

    /// What the worker does now. Costs a few dozen loads: made to be called whenever no other event waits.
    pub fn status(&self) -> Status {
        let (state, reason) = self.state();
        let model = |at: usize| ModelStatus {
            slots: self.memory.slots(at),
            unacked: self.consumers[at].unacked(),
            waiting: self.scheduler.waiting(ModelIndex(at)),
            is_consuming: self.consumers[at].is_consuming(),
        };
        Status {
            state,
            reason,
            models: (0..self.models.len()).map(model).collect(),
            is_blocked: self.session.is_blocked(),
            is_sick: self.health.is_sick(),
        }
    }

    fn state(&self) -> (WorkerState, Option<&'static str>) {
        if self.lifecycle.restarts() {
            (WorkerState::Draining, Some("draining for a restart"))
        } else if self.lifecycle.is_draining() {
            (WorkerState::Draining, Some("asked to stop"))
        } else if self.health.is_sick() {
            (WorkerState::Sick, Some("the health probe fails on the device"))
        } else if self.session.is_blocked() {
            (WorkerState::Blocked, Some("the broker blocks publishers: a memory or disk alarm"))
        } else if self.lifecycle.is_paused() {
            (WorkerState::Paused, Some("an operator paused the worker"))
        } else if self.quarantine.is_isolating() {
            (WorkerState::Isolating, Some("quarantined jobs run alone"))
        } else if self.memory.has_no_slots() {
            (WorkerState::NoRoom, Some("not even one item fits the device"))
        } else {
            (WorkerState::Consuming, None)
        }
    }

    pub fn memory_status(&self, at: Instant) -> MemoryStatus {
        self.memory.status(self.settings.resident, at)
    }

    /// What is known of passes that fit and passes that do not.
    pub fn learned_limits(&self) -> &LearnedLimits {
        self.memory.limits()
    }

    /// Whether the worker was asked to stop. No session follows the current one then.
    pub fn is_draining(&self) -> bool {
        self.lifecycle.is_draining()
    }

    /// Whether the process must be started again after it has ended (exit code 5).
    pub fn wants_restart(&self) -> bool {
        self.lifecycle.restarts()
    }

    /// Jobs that were unacknowledged when the last session ended.
    pub fn unsettled(&self) -> usize {
        self.session.unsettled()
    }

    /// Jobs that are neither acknowledged nor given back.
    pub fn unacked(&self) -> usize {
        self.consumers.iter().map(ModelConsumers::unacked).sum()
    }

    pub(crate) fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    pub(crate) fn observe(&mut self, observation: Observation) {
        self.actions.push(Action::Observe(observation));
    }

    pub(crate) fn after(&mut self, wait: Duration, timer: Timer) {
        self.timers.set(self.now.at + wait, timer);
    }

    /// What the budget is while no other process holds anything.
    pub(crate) fn budget_max(&self) -> u64 {
        self.settings.total.saturating_sub(self.settings.resident).saturating_sub(self.settings.reserve)
    }

    /// Bytes that this process holds beyond what it held when its models were loaded.
    pub(crate) fn leaked(&self, memory: Memory) -> u64 {
        memory.own().saturating_sub(self.settings.resident)
    }

    /// The collections that grow with jobs, callers or commands.
    pub fn sizes(&self) -> impl Iterator<Item = Size> {
        let unacked = self.unacked();
        let slots = self.models.iter().map(|model| usize::from(model.slots_max.get())).sum();
        let queues: usize = self.models.iter().map(|model| model.queues.len()).sum();
        let single = [
            self.jobs.size(unacked),
            self.health.size(unacked),
            self.timers.size(slots + queues),
            self.withdrawals.size(),
            self.quarantine.size(queues),
            self.silent_stores.size(),
            Size::of("unacknowledged jobs", self.consumers.iter().map(ModelConsumers::unacked).sum(), slots),
        ];
        let session = self.session.sizes(unacked, queues);
        let scheduler = self.scheduler.sizes(unacked);
        let destinations = self.destinations.sizes(unacked);
        let successors = self.successors.sizes(unacked);
        let of_jobs =
            single.into_iter().chain(session).chain(scheduler).chain(destinations).chain(successors);
        of_jobs.chain(self.redelivery.sizes())
    }

    fn session_opened(&mut self, facts: SessionFacts) {
        self.cancel_passes();
        self.session.opened(facts.declares);
        self.health.session_opened(self.now.at);
        let after_a_loss = self.redelivery.session_opened(self.now.at);
        self.lifecycle.session_opened(self.health.is_sick());
        self.quarantine = Quarantine::new(after_a_loss, self.now.at);
        self.destinations.session_opened();
        self.consumers = consumers_of(&self.models);
        self.further_queues_opened(facts.missing);
        self.adjust_consumers();
    }

    /// Has the shell close the session. Only the first reason counts.
    pub(crate) fn end_session(&mut self, end: SessionEnd) {
        if self.session.end(end.clone()) {
            self.act(Action::EndSession(end));
        }
    }

    fn session_closed(&mut self) {
        let unacked = self.unacked();
        let (end, unsent) = self.session.closed(unacked);
        let ended = std::mem::replace(&mut self.consumers, consumers_of(&self.models));
        for (at, consumers) in ended.iter().enumerate() {
            self.observe(Observation::Unsettled { model: ModelIndex(at), jobs: consumers.unacked() });
        }
        let jobs = self.jobs.forget_all();
        self.successors.session_closed();
        self.credit.iter_mut().for_each(|credit| credit.set_stalled(0));
        if matches!(end, None | Some(SessionEnd::Lost(_))) {
            self.redelivery.session_lost(jobs.iter().map(|(_, message)| *message), self.now.at);
        }
        jobs.iter().for_each(|(job, _)| self.act(Action::Release { job: *job }));
        for confirmed in unsent {
            self.act(Action::Release { job: confirmed.ended().received.delivery.job });
        }
        self.timers.session_closed();
        if let Some(lasted) = self.scheduler.unblocked(self.now.at) {
            self.observe(Observation::BlockedOnMemory { lasted });
        }
        self.scheduler.session_closed(&self.models);
    }
}

/// No consumers yet.
fn consumers_of(models: &[ModelFacts]) -> Vec<ModelConsumers> {
    let of = |model: &ModelFacts| ModelConsumers::new(model.queues.iter().map(|queue| queue.weight));
    models.iter().map(of).collect()
}
