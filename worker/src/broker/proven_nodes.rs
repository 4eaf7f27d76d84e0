//! Decides from experience over which direct-reply addresses the broker may close the connection. Pure.
//!
//! A client can write any number of addresses over which RabbitMQ 3.10 closes the connection; [`Process`] says which ones. So a reply is
//! published beside others only if the broker has confirmed one to the same node, with numbers of as many bits. Other replies are published
//! alone, so that no reply is lost or repeated because of them, and the connections that they cost are limited.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::publishers::direct_address::Process;

/// The most nodes that are remembered; the oldest are forgotten. A cluster has fewer. More can only be confirmed by a broker that accepts
/// addresses of any node, and such a broker closes no connection over them. A forgotten node costs one reply that is published alone.
const PROVEN_MAX: usize = 64;

/// How many times the broker may close the connection within [`COUNTED_FOR`] before addresses that are not proven get no replies. A few
/// nodes may leave the cluster at once, and each costs one or two closes. While the connection is opened again, no direct reply is
/// published: at 6 times a minute, a few hundred milliseconds each, callers hardly notice.
pub(super) const CUTS_MAX: usize = 6;

/// How long a cut (the broker closed the connection over an address) counts. The worker publishes nothing to that address meanwhile.
pub(super) const COUNTED_FOR: Duration = Duration::from_secs(60);

/// How a reply to an address may be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeTrust {
    /// Beside other replies.
    Proven,
    /// Alone: while no other reply is unconfirmed.
    Unproven,
    /// Not at all.
    Barred,
}

/// The nodes that confirmed replies, and the addresses over which the broker closed the connection.
#[derive(Debug, Default)]
pub(super) struct ProvenNodes {
    /// One process of each node, with the most number bits that the broker accepted. Oldest first.
    proven: VecDeque<Process>,
    /// Processes with the fewest number bits over which the broker closed the connection; 0 bits if the whole node is gone. Oldest first.
    /// At most [`CUTS_MAX`], and one more for each proven node.
    cuts: VecDeque<(Process, Instant)>,
}

impl ProvenNodes {
    pub(super) fn trust(&mut self, process: Process, now: Instant) -> NodeTrust {
        while self.cuts.front().is_some_and(|(_, at)| now.duration_since(*at) > COUNTED_FOR) {
            self.cuts.pop_front();
        }
        let is_like = |cut: &Process| {
            (cut.node, cut.creation) == (process.node, process.creation)
                && cut.id_bits <= process.id_bits
                && cut.serial_bits <= process.serial_bits
        };
        if self.cuts.iter().any(|(cut, _)| is_like(cut)) {
            NodeTrust::Barred
        } else if self.is_proven(process) {
            NodeTrust::Proven
        } else if self.has_cuts_left() {
            NodeTrust::Unproven
        } else {
            NodeTrust::Barred
        }
    }

    /// Whether addresses that are not proven still get replies, at the time of the last call that had a time.
    pub(super) fn has_cuts_left(&self) -> bool {
        self.cuts.len() < CUTS_MAX
    }

    /// The broker confirmed a reply to this process.
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

    /// The broker closed the connection over a reply to this process. No other reply was in flight.
    pub(super) fn closed_over(&mut self, process: Process, now: Instant) {
        // A proven address fails only because its node is gone, with all its processes.
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
        assert_eq!(nodes.trust(process(1, 10), now), NodeTrust::Unproven);
        nodes.confirmed(process(1, 10));
        nodes.confirmed(process(1, 4));
        let restarted = Process { creation: 2, ..process(1, 10) };
        for proven in [process(1, 10), process(1, 1), restarted] {
            assert_eq!(nodes.trust(proven, now), NodeTrust::Proven, "{proven:?}");
        }
        let serial = Process { serial_bits: 1, ..process(1, 10) };
        for other in [process(1, 11), process(2, 10), serial] {
            assert_eq!(nodes.trust(other, now), NodeTrust::Unproven, "{other:?}");
        }
    }

    #[test]
    fn a_cut_bars_addresses_like_it_for_a_minute() {
        let (mut nodes, now) = (ProvenNodes::default(), Instant::now());
        nodes.confirmed(process(1, 15));
        nodes.closed_over(process(1, 16), now);
        assert_eq!(nodes.trust(process(1, 15), now), NodeTrust::Proven, "the node lives");
        for barred in [process(1, 16), process(1, 32)] {
            assert_eq!(nodes.trust(barred, now + COUNTED_FOR), NodeTrust::Barred, "{barred:?}");
        }
        let later = now + COUNTED_FOR + Duration::from_nanos(1);
        assert_eq!(nodes.trust(process(1, 16), later), NodeTrust::Unproven);
    }

    #[test]
    fn a_node_that_is_gone_is_barred_until_it_starts_again() {
        let (mut nodes, now) = (ProvenNodes::default(), Instant::now());
        nodes.confirmed(process(1, 15));
        nodes.confirmed(process(2, 15));
        nodes.closed_over(process(1, 10), now);
        assert_eq!(nodes.trust(process(1, 1), now), NodeTrust::Barred);
        assert_eq!(nodes.trust(process(2, 1), now), NodeTrust::Proven);
        let restarted = Process { creation: 2, ..process(1, 1) };
        assert_eq!(nodes.trust(restarted, now), NodeTrust::Unproven);
        nodes.confirmed(restarted);
        assert_eq!(nodes.trust(restarted, now), NodeTrust::Proven);
    }

    #[test]
    fn after_six_cuts_a_minute_only_proven_nodes_get_replies() {
        let (mut nodes, now) = (ProvenNodes::default(), Instant::now());
        nodes.confirmed(process(0, 15));
        for node in 1..=6 {
            assert_eq!(nodes.trust(process(node, 10), now), NodeTrust::Unproven, "{node}");
            nodes.closed_over(process(node, 10), now);
        }
        assert_eq!(nodes.trust(process(7, 10), now), NodeTrust::Barred);
        assert_eq!(nodes.trust(process(0, 15), now), NodeTrust::Proven);
        let later = now + COUNTED_FOR + Duration::from_nanos(1);
        assert_eq!(nodes.trust(process(7, 10), later), NodeTrust::Unproven);
    }

    proptest! {
        /// Clients may write addresses that a 3.10 broker does not accept. The cuts of a minute stay limited, and proven callers continue
        /// to get replies.
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
                match nodes.trust(process, now) {
                    NodeTrust::Barred => {}
                    NodeTrust::Proven => prop_assert!(is_taken),
                    NodeTrust::Unproven if is_taken => nodes.confirmed(process),
                    NodeTrust::Unproven => {
                        cuts += 1;
                        nodes.closed_over(process, now);
                    }
                }
                prop_assert!(cuts <= CUTS_MAX);
                prop_assert_eq!(nodes.trust(caller, now), NodeTrust::Proven);
            }
        }
    }
}
