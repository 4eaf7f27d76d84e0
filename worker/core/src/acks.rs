//! Acknowledging several deliveries of a channel with one frame.
//!
//! A broker numbers the deliveries of a channel from 1 on without gaps, and takes "all up to this one" for an answer. That
//! is said here only where it was told of each of those before, or is told now: a number that was never heard of may be a job
//! on its way, and holds all others back to acks of their own.

use std::collections::BTreeMap;

use crate::ids::DeliveryTag;

/// The deliveries of one channel that the broker was told of, and those whose ack is due.
#[derive(Debug)]
pub struct Acks<T> {
    /// It was told of all deliveries up to this one.
    told_up_to: u64,
    /// Others that it was told of: the first and the last of each run. There are no more runs than deliveries in hand.
    beyond: BTreeMap<u64, u64>,
    due: BTreeMap<u64, T>,
    /// Some are on their way. The next wait for them: an ack must not overtake one that it would cover.
    under_way: bool,
}

/// An ack to send. Only this module makes one: nothing else can acknowledge a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckFrame {
    tag: DeliveryTag,
    multiple: bool,
}

impl AckFrame {
    /// The delivery that it names.
    pub fn tag(self) -> DeliveryTag {
        self.tag
    }

    /// It covers all deliveries of the channel up to that one.
    pub fn is_multiple(self) -> bool {
        self.multiple
    }
}

/// One ack.
#[derive(Debug, PartialEq, Eq)]
pub struct Ack<T> {
    /// It is for all that came before the last of these as well.
    pub multiple: bool,
    /// What is acknowledged by it, in the order of delivery; never empty.
    pub settled: Vec<T>,
}

impl<T> Default for Acks<T> {
    fn default() -> Self {
        Self { told_up_to: 0, beyond: BTreeMap::new(), due: BTreeMap::new(), under_way: false }
    }
}

impl<T> Acks<T> {
    /// The ack of a delivery is due.
    pub fn add(&mut self, tag: u64, settled: T) {
        self.due.insert(tag, settled);
    }

    /// The broker was told of a delivery.
    pub fn told(&mut self, tag: u64) {
        let mut first = tag;
        if let Some((&start, &end)) = self.beyond.range(..tag).next_back()
            && end + 1 == tag
        {
            first = start;
        }
        let last = self.beyond.remove(&(tag + 1)).unwrap_or(tag);
        if first == self.told_up_to + 1 {
            self.told_up_to = last;
            self.beyond.remove(&first);
        } else {
            self.beyond.insert(first, last);
        }
    }

    /// The acks that are due, in as few frames as the order allows; none while others are under way.
    pub fn take(&mut self) -> Vec<Ack<T>> {
        if self.under_way || self.due.is_empty() {
            return Vec::new();
        }
        self.under_way = true;
        let mut settled = Vec::new();
        let mut next = self.told_up_to + 1;
        loop {
            if let Some(due) = self.due.remove(&next) {
                settled.push(due);
                next += 1;
            } else if let Some(last) = self.beyond.get(&next) {
                next = last + 1;
            } else {
                break;
            }
        }
        let mut acks = Vec::new();
        if !settled.is_empty() {
            acks.push(Ack { multiple: settled.len() > 1, settled });
        }
        let alone = std::mem::take(&mut self.due).into_values();
        acks.extend(alone.map(|settled| Ack { multiple: false, settled: vec![settled] }));
        acks
    }

    /// Those that were taken have been sent, as far as that was possible.
    pub fn sent(&mut self) {
        self.under_way = false;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Takes the acks that are due, and sends them.
    fn send(acks: &mut Acks<u64>) -> Vec<Ack<u64>> {
        let taken = acks.take();
        taken.iter().flat_map(|ack| &ack.settled).for_each(|tag| acks.told(*tag));
        acks.sent();
        taken
    }

    #[test]
    fn what_is_settled_in_order_is_acknowledged_at_once() {
        let mut acks = Acks::default();
        for tag in [2, 1, 3] {
            acks.add(tag, tag);
        }
        assert_eq!(send(&mut acks), [Ack { multiple: true, settled: vec![1, 2, 3] }]);
        acks.add(4, 4);
        assert_eq!(send(&mut acks), [Ack { multiple: false, settled: vec![4] }]);
        assert_eq!(send(&mut acks), []);
    }

    #[test]
    fn a_delivery_that_was_never_settled_holds_the_others_apart() {
        let mut acks = Acks::default();
        for tag in [1, 3, 4] {
            acks.add(tag, tag);
        }
        let alone = |tag| Ack { multiple: false, settled: vec![tag] };
        assert_eq!(send(&mut acks), [alone(1), alone(3), alone(4)]);
        acks.told(2);
        for tag in [6, 5] {
            acks.add(tag, tag);
        }
        assert_eq!(send(&mut acks), [Ack { multiple: true, settled: vec![5, 6] }]);
    }

    #[test]
    fn no_ack_overtakes_another() {
        let mut acks = Acks::default();
        acks.add(2, 2);
        assert_eq!(acks.take(), [Ack { multiple: false, settled: vec![2] }]);
        acks.add(1, 1);
        acks.add(3, 3);
        assert_eq!(acks.take(), [], "an ack up to 3 could be there before that of 2");
        acks.told(2);
        acks.sent();
        assert_eq!(acks.take(), [Ack { multiple: true, settled: vec![1, 3] }]);
    }

    #[test]
    fn an_ack_that_could_not_be_sent_covers_nothing() {
        let mut acks = Acks::default();
        acks.add(1, 1);
        acks.take();
        acks.sent();
        for tag in [2, 3] {
            acks.add(tag, tag);
        }
        assert!(acks.take().iter().all(|ack| !ack.multiple));
    }

    #[test]
    fn a_long_job_costs_no_memory_for_those_that_pass_it() {
        let mut acks = Acks::default();
        for tag in 2..100_000 {
            acks.add(tag, tag);
            assert!(send(&mut acks).iter().all(|ack| !ack.multiple));
        }
        assert_eq!(acks.beyond.len(), 1);
        acks.told(1);
        assert!(acks.beyond.is_empty());
    }

    proptest! {
        /// A broker that knows every delivery: whatever the order and wherever acks are taken and sent, each delivery is
        /// acknowledged once, and none that is not settled.
        #[test]
        fn nothing_is_acknowledged_before_it_is_settled(
            order in Just((1..=40_u64).collect::<Vec<_>>()).prop_shuffle(),
            told in prop::collection::vec(prop::bool::weighted(0.1), 40),
            takes in prop::collection::vec(prop::bool::weighted(0.3), 40),
            sends in prop::collection::vec(prop::bool::weighted(0.3), 40),
        ) {
            let mut acks = Acks::default();
            // At the broker; those of them whose ack is due; and what is under way.
            let mut open: BTreeSet<u64> = (1..=40).collect();
            let mut due = BTreeSet::new();
            let mut under_way: Vec<Ack<u64>> = Vec::new();
            let steps = order.into_iter().zip(told).zip(takes.into_iter().zip(sends)).map(|(tag, both)| (Some(tag), both));
            // In the end all is sent, taken once more, and sent.
            for (settled, (take, send)) in steps.chain([(None, (true, true)), (None, (true, true))]) {
                match settled {
                    Some((tag, true)) => {
                        acks.told(tag);
                        prop_assert!(open.remove(&tag));
                    }
                    Some((tag, false)) => {
                        acks.add(tag, tag);
                        due.insert(tag);
                    }
                    None => {}
                }
                if take {
                    under_way.extend(acks.take());
                }
                if send {
                    for ack in under_way.drain(..) {
                        let last = ack.settled[ack.settled.len() - 1];
                        let acknowledged: Vec<_> =
                            if ack.multiple { open.range(..=last).copied().collect() } else { vec![last] };
                        prop_assert_eq!(&acknowledged, &ack.settled);
                        for tag in acknowledged {
                            prop_assert!(due.remove(&tag), "{} is not due", tag);
                            prop_assert!(open.remove(&tag));
                            acks.told(tag);
                        }
                    }
                    acks.sent();
                }
            }
            prop_assert!(open.is_empty() && due.is_empty());
        }
    }
}
