//! Carries out the core's actions.

use vramq_core::acks::AckFrame;
use vramq_core::action::{Action, JobQueue};
use vramq_core::event::{DecodedJob, Event, Source};
use vramq_core::ids::{ChannelId, ConsumerId, JobKey, ModelIndex, QueueIndex};
use vramq_core::rejection::Rejection;
use vramq_schemas::Reason;

use super::accounts::PASSES_OF_SMALL;
use super::session::Lease;
use super::stored_job::{SeenEnd, Withdrawn};
use super::{Sabotage, Shell};
use crate::simulation::agenda::{Happening, MILLI};
use crate::simulation::broker::{Command, Name};
use crate::simulation::env::Env;
use crate::simulation::ledger::{Kind, Nature};
use crate::simulation::names::LARGER_KEY;

/// More jobs than callers publish.
const JOBS_PER_HISTORY: u32 = 10_000;

impl Shell {
    pub(super) fn perform(&mut self, env: &mut Env, action: Action) {
        if action.needs_open_session() && self.is_closing {
            return;
        }
        match action {
            Action::Consume { model, queue, consumer, prefetch, hold_max } => {
                self.check_hold(env, hold_max);
                self.consume(env, model, queue, consumer, prefetch.get());
            }
            Action::StopConsumer { model, consumer, .. } => self.stop_consumer(env, model, consumer),
            Action::CountQueues { model } => self.count(env, model),
            Action::LookForQueue { model, queue } => self.look_for(env, model, queue),
            Action::TakeQuarantined { model } => self.take_quarantined(env, model),
            Action::Decode { job, cost } => self.decode(env, job, cost),
            Action::Fetch { job, .. } => self.fetch_inputs(env, job),
            Action::Prepare { job, cost } => self.prepare(env, job, cost),
            Action::Run(order) => self.run(env, order),
            Action::CancelPass { pass, .. } => self.cancel_pass(env, pass),
            Action::Publish { job, publication } => self.publish(env, job, publication),
            Action::Ack { channel, frames } => self.ack(env, channel, &frames),
            Action::GiveBack { job } => {
                self.check_give_back(env, job);
                self.nack(env, job, true);
            }
            Action::Reject { job } => self.nack(env, job, false),
            Action::Release { job } => self.release(env, job),
            Action::Answer { request, answer, text, last } => {
                self.answered(env, request, answer, &text, last);
            }
            Action::SetLog { request, directives } => self.log_set(env, request, &directives),
            Action::SaveLimits => self.save_limits(env),
            Action::ReadMemory => {
                let (memory, passes) = self.read_memory(env);
                self.ready.push_back(Event::MemoryRead { memory, passes });
            }
            Action::TrimDevice => self.check_trim(env),
            Action::Observe(observation) => self.observe(env, observation),
            Action::EndSession(end) => drop(self.ending.get_or_insert(end)),
        }
    }

    /// Drops a job. Its end must have been counted, unless its session is over.
    fn release(&mut self, env: &mut Env, job: JobKey) {
        let was_counted = self.jobs.remove(&job).is_some_and(|stored| stored.is_counted);
        if self.session.is_some() && !was_counted {
            let who = self.life.worker;
            env.ledger.fail("each end has the right metric label", || format!("worker-{who}: {job:?}"));
        }
    }

    fn consume(
        &mut self,
        env: &mut Env,
        model: ModelIndex,
        queue: JobQueue,
        consumer: ConsumerId,
        prefetch: u16,
    ) {
        self.check_consume(env, model, prefetch);
        self.check_takes(env);
        let Some(session) = &mut self.session else { return };
        let of = match queue {
            JobQueue::Bulk => QueueIndex::OWN,
            JobQueue::Jobs(queue) => queue,
        };
        let Some(channel) = session.channels.of(model, of).map(|channel| channel.wire) else {
            let error = "the queue has no channel".to_owned();
            return self.ready.push_back(Event::QueueLost { model, queue: of, error });
        };
        let tag = tag_of(consumer);
        session.leases.push(Lease { consumer, model, queue, prefetch, tag: tag.clone(), is_stopping: false });
        env.send(channel, Command::Qos { prefetch });
        let names = &env.names.models[model.0];
        let queue = if queue == JobQueue::Bulk { &names.bulk } else { names.queue(of.0) }.clone();
        env.send(channel, Command::Consume { queue, tag, no_ack: false, priority: 0 });
    }

    fn stop_consumer(&mut self, env: &mut Env, model: ModelIndex, consumer: ConsumerId) {
        let Some(session) = &mut self.session else { return };
        let Some(lease) = session.leases.iter_mut().find(|lease| lease.consumer == consumer) else { return };
        lease.is_stopping = true;
        let of = match lease.queue {
            JobQueue::Bulk => QueueIndex::OWN,
            JobQueue::Jobs(queue) => queue,
        };
        if let Some(channel) = session.channels.of(model, of) {
            env.send(channel.wire, Command::Cancel { tag: tag_of(consumer) });
        }
    }

    fn take_quarantined(&mut self, env: &mut Env, model: ModelIndex) {
        self.check_taking(env);
        self.check_takes(env);
        let Some(session) = &mut self.session else { return };
        session.taking = Some(model);
        let queue = env.names.models[model.0].suspects.clone();
        if let Some(channel) = session.channels.own(model) {
            env.send(channel, Command::Get { queue, no_ack: false });
        }
    }

    fn ack(&mut self, env: &mut Env, of: ChannelId, frames: &[AckFrame]) {
        let Some(session) = &self.session else { return };
        let (session, Some(of_jobs)) = (session.number, session.channels.by_id(of)) else { return };
        let (channel, tags) = (of_jobs.wire, of_jobs.tags.clone());
        let mut sent = Vec::with_capacity(frames.len());
        for frame in frames {
            for tag in self.covered(env, of, *frame) {
                let Some(letter) = env.delivered_letter(channel, tag) else { continue };
                let job = usize::try_from(tag - 1).ok().and_then(|at| tags.get(at));
                let stored = job.and_then(|job| self.jobs.get(job));
                let is_withdrawn = stored.is_some_and(|stored| stored.withdrawn != Withdrawn::No);
                env.ledger.acked(letter, is_withdrawn, format_args!("worker-{}", self.life.worker));
                self.answered.insert(env.ledger.letter(letter).twin, (env.now, session));
            }
            let multiple = self.is_multiple(*frame);
            sent.push(env.send(channel, Command::Ack { tag: frame.tag().0, multiple }));
        }
        if self.is_closing {
            return self.ready.push_back(Event::AcksSent { channel: of, sent });
        }
        let at = env.soon(MILLI);
        env.agenda.at(at, Happening::AcksSent { life: self.life, session, channel: of, sent });
    }

    fn is_multiple(&self, frame: AckFrame) -> bool {
        frame.is_multiple() || self.sabotage == Some(Sabotage::MultipleOverGap)
    }

    /// The deliveries that an ack settles. If the broker has closed the channel of a deleted further queue, these are the deliveries that
    /// the worker holds.
    fn covered(&self, env: &Env, of: ChannelId, frame: AckFrame) -> Vec<u64> {
        let Some(session) = &self.session else { return Vec::new() };
        let Some(channel) = session.channels.by_id(of) else { return Vec::new() };
        let last = frame.tag().0;
        let first = if self.is_multiple(frame) { 1 } else { last };
        let open = match channel.queue.is_further() && !env.broker.is_open(channel.wire) {
            true => self.jobs.values().filter(|job| job.channel == of).map(|job| job.tag).collect(),
            false => env.broker.unacked_tags(channel.wire),
        };
        let is_covered = |tag: &u64| (first..=last).contains(tag) && !session.nacked.contains(&(of, *tag));
        open.into_iter().filter(is_covered).collect()
    }

    fn nack(&mut self, env: &mut Env, job: JobKey, requeue: bool) {
        let (Some(session), Some(stored)) = (&mut self.session, self.jobs.get_mut(&job)) else { return };
        session.nacked.insert((stored.channel, stored.tag));
        self.gave_back = true;
        if requeue {
            env.ledger.lost(stored.letter);
            stored.end = Some(SeenEnd::GivenBack);
        }
        env.ledger.gone_with_its_queue(stored.letter);
        let Some(channel) = session.channels.by_id(stored.channel).map(|channel| channel.wire) else {
            return;
        };
        let sent = env.send(channel, Command::Nack { tag: stored.tag, multiple: false, requeue });
        let at = env.soon(MILLI);
        env.agenda.at(at, Happening::NackSent { life: self.life, session: session.number, job, sent });
    }

    fn decode(&mut self, env: &mut Env, job: JobKey, cost: usize) {
        self.check_decode(env, job);
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        stored.asked = cost;
        if stored.withdrawn == Withdrawn::Yes {
            let number = stored.job.0;
            env.ledger.fail("a withdrawn job is not read", || format!("job {number}"));
        }
        if env.ledger.job(stored.job).spec.nature == Nature::PoisonDecode {
            env.ledger.killed(stored.job);
            return self.die();
        }
        if env.random.chance(50) {
            return self.decoded(env, job);
        }
        let at = env.soon(5 * MILLI);
        env.agenda.at(at, Happening::Decoded { life: self.life, job });
    }

    /// Handles the result of reading a job.
    pub(super) fn decoded(&mut self, env: &mut Env, job: JobKey) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let is_above_cap = self.is_rejected_for_cap(env, stored);
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        let spec = &env.ledger.job(stored.job).spec;
        let Kind::Job { headers, .. } = &env.ledger.letter(stored.letter).kind else { return };
        let items_done = headers.as_ref().map_or(0, |headers| headers.items_done) as usize;
        let own = env.plan.odds.revision(self.life.worker, self.life.number);
        let result = if spec.nature == Nature::Malformed || headers.is_none() || items_done > spec.costs.len()
        {
            Err(Rejection::new(Reason::Malformed, "cannot be read"))
        } else if spec.nature == Nature::Huge {
            Err(Rejection::new(Reason::TooLarge, "larger than a job may be"))
        } else if spec.moves {
            let key = LARGER_KEY.to_owned();
            return self.ready.push_back(Event::Moved { job, key });
        } else if spec.revision.is_some_and(|revision| revision != own) {
            stored.is_of_other_revision = true;
            Err(Rejection::new(Reason::WrongRevision, "this worker has another revision"))
        } else if spec.refers && !stored.has_inputs {
            return self.referring(env, job);
        } else if is_above_cap {
            Err(Rejection::new(Reason::TooLarge, "its replies cannot hold all outputs"))
        } else {
            stored.is_decoded = true;
            let items_total = u32::try_from(spec.costs.len()).unwrap_or(u32::MAX);
            let costs = stored.prepare_next(&spec.costs);
            let (cost, model) = (costs.iter().sum::<usize>(), stored.model.0);
            self.load[model].decoded(cost);
            // In such a history the queue of large jobs is never full.
            let has_room = env.plan.jobs_max > JOBS_PER_HISTORY && matches!(stored.source, Source::Jobs(..));
            if has_room && cost > PASSES_OF_SMALL * self.models[model].pass_cost_max {
                stored.must_move = self.core.status().models[model].slots > 1;
            }
            Ok(DecodedJob { items_total, costs })
        };
        self.ready.push_back(Event::Decoded { job, result });
    }

    fn prepare(&mut self, env: &mut Env, job: JobKey, cost: usize) {
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        stored.asked = cost;
        let at = env.soon(5 * MILLI);
        env.agenda.at(at, Happening::Prepared { life: self.life, job });
    }

    /// The next inputs of a job were prepared on the pool.
    pub fn prepared_later(&mut self, env: &mut Env, job: JobKey) {
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        let result = Ok(stored.prepare_next(&env.ledger.job(stored.job).spec.costs));
        self.handle(env, Event::Prepared { job, result });
    }

    /// A job was read on the pool.
    pub fn decoded_later(&mut self, env: &mut Env, job: JobKey) {
        self.decoded(env, job);
        if let Some(event) = self.ready.pop_front() {
            self.handle(env, event);
        }
    }
}

pub(super) fn consumer_of(tag: &Name) -> Option<ConsumerId> {
    tag.strip_prefix('c')?.parse().ok().map(ConsumerId)
}

pub(super) fn tag_of(consumer: ConsumerId) -> Name {
    format!("c{consumer}").into()
}
