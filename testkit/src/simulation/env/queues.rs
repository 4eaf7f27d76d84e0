//! Further queues of models: their owners delete them with all messages, keep workers from using them, and declare them again.

use std::collections::BTreeSet;

use super::super::broker::Command;
use super::super::ledger::Letter;
use super::Env;

impl Env {
    /// The owner of a further queue deletes it. Jobs that wait in it are gone; those that workers hold run to their end.
    pub fn delete_further(&mut self, model: usize, queue: usize, is_forbidden: bool) {
        if self.broker_is_down {
            return;
        }
        if is_forbidden {
            self.forbidden.insert((model, queue));
        }
        let channels: Vec<_> = self.channels.keys().copied().collect();
        let mut held: BTreeSet<Letter> = BTreeSet::new();
        for channel in channels {
            let tags = self.broker.unacked_tags(channel);
            held.extend(tags.into_iter().filter_map(|tag| self.delivered_letter(channel, tag)));
        }
        self.ledger.queue_deleted(model, queue, &held);
        let name = self.names.models[model].queue(queue).clone();
        self.administer([Command::DeleteQueue { name, if_unused: false, if_empty: false }]);
    }

    /// Its owner makes a further queue again, for all workers.
    pub fn restore_further(&mut self, model: usize, queue: usize) {
        self.forbidden.remove(&(model, queue));
        if !self.broker_is_down {
            self.administer([self.names.further(&self.plan, model, queue)]);
        }
    }

    /// A worker declares a further queue. Returns whether it may consume the queue.
    pub fn declare_further(&mut self, model: usize, queue: usize) -> bool {
        if self.forbidden.contains(&(model, queue)) {
            return false;
        }
        self.administer([self.names.further(&self.plan, model, queue)]);
        true
    }
}
