//! Receivers of a quorum queue's messages: a consumer, or a single `basic.get`.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::{Entry, Taken};
use crate::simulation::broker::message::Message;
use crate::simulation::broker::mistake::Mistake;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Consumer {
    /// How many more messages it may be sent.
    pub credit: u32,
    /// The limit up to which settled messages raise the credit, if there is one.
    pub credit_max: Option<u32>,
    /// Whether it gets no credit back and disappears with its last message: cancelled consumers, and `basic.get`.
    pub once: bool,
    pub up: bool,
    pub no_ack: bool,
    next_id: u64,
    /// What it was sent and has not settled.
    pub taken: BTreeMap<u64, Entry>,
    pub priority: i32,
    /// Its place among the queue's consumers by age.
    pub subscribed: u64,
}

impl Consumer {
    pub fn new(subscribed: u64) -> Self {
        Self {
            credit: 0,
            credit_max: None,
            once: false,
            up: true,
            no_ack: false,
            next_id: 0,
            taken: BTreeMap::new(),
            priority: 0,
            subscribed,
        }
    }

    /// Gives it credit for messages that it settled.
    pub fn give_credit(&mut self, settled: u32) {
        if !self.once {
            let credit = self.credit + settled;
            self.credit = self.credit_max.map_or(credit, |max| credit.min(max));
        }
    }

    /// Gives it a message. The message is kept even with `no_ack`: for a quorum queue that means an ack sent by the channel.
    pub fn take(&mut self, entry: Entry, mistake: Option<Mistake>) -> Taken {
        let carried = entry.message.carried_failures;
        let count = (entry.returns > 0).then_some(entry.returns).or(carried);
        let message = match carried {
            None => entry.message.clone(),
            Some(_) => Arc::new(Message { carried_failures: None, ..(*entry.message).clone() }),
        };
        let id = self.next_id;
        self.next_id += 1;
        self.taken.insert(id, entry);
        Taken {
            id,
            message,
            redelivered: count.is_some() && mistake != Some(Mistake::ForgetsRedelivered),
            delivery_count: match mistake {
                Some(Mistake::ForgetsDeliveryCount) => count.map(|_| 1),
                _ => count,
            },
        }
    }
}
