//! Messages that a quorum queue dead-letters at least once: it keeps each until the queues that it was sent to have it.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::simulation::broker::message::{DeathReason, Message};

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
    /// Queues that were sent it and have not answered. None: not sent.
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

    /// The next message that is to be sent.
    pub fn next(&self) -> Option<(u64, &Arc<Message>, DeathReason)> {
        let discard = self.waiting.iter().find(|discard| discard.waits_for.is_none())?;
        Some((discard.id, &discard.message, discard.reason))
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
        // What one queue refused is sent to all of them again.
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
