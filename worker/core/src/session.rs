//! The session with the broker: whether it is open, and why it ends. Owns the state that is lost with it: deliveries that may be acked, and
//! operators' commands that wait.

use std::collections::BTreeMap;

use crate::acks::{AckFrame, Acks};
use crate::action::SessionEnd;
use crate::commands::Commands;
use crate::event::{Delivery, Source};
use crate::ids::{ChannelId, ModelIndex, QueueIndex};
use crate::jobs::Confirmed;
use crate::sizes::Size;

/// The open session, or the last one.
#[derive(Debug, Default)]
pub(crate) struct SessionState {
    is_open: bool,
    /// Why the shell was told to close it, if it was.
    end: Option<SessionEnd>,
    declares: bool,
    is_blocked: bool,
    consumers_started: u64,
    /// Jobs that were unacknowledged when the last one ended.
    unsettled: usize,
    /// Acks for each channel that delivered jobs. A further queue that is found again has a new channel, at most every ten seconds; its
    /// old channel stays here only while an ack for it is due.
    acks: BTreeMap<ChannelId, Acks<Confirmed>>,
    /// The newest channel of each further queue for which an ack was due.
    newest: BTreeMap<(ModelIndex, QueueIndex), ChannelId>,
    commands: Commands,
}

impl SessionState {
    /// Given so many unacknowledged jobs, and queues of jobs.
    pub(crate) fn sizes(&self, unacked: usize, queues: usize) -> [Size; 5] {
        let (due, runs) =
            self.acks.values().map(Acks::counts).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let [cancellations, pauses] = self.commands.sizes();
        [
            Size::of("acks", due, unacked),
            Size::of("settled deliveries", runs, unacked),
            Size::of("channels", self.acks.len(), queues + unacked),
            cancellations,
            pauses,
        ]
    }

    /// A session stands. `declares`: the worker may declare queues.
    pub(crate) fn opened(&mut self, declares: bool) {
        let unsettled = self.unsettled;
        *self = Self { is_open: true, declares, unsettled, ..Self::default() };
    }

    /// Records why the session must end. False if it is closed, or already ending.
    pub(crate) fn end(&mut self, end: SessionEnd) -> bool {
        let is_first = self.is_active();
        if is_first {
            self.end = Some(end);
        }
        is_first
    }

    /// The session is closed with so many unacknowledged jobs. Returns why it had to end, and the jobs whose ack was not sent.
    pub(crate) fn closed(&mut self, unsettled: usize) -> (Option<SessionEnd>, Vec<Confirmed>) {
        self.is_open = false;
        self.is_blocked = false;
        self.unsettled = unsettled;
        let unsent = std::mem::take(&mut self.acks).into_values().flat_map(Acks::into_unsent).collect();
        (self.end.take(), unsent)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    pub(crate) fn is_active(&self) -> bool {
        self.is_open && self.end.is_none()
    }

    pub(crate) fn declares(&self) -> bool {
        self.declares
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    pub(crate) fn set_blocked(&mut self, blocked: bool) {
        self.is_blocked = blocked;
    }

    pub(crate) fn unsettled(&self) -> usize {
        self.unsettled
    }

    pub(crate) fn next_consumer(&mut self) -> u64 {
        self.consumers_started += 1;
        self.consumers_started
    }

    /// Takes back a consumer number that was not used.
    pub(crate) fn unused_consumer(&mut self) {
        self.consumers_started -= 1;
    }

    /// The acks of the channel that a job came by.
    pub(crate) fn acks_of(&mut self, delivery: &Delivery) -> &mut Acks<Confirmed> {
        let channel = delivery.channel;
        if let Source::Jobs(queue, _) = delivery.source
            && queue.is_further()
        {
            let newest = self.newest.entry((delivery.model, queue)).or_insert(channel);
            let before = *newest;
            *newest = before.max(channel);
            self.drop_if_replaced(before);
        }
        let is_replaced = self.is_replaced(channel);
        let acks = self.acks.entry(channel).or_default();
        if is_replaced {
            acks.close();
        }
        acks
    }

    /// A delivery was given back to the broker; or that could not be `sent`.
    pub(crate) fn nacked(&mut self, delivery: &Delivery, sent: bool) {
        self.acks_of(delivery).nacked(delivery.tag, sent);
        self.drop_if_replaced(delivery.channel);
    }

    /// Whether each frame of the last [`take_acks`](Self::take_acks) for this channel was sent. Returns the jobs, each with that result.
    pub(crate) fn acks_sent(&mut self, channel: ChannelId, sent: &[bool]) -> Vec<(Confirmed, bool)> {
        let settled = self.acks.get_mut(&channel).map(|acks| acks.sent(sent)).unwrap_or_default();
        self.drop_if_replaced(channel);
        settled
    }

    /// Whether the channel belonged to a further queue that has a newer one. Channel 0 of a model is that of its own queues.
    fn is_replaced(&self, channel: ChannelId) -> bool {
        channel.number > 0 && self.newest.values().all(|newest| *newest != channel)
    }

    fn drop_if_replaced(&mut self, channel: ChannelId) {
        if self.is_replaced(channel) && self.acks.get(&channel).is_some_and(|acks| acks.counts().0 == 0) {
            self.acks.remove(&channel);
        }
    }

    /// The acks that are due, of each channel that has some.
    pub(crate) fn take_acks(&mut self) -> Vec<(ChannelId, Vec<AckFrame>)> {
        let due = self.acks.iter_mut().map(|(channel, acks)| (*channel, acks.take()));
        due.filter(|(_, frames)| !frames.is_empty()).collect()
    }

    pub(crate) fn commands(&self) -> &Commands {
        &self.commands
    }

    pub(crate) fn commands_mut(&mut self) -> &mut Commands {
        &mut self.commands
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_reason_to_end_a_session_counts() {
        let mut session = SessionState::default();
        assert!(!session.end(SessionEnd::Drained), "none is open");
        session.opened(true);
        assert!(session.is_open() && session.is_active() && session.declares());
        assert!(session.end(SessionEnd::Drained) && !session.end(SessionEnd::Killed));
        assert!(session.is_open() && !session.is_active(), "it ends");
        let (end, _) = session.closed(3);
        assert!(matches!(end, Some(SessionEnd::Drained)));
        assert!(!session.is_open() && session.unsettled() == 3);
        session.opened(false);
        assert!(session.is_active() && !session.declares());
        assert_eq!(session.unsettled(), 3, "of the session before");
    }
}
