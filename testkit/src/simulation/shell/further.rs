//! Further queues of a model in the simulated shell. It notices a lost queue when the broker closes the queue's channel, and checks whether
//! the queue can be consumed again.

use vramq_core::event::{Event, QueueCount, QueueCounts};
use vramq_core::ids::{ModelIndex, QueueIndex};

use super::Shell;
use super::session::FORBIDDEN;
use crate::simulation::agenda::{Happening, MILLI};
use crate::simulation::broker::{Command, Name};
use crate::simulation::env::Env;

impl Shell {
    /// Asks for a further queue.
    pub(super) fn look_for(&self, env: &mut Env, model: ModelIndex, queue: QueueIndex) {
        let Some(session) = self.session_number() else { return };
        let at = env.soon(20 * MILLI);
        env.agenda.at(at, Happening::LookedFor { life: self.life, session, model, queue });
    }

    /// The broker answers for a further queue.
    pub fn looked_for(&mut self, env: &mut Env, session: u32, model: ModelIndex, queue: QueueIndex) {
        let Some(open) = self.session.as_mut().filter(|open| open.number == session) else { return };
        if env.broker_is_down || !env.broker.is_connected(open.consuming) {
            return;
        }
        let result = match env.declare_further(model.0, queue.0) {
            true => env.open_channel(open.consuming).map(|wire| open.channels.found(model, queue, wire)),
            false => None,
        };
        let result = result.ok_or_else(|| FORBIDDEN.to_owned());
        self.handle(env, Event::QueueLookedFor { model, queue, result });
    }

    /// The broker closed the channel of a further queue.
    pub(super) fn queue_lost(&mut self, env: &mut Env, model: ModelIndex, queue: QueueIndex, error: &str) {
        let Some(session) = &mut self.session else { return };
        session.channels.lost(model, queue);
        session
            .leases
            .retain(|lease| (lease.model, lease.queue) != (model, vramq_core::action::JobQueue::Jobs(queue)));
        self.handle(env, Event::QueueLost { model, queue, error: error.to_owned() });
    }

    /// Counts the waiting messages of a model. A missing further queue closes its channel.
    pub(super) fn count(&mut self, env: &mut Env, model: ModelIndex) {
        let Some(session) = &self.session else { return };
        let names = env.names.clone();
        let names = &names.models[model.0];
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let count = |env: &Env, name: &Name| {
            let counts = env.broker.queue(name)?;
            Some(QueueCount { waiting: number(counts.ready), consumers: number(counts.consumers) })
        };
        let [jobs, bulk, suspects] = [&names.jobs, &names.bulk, &names.suspects].map(|name| count(env, name));
        let (Some(jobs), Some(bulk), Some(suspects)) = (jobs, bulk, suspects) else {
            let error = "a queue to count is gone".to_owned();
            return self.ready.push_back(Event::SessionFailed(error));
        };
        let mut all = vec![jobs];
        for queue in (1..self.models[model.0].queues.len()).map(QueueIndex) {
            let (channel, name) = (session.channels.of(model, queue), names.queue(queue.0));
            let counted = channel.and_then(|_| count(env, name));
            if let (Some(channel), None) = (channel, counted) {
                env.send(channel.wire, Command::Count { queue: name.clone() });
            }
            all.push(counted.unwrap_or_default());
        }
        let counts = QueueCounts { jobs: all, bulk, quarantined: suspects.waiting };
        let session = session.number;
        if env.random.chance(80) {
            self.ready.push_back(Event::QueuesCounted { model, counts });
        } else {
            let at = env.soon(20 * MILLI);
            env.agenda.at(at, Happening::Counted { life: self.life, session, model, counts });
        }
    }
}
