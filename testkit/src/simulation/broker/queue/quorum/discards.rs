//! Messages that a quorum queue dead-letters at least once. It keeps each until every target queue has stored it.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::simulation::broker::message::{DeathReason, Message};

/// The most messages that the broker's worker holds at a time (`dead_letter_worker_consumer_prefetch`), including those that no queue
/// takes.
const IN_FLIGHT_MAX: usize = 32;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Discards {
    waiting: VecDeque<Discard>,
    next: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Discard {
    id: u64,
    message: Arc<Message>,
    reason: DeathReason,
    /// Target queues that have not answered; `None` if the message was not sent.
    waits_for: Option<usize>,
    refused: bool,
}

impl Discards {
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn push(&mut self, message: Arc<Message>, reason: DeathReason) {
        self.waiting.push_back(Discard { id: self.next, message, reason, waits_for: None, refused: false });
        self.next += 1;
    }

    /// The messages to send, oldest first. A message without a target queue stays, and does not block those behind it.
    pub fn unsent(&self) -> impl Iterator<Item = (u64, &Arc<Message>, DeathReason)> {
        self.waiting
            .iter()
            .take(IN_FLIGHT_MAX)
            .filter(|discard| discard.waits_for.is_none())
            .map(|discard| (discard.id, &discard.message, discard.reason))
    }

    /// A message was sent to that many queues.
    pub fn sent(&mut self, id: u64, targets: usize) {
        if let Some(discard) = self.waiting.iter_mut().find(|discard| discard.id == id) {
            discard.waits_for = Some(targets);
            discard.refused = false;
        }
    }

    /// One of those queues has the message, or refused it. False if there is no such message.
    pub fn settled(&mut self, id: u64, accepted: bool) -> bool {
        let Some(discard) = self.waiting.iter_mut().find(|discard| discard.id == id) else { return false };
        discard.refused |= !accepted;
        let left = discard.waits_for.unwrap_or(0).saturating_sub(1);
        // If one target queue refused a message, it is sent to all of them again.
        discard.waits_for = (left > 0).then_some(left);
        if left == 0 && !discard.refused {
            self.waiting.retain(|discard| discard.id != id);
        }
        true
    }

    /// Sends all of them again.
    pub fn restart(&mut self) {
        for discard in &mut self.waiting {
            discard.waits_for = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::broker::message::Properties;

    fn unsent(discards: &Discards) -> Vec<u64> {
        discards.unsent().map(|(id, ..)| id).collect()
    }

    #[test]
    fn a_message_that_no_queue_takes_holds_up_others_only_when_the_worker_is_full_of_such() {
        let mut discards = Discards::default();
        let message = Message::new("".into(), "q".into(), Properties::default(), Arc::from(&b"body"[..]));
        let message = Arc::new(message);
        for _ in 0..=IN_FLIGHT_MAX {
            discards.push(message.clone(), DeathReason::Rejected);
        }
        assert_eq!(unsent(&discards), (0..IN_FLIGHT_MAX as u64).collect::<Vec<u64>>());
        discards.sent(1, 1);
        assert_eq!(unsent(&discards)[..2], [0, 2], "the first waits, and the next can be sent");
        discards.settled(1, true);
        assert_eq!(unsent(&discards).last(), Some(&(IN_FLIGHT_MAX as u64)));
    }
}
