//! A channel's own state: its consumers, what it has delivered and not settled, and what it has not confirmed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::message::{Millis, Name};
use super::protocol::{Command, ConnectionId, Frame};
use super::queue::Taker;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Channel {
    pub connection: ConnectionId,
    /// Commands that the client sent and the broker has not read.
    pub inbox: VecDeque<Command>,
    /// The prefetch of consumers that start from now on.
    pub prefetch: u16,
    pub consumers: BTreeMap<Name, ChannelConsumer>,
    pub next_delivery_tag: u64,
    pub unacked: BTreeMap<u64, Unacked>,
    /// The number of the next publish, in confirm mode.
    pub next_confirm: Option<u64>,
    /// Publishes with the queues that have not answered yet.
    pub unconfirmed: BTreeMap<u64, BTreeSet<Name>>,
    /// Publishes that all queues have answered, and whether they accepted them. The client has no confirm yet.
    pub resolved: BTreeMap<u64, bool>,
    /// Quorum queues that this channel publishes to, and whether the channel must refuse publishes because they are full.
    pub refusing: BTreeMap<Name, bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ChannelConsumer {
    pub queue: Name,
    pub no_ack: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Unacked {
    pub queue: Name,
    pub taker: Taker,
    /// The queue's number of the message.
    pub id: u64,
    pub since: Millis,
}

impl Channel {
    pub fn new(connection: ConnectionId) -> Self {
        Self {
            connection,
            inbox: VecDeque::new(),
            prefetch: 0,
            consumers: BTreeMap::new(),
            next_delivery_tag: 1,
            unacked: BTreeMap::new(),
            next_confirm: None,
            unconfirmed: BTreeMap::new(),
            resolved: BTreeMap::new(),
            refusing: BTreeMap::new(),
        }
    }

    pub fn next_tag(&mut self) -> u64 {
        let tag = self.next_delivery_tag;
        self.next_delivery_tag += 1;
        tag
    }

    /// What an ack or nack settles, by queue and taker, oldest first. `None` if the tag is unknown.
    pub fn settled_by(&mut self, tag: u64, multiple: bool) -> Option<BTreeMap<(Name, Taker), Vec<u64>>> {
        let tags: Vec<u64> = match (tag, multiple) {
            (0, true) => self.unacked.keys().copied().collect(),
            (tag, _) if !self.unacked.contains_key(&tag) => return None,
            (tag, true) => self.unacked.range(..=tag).map(|(tag, _)| *tag).collect(),
            (tag, false) => vec![tag],
        };
        let mut groups: BTreeMap<(Name, Taker), Vec<u64>> = BTreeMap::new();
        for unacked in tags.iter().filter_map(|tag| self.unacked.remove(tag)) {
            groups.entry((unacked.queue, unacked.taker)).or_default().push(unacked.id);
        }
        Some(groups)
    }

    /// A queue answered for a publish.
    pub fn answered(&mut self, queue: &Name, confirm: u64, accepted: bool) {
        let Some(waiting) = self.unconfirmed.get_mut(&confirm) else { return };
        waiting.remove(queue);
        if waiting.is_empty() || !accepted {
            self.unconfirmed.remove(&confirm);
            self.resolved.insert(confirm, accepted);
        }
    }

    /// A queue was deleted and will not answer any more, so its publishes count as confirmed.
    pub fn queue_deleted(&mut self, queue: &Name) {
        let waiting: Vec<u64> = self
            .unconfirmed
            .iter()
            .filter(|(_, queues)| queues.contains(queue))
            .map(|(number, _)| *number)
            .collect();
        for number in waiting {
            self.answered(queue, number, true);
        }
        self.refusing.remove(queue);
    }

    /// The frames that confirm or refuse these publishes. Acks before the first unanswered publish share one frame.
    pub fn confirm(&mut self, numbers: &[u64]) -> Vec<Frame> {
        let (mut acks, mut nacks) = (Vec::new(), Vec::new());
        for number in numbers {
            match self.resolved.remove(number) {
                Some(true) => acks.push(*number),
                Some(false) => nacks.push(*number),
                None => {}
            }
        }
        acks.sort_unstable();
        let open = self.unconfirmed.keys().chain(self.resolved.keys()).chain(&nacks).min().copied();
        let together = acks.iter().filter(|number| open.is_none_or(|open| **number < open)).count();
        let mut frames: Vec<Frame> =
            nacks.iter().map(|tag| Frame::Nack { tag: *tag, multiple: false }).collect();
        if let Some(last) = together.checked_sub(1).and_then(|last| acks.get(last)) {
            frames.push(Frame::Ack { tag: *last, multiple: together > 1 });
        }
        frames.extend(acks.iter().skip(together).map(|tag| Frame::Ack { tag: *tag, multiple: false }));
        frames
    }
}
