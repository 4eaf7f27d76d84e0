//! Acknowledges several deliveries of a channel with one frame. Deliveries whose ack is due come in; ack frames go out.
//!
//! A broker numbers the deliveries of a channel from 1 on without gaps. An ack with `multiple` covers all deliveries up to its number, so
//! use it only when every earlier delivery is settled. A number that the worker has not seen yet may be a job on its way: later deliveries
//! are acked one by one.

use std::collections::BTreeMap;

use crate::ids::DeliveryTag;

/// An ack to send. Only this module makes one: nothing else can acknowledge a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckFrame {
    tag: DeliveryTag,
    multiple: bool,
}

impl AckFrame {
    /// The delivery that the ack names; with `multiple`, the last one that it covers.
    pub fn tag(self) -> DeliveryTag {
        self.tag
    }

    /// Whether the ack covers all deliveries of the channel up to [`tag`](Self::tag).
    pub fn is_multiple(self) -> bool {
        self.multiple
    }
}

/// The deliveries of one channel whose ack is due, each with a `T` for the caller, and what is already settled.
#[derive(Debug)]
pub(crate) struct Acks<T> {
    /// Every delivery up to this one is acknowledged or given back.
    settled_up_to: u64,
    /// Settled deliveries after that: first and last of each run. There are at most as many runs as unacknowledged deliveries.
    settled_beyond: BTreeMap<u64, u64>,
    due: BTreeMap<u64, T>,
    /// The deliveries that each frame of the last `take` covers, until that frame is sent. The next `take` waits for them: a `multiple` ack
    /// must not overtake an earlier ack that it would cover.
    sending: Vec<Vec<(u64, T)>>,
    /// The broker closed the channel, or a newer one replaced it. Acks behind an unsettled delivery are sent one by one then, and runs of
    /// settled deliveries are not recorded.
    is_closed: bool,
}

impl<T> Default for Acks<T> {
    fn default() -> Self {
        Self {
            settled_up_to: 0,
            settled_beyond: BTreeMap::new(),
            due: BTreeMap::new(),
            sending: Vec::new(),
            is_closed: false,
        }
    }
}

impl<T> Acks<T> {
    /// Two counts: deliveries whose ack is due or being sent, and runs in `settled_beyond`.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let sending: usize = self.sending.iter().map(Vec::len).sum();
        (self.due.len() + sending, self.settled_beyond.len())
    }

    /// The ack of a delivery is due.
    pub(crate) fn add(&mut self, tag: DeliveryTag, settled: T) {
        self.due.insert(tag.0, settled);
    }

    /// The worker gave a delivery back to the broker. That settles it without an ack; if it was not `sent`, the channel is closed.
    pub(crate) fn nacked(&mut self, tag: DeliveryTag, sent: bool) {
        if sent {
            self.note_settled(tag.0);
        } else {
            self.close();
        }
    }

    /// The acks that are due, in as few frames as the order allows; none while earlier frames are being sent.
    pub(crate) fn take(&mut self) -> Vec<AckFrame> {
        if !self.sending.is_empty() || self.due.is_empty() {
            return Vec::new();
        }
        let mut in_order = Vec::new();
        let mut next = self.settled_up_to + 1;
        loop {
            if let Some(settled) = self.due.remove(&next) {
                in_order.push((next, settled));
                next += 1;
            } else if let Some(last) = self.settled_beyond.get(&next) {
                next = last + 1;
            } else {
                break;
            }
        }
        let mut frames = Vec::new();
        if let Some((last, _)) = in_order.last() {
            frames.push(AckFrame { tag: DeliveryTag(*last), multiple: in_order.len() > 1 });
            self.sending.push(in_order);
        }
        for (tag, settled) in std::mem::take(&mut self.due) {
            frames.push(AckFrame { tag: DeliveryTag(tag), multiple: false });
            self.sending.push(vec![(tag, settled)]);
        }
        frames
    }

    /// Reports, for each frame of the last [`take`](Self::take) in order, whether it was sent. Returns the `T` of every covered delivery
    /// with that result.
    pub(crate) fn sent(&mut self, sent: &[bool]) -> Vec<(T, bool)> {
        let mut all = Vec::new();
        for (at, covered) in std::mem::take(&mut self.sending).into_iter().enumerate() {
            let sent = sent.get(at).copied().unwrap_or(false);
            for (tag, settled) in covered {
                if sent {
                    self.note_settled(tag);
                } else {
                    self.close();
                }
                all.push((settled, sent));
            }
        }
        all
    }

    /// The session is over. Returns the `T` of every delivery whose ack was not sent.
    pub(crate) fn into_unsent(self) -> Vec<T> {
        let sending = self.sending.into_iter().flatten().map(|(_, settled)| settled);
        sending.chain(self.due.into_values()).collect()
    }

    /// The channel is closed, or delivers nothing more. If it belonged to a further queue, the session goes on without it.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
        self.settled_beyond.clear();
    }

    fn note_settled(&mut self, tag: u64) {
        if self.is_closed {
            return;
        }
        let mut first = tag;
        if let Some((&start, &end)) = self.settled_beyond.range(..tag).next_back()
            && end + 1 == tag
        {
            first = start;
        }
        let last = self.settled_beyond.remove(&(tag + 1)).unwrap_or(tag);
        if first == self.settled_up_to + 1 {
            self.settled_up_to = last;
            self.settled_beyond.remove(&first);
        } else {
            self.settled_beyond.insert(first, last);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn frame(tag: u64, multiple: bool) -> AckFrame {
        AckFrame { tag: DeliveryTag(tag), multiple }
    }

    fn add(acks: &mut Acks<u64>, tags: impl IntoIterator<Item = u64>) {
        tags.into_iter().for_each(|tag| acks.add(DeliveryTag(tag), tag));
    }

    /// Takes the acks that are due, and sends them.
    fn send(acks: &mut Acks<u64>) -> Vec<AckFrame> {
        let frames = acks.take();
        acks.sent(&vec![true; frames.len()]);
        frames
    }

    #[test]
    fn deliveries_settled_in_order_share_one_frame() {
        let mut acks = Acks::default();
        add(&mut acks, [2, 1, 3]);
        assert_eq!(send(&mut acks), [frame(3, true)]);
        add(&mut acks, [4]);
        assert_eq!(send(&mut acks), [frame(4, false)]);
        assert_eq!(send(&mut acks), []);
    }

    #[test]
    fn one_frame_covers_several_deliveries_only_if_it_says_so() {
        let mut acks = Acks::default();
        add(&mut acks, [1, 2, 4]);
        let frames = acks.take().into_iter().map(|frame| (frame.tag().0, frame.is_multiple()));
        assert_eq!(frames.collect::<Vec<_>>(), [(2, true), (4, false)]);
        add(&mut acks, [5]);
        assert_eq!(acks.counts().0, 4, "acks count until they are sent");
    }

    #[test]
    fn deliveries_behind_an_unsettled_one_are_acked_one_by_one() {
        let mut acks = Acks::default();
        add(&mut acks, [1, 3, 4]);
        assert_eq!(send(&mut acks), [frame(1, false), frame(3, false), frame(4, false)]);
        acks.nacked(DeliveryTag(2), true);
        add(&mut acks, [6, 5]);
        assert_eq!(send(&mut acks), [frame(6, true)]);
    }

    #[test]
    fn no_ack_overtakes_another() {
        let mut acks = Acks::default();
        add(&mut acks, [2]);
        assert_eq!(acks.take(), [frame(2, false)]);
        add(&mut acks, [1, 3]);
        assert_eq!(acks.take(), [], "an ack up to 3 could arrive before that of 2");
        assert_eq!(acks.sent(&[true]), [(2, true)]);
        assert_eq!(acks.take(), [frame(3, true)]);
    }

    #[test]
    fn an_ack_that_could_not_be_sent_covers_nothing() {
        let mut acks = Acks::default();
        add(&mut acks, [1]);
        acks.take();
        assert_eq!(acks.sent(&[false]), [(1, false)]);
        add(&mut acks, [2, 3]);
        assert!(acks.take().iter().all(|frame| !frame.multiple));
    }

    #[test]
    fn acks_that_pass_a_long_job_take_no_more_memory() {
        let mut acks = Acks::default();
        for tag in 2..100_000 {
            add(&mut acks, [tag]);
            assert!(send(&mut acks).iter().all(|frame| !frame.multiple));
        }
        assert_eq!(acks.settled_beyond.len(), 1);
        acks.nacked(DeliveryTag(1), true);
        assert!(acks.settled_beyond.is_empty());
    }

    /// Settled jobs, then one whose ack or return could not be sent.
    #[test]
    fn a_closed_channel_keeps_nothing_of_what_was_settled() {
        for is_nacked in [false, true] {
            let mut acks = Acks::default();
            add(&mut acks, [2, 4, 6]);
            send(&mut acks);
            assert_eq!(acks.counts(), (0, 3));
            if is_nacked {
                acks.nacked(DeliveryTag(1), false);
            } else {
                add(&mut acks, [1]);
                acks.take();
                acks.sent(&[false]);
            }
            assert_eq!(acks.counts(), (0, 0));
            add(&mut acks, [3, 5, 7]);
            assert!(send(&mut acks).iter().all(|frame| !frame.multiple));
            assert_eq!(acks.counts(), (0, 0));
        }
    }

    proptest! {
        /// A broker that knows every delivery: whatever the order and wherever acks are taken and sent, each delivery is
        /// acknowledged once, and none that is not settled.
        #[test]
        fn nothing_is_acknowledged_before_it_is_settled(
            order in Just((1..=40_u64).collect::<Vec<_>>()).prop_shuffle(),
            nacked in prop::collection::vec(prop::bool::weighted(0.1), 40),
            takes in prop::collection::vec(prop::bool::weighted(0.3), 40),
            sends in prop::collection::vec(prop::bool::weighted(0.3), 40),
        ) {
            let mut acks = Acks::default();
            let mut at_broker: BTreeSet<u64> = (1..=40).collect();
            let mut due = BTreeSet::new();
            let mut frames: Vec<AckFrame> = Vec::new();
            let steps = order.into_iter().zip(nacked).zip(takes.into_iter().zip(sends)).map(|(tag, both)| (Some(tag), both));
            // In the end all is sent, taken once more, and sent.
            for (settled, (take, send)) in steps.chain([(None, (true, true)), (None, (true, true))]) {
                match settled {
                    Some((tag, true)) => {
                        acks.nacked(DeliveryTag(tag), true);
                        prop_assert!(at_broker.remove(&tag));
                    }
                    Some((tag, false)) => {
                        add(&mut acks, [tag]);
                        due.insert(tag);
                    }
                    None => {}
                }
                if take {
                    frames.extend(acks.take());
                }
                if send {
                    for frame in &frames {
                        let last = frame.tag().0;
                        let acked: Vec<_> =
                            if frame.multiple { at_broker.range(..=last).copied().collect() } else { vec![last] };
                        for tag in acked {
                            prop_assert!(due.remove(&tag), "{} is not due", tag);
                            prop_assert!(at_broker.remove(&tag));
                        }
                    }
                    acks.sent(&vec![true; frames.len()]);
                    frames.clear();
                }
            }
            prop_assert!(at_broker.is_empty() && due.is_empty());
        }
    }
}
