//! Which addresses for direct replies may make the broker close the connection, by what it did before. Pure.
//!
//! Any client may write addresses without end over which RabbitMQ 3.10 closes the connection: [`Process`] says which. So a reply is
//! published beside others only if the broker confirmed one to the same node before, with numbers of as many bits. All others are
//! published alone, so that none is lost or repeated because of them, and there is a limit to the connections that they cost.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::publishers::direct_address::Process;

/// The most nodes that are remembered; the oldest are forgotten. A cluster has fewer. Only a broker that takes addresses of any node can
/// confirm more: it closes no connection over them, and a node that is forgotten costs one reply that is published alone.
const PROVEN_MAX: usize = 64;

/// How many connections the broker may close within [`COUNTED_FOR`] before addresses that are not proven get no replies. A few nodes may
/// leave the cluster at once, and cost one or two each. While a connection is opened again, no direct reply is published: 6 times a
/// minute, at a few hundred milliseconds each, callers hardly notice.
pub(super) const CUTS_MAX: usize = 6;

/// For how long the worker publishes nothing to an address over which the broker closed the connection, and this cut counts.
pub(super) const COUNTED_FOR: Duration = Duration::from_secs(60);

/// What may be done with a reply to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It may be published beside others.
    Proven,
    /// It may be published while no other is unconfirmed.
    Unproven,
    /// It may not be published.
    Barred,
}

/// The nodes of callers that were answered, and the addresses over which the broker closed the connection.
#[derive(Debug, Default)]
pub(super) struct ProvenNodes {
    /// One of each node, with the most bits of its numbers that the broker took. Oldest first.
    proven: VecDeque<Process>,
    /// With the fewest bits over which the broker closed the connection; 0 if the node is gone. Oldest first. At most
    /// [`CUTS_MAX`], and one more for each node that was proven.
    cuts: VecDeque<(Process, Instant)>,
}

impl ProvenNodes {
    pub(super) fn standing(&mut self, process: Process, now: Instant) -> Standing {
        while self.cuts.front().is_some_and(|(_, at)| now.duration_since(*at) > COUNTED_FOR) {
            self.cuts.pop_front();
        }
        let is_like = |cut: &Process| {
            (cut.node, cut.creation) == (process.node, process.creation)
                && cut.id_bits <= process.id_bits
                && cut.serial_bits <= process.serial_bits
        };
        if self.cuts.iter().any(|(cut, _)| is_like(cut)) {
            Standing::Barred
        } else if self.is_proven(process) {
            Standing::Proven
        } else if self.has_cuts_left() {
            Standing::Unproven
        } else {
            Standing::Barred
        }
    }

    /// Whether addresses that are not proven still get replies, by the last moment that was given.
    pub(super) fn has_cuts_left(&self) -> bool {
        self.cuts.len() < CUTS_MAX
    }

    /// The broker took a reply to this process.
    pub(super) fn confirmed(&mut self, process: Process) {
        if let Some(known) = self.proven.iter_mut().find(|known| known.node == process.node) {
            known.id_bits = known.id_bits.max(process.id_bits);
            known.serial_bits = known.serial_bits.max(process.serial_bits);
            return;
        }
        if self.proven.len() >= PROVEN_MAX {
            self.proven.pop_front();
        }
        self.proven.push_back(process);
    }

    /// The broker closed the connection over a reply to this process, which was alone on it.
    pub(super) fn closed_over(&mut self, process: Process, now: Instant) {
        // What was proven can only have become wrong because the node is gone, with all its processes.
        let gone = Process { id_bits: 0, serial_bits: 0, ..process };
        let cut = if self.is_proven(process) { gone } else { process };
        self.proven.retain(|known| cut != gone || known.node != process.node);
        self.cuts.push_back((cut, now));
    }

    fn is_proven(&self, process: Process) -> bool {
        self.proven.iter().any(|known| {
            known.node == process.node
                && known.id_bits >= process.id_bits
                && known.serial_bits >= process.serial_bits
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn process(node: u32, id_bits: u32) -> Process {
        Process { node, creation: 1, id_bits, serial_bits: 0 }
    }

    #[test]
    fn a_confirm_proves_the_node_and_numbers_of_as_many_bits() {
        let (mut nodes, now) = (ProvenNodes::default(), Instant::now());
        assert_eq!(nodes.standing(process(1, 10), now), Standing::Unproven);
        nodes.confirmed(process(1, 10));
        nodes.confirmed(process(1, 4));
        let restarted = Process { creation: 2, ..process(1, 10) };
        for proven in [process(1, 10), process(1, 1), restarted] {
            assert_eq!(nodes.standing(proven, now), Standing::Proven, "{proven:?}");
        }
        let serial = Process { serial_bits: 1, ..process(1, 10) };
        for other in [process(1, 11), process(2, 10), serial] {
            assert_eq!(nodes.standing(other, now), Standing::Unproven, "{other:?}");
        }
    }

    #[test]
    fn a_cut_bars_addresses_like_it_for_a_minute() {
        let (mut nodes, now) = (ProvenNodes::default(), Instant::now());
        nodes.confirmed(process(1, 15));
        nodes.closed_over(process(1, 16), now);
        assert_eq!(nodes.standing(process(1, 15), now), Standing::Proven, "the node lives");
        for barred in [process(1, 16), process(1, 32)] {
            assert_eq!(nodes.standing(barred, now + COUNTED_FOR), Standing::Barred, "{barred:?}");
        }
        let later = now + COUNTED_FOR + Duration::from_nanos(1);
        assert_eq!(nodes.standing(process(1, 16), later), Standing::Unproven);
    }

    #[test]
    fn a_node_that_is_gone_is_barred_until_it_starts_again() {
        let (mut nodes, now) = (ProvenNodes::default(), Instant::now());
        nodes.confirmed(process(1, 15));
        nodes.confirmed(process(2, 15));
        nodes.closed_over(process(1, 10), now);
        assert_eq!(nodes.standing(process(1, 1), now), Standing::Barred);
        assert_eq!(nodes.standing(process(2, 1), now), Standing::Proven);
        let restarted = Process { creation: 2, ..process(1, 1) };
        assert_eq!(nodes.standing(restarted, now), Standing::Unproven);
        nodes.confirmed(restarted);
        assert_eq!(nodes.standing(restarted, now), Standing::Proven);
    }

    #[test]
    fn after_six_cuts_a_minute_only_proven_nodes_get_replies() {
        let (mut nodes, now) = (ProvenNodes::default(), Instant::now());
        nodes.confirmed(process(0, 15));
        for node in 1..=6 {
            assert_eq!(nodes.standing(process(node, 10), now), Standing::Unproven, "{node}");
            nodes.closed_over(process(node, 10), now);
        }
        assert_eq!(nodes.standing(process(7, 10), now), Standing::Barred);
        assert_eq!(nodes.standing(process(0, 15), now), Standing::Proven);
        let later = now + COUNTED_FOR + Duration::from_nanos(1);
        assert_eq!(nodes.standing(process(7, 10), later), Standing::Unproven);
    }

    proptest! {
        /// Whoever writes addresses that a 3.10 broker does not take: the cuts of a minute have a limit, and callers that were
        /// answered go on.
        #[test]
        fn no_addresses_cost_more_cuts_or_bar_a_proven_caller(
            written in prop::collection::vec((0_u32..200, 1_u32..4, 0_u32..=32, 0_u32..=32), 0..200),
        ) {
            let (mut nodes, now) = (ProvenNodes::default(), Instant::now());
            let caller = Process { node: 0, creation: 1, id_bits: 15, serial_bits: 13 };
            nodes.confirmed(caller);
            let mut cuts = 0;
            for (node, creation, id_bits, serial_bits) in written {
                let process = Process { node, creation, id_bits, serial_bits };
                let is_taken = node == 0 && id_bits <= 15 && serial_bits <= 13;
                match nodes.standing(process, now) {
                    Standing::Barred => {}
                    Standing::Proven => prop_assert!(is_taken),
                    Standing::Unproven if is_taken => nodes.confirmed(process),
                    Standing::Unproven => {
                        cuts += 1;
                        nodes.closed_over(process, now);
                    }
                }
                prop_assert!(cuts <= CUTS_MAX);
                prop_assert_eq!(nodes.standing(caller, now), Standing::Proven);
            }
        }
    }
}
