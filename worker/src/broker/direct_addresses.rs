//! What is known of addresses for direct replies: those that the broker took, and those over which it closed the connection. Pure.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;
use std::time::{Duration, Instant};

use lapin::types::ShortString;

use crate::publishers::direct_address::{Origin, origin};

/// How long an address over which the broker closed the connection is remembered. A caller that connects again gets another address.
const LETHAL_FOR: Duration = Duration::from_secs(60);

/// How many connections strangers' addresses may cost within [`LETHAL_FOR`]. Each takes some 100 ms, in which other direct replies wait.
const LETHAL_MAX: usize = 6;

/// Addresses that the broker took. One that was forgotten is published alone once more, which costs a round trip.
const PROVEN_MAX: usize = 4096;

/// Nodes of a cluster, each with its last starts.
const ORIGINS_MAX: usize = 64;

/// How a reply to an address is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Treatment {
    /// With others.
    Beside,
    /// While no other reply is unconfirmed: the broker may close the connection over it.
    Alone,
    /// Not at all.
    Drop,
}

/// What the broker did with addresses.
#[derive(Debug, Default)]
pub(super) struct KnownAddresses {
    proven: Recent<ShortString, PROVEN_MAX>,
    /// Where proven addresses come from.
    origins: Recent<Origin, ORIGINS_MAX>,
    /// Over each the broker closed a connection, at that moment. Bounded: beyond [`LETHAL_MAX`] only proven origins add to them, each once.
    lethal: VecDeque<(ShortString, Instant)>,
}

impl KnownAddresses {
    /// A new address is tried alone. When too many of them cost a connection, only those are tried that come from where others were
    /// proven, and none was lethal.
    pub(super) fn treatment(&mut self, address: &ShortString, now: Instant) -> Treatment {
        while self.lethal.front().is_some_and(|(_, at)| now.saturating_duration_since(*at) > LETHAL_FOR) {
            self.lethal.pop_front();
        }
        if self.lethal.iter().any(|(lethal, _)| lethal == address) {
            Treatment::Drop
        } else if self.proven.contains(address) {
            Treatment::Beside
        } else if self.lethal.len() < LETHAL_MAX || self.is_of_proven_origin(address) {
            Treatment::Alone
        } else {
            Treatment::Drop
        }
    }

    fn is_of_proven_origin(&self, address: &ShortString) -> bool {
        let Some(origin_of_it) = origin(address.as_str()) else { return false };
        let is_lethal = self.lethal.iter().any(|(lethal, _)| origin(lethal.as_str()) == Some(origin_of_it));
        !is_lethal && self.origins.contains(&origin_of_it)
    }

    /// The broker took a reply to this address, whether or not the caller is still there.
    pub(super) fn took(&mut self, address: &ShortString) {
        if !self.proven.contains(address) {
            self.proven.insert(address.clone());
            if let Some(origin) = origin(address.as_str()) {
                self.origins.insert(origin);
            }
        }
    }

    /// The broker closed the connection over this address.
    pub(super) fn closed_over(&mut self, address: ShortString, now: Instant) {
        self.lethal.push_back((address, now));
    }
}

/// The newest of many values.
#[derive(Debug)]
struct Recent<T, const MAX: usize> {
    known: HashSet<T>,
    in_order: VecDeque<T>,
}

impl<T, const MAX: usize> Default for Recent<T, MAX> {
    fn default() -> Self {
        Self { known: HashSet::new(), in_order: VecDeque::new() }
    }
}

impl<T: Clone + Eq + Hash, const MAX: usize> Recent<T, MAX> {
    fn contains(&self, value: &T) -> bool {
        self.known.contains(value)
    }

    fn insert(&mut self, value: T) {
        if !self.known.insert(value.clone()) {
            return;
        }
        self.in_order.push_back(value);
        if self.in_order.len() > MAX
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publishers::direct_address::tests::address_of;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_new_address_is_tried_alone_and_then_with_others() {
        let (mut known, now) = (KnownAddresses::default(), Instant::now());
        let address = address_of(1, 800);
        assert_eq!(known.treatment(&address, now), Treatment::Alone);
        known.took(&address);
        assert_eq!(known.treatment(&address, now), Treatment::Beside);
        known.closed_over(address.clone(), now);
        assert_eq!(known.treatment(&address, now + LETHAL_FOR), Treatment::Drop);
        assert_eq!(known.treatment(&address, now + LETHAL_FOR + SECOND), Treatment::Beside);
    }

    #[test]
    fn ever_different_lethal_addresses_cost_few_connections() {
        let (mut known, now) = (KnownAddresses::default(), Instant::now());
        known.took(&address_of(0, 800));
        let mut cost = 0;
        for node in 1..1_000 {
            for id in [800, u32::MAX] {
                let address = address_of(node, id);
                if known.treatment(&address, now) == Treatment::Alone {
                    known.closed_over(address, now);
                    cost += 1;
                }
            }
        }
        assert_eq!(cost, LETHAL_MAX);
        // A new caller on a node of callers is answered meanwhile.
        assert_eq!(known.treatment(&address_of(0, 801), now), Treatment::Alone);
        // The processes that are none cost one connection more.
        let forged: Vec<_> = (0..9).map(|at| address_of(0, u32::MAX - at)).collect();
        assert!(forged.iter().all(|address| known.treatment(address, now) == Treatment::Drop));
        assert_eq!(known.treatment(&address_of(0, 802), now), Treatment::Alone);
        let later = now + LETHAL_FOR + SECOND;
        assert_eq!(known.treatment(&address_of(5, 800), later), Treatment::Alone);
    }

    #[test]
    fn an_origin_with_a_lethal_address_is_not_trusted_beyond_the_limit() {
        let (mut known, now) = (KnownAddresses::default(), Instant::now());
        known.took(&address_of(0, 800));
        known.closed_over(address_of(0, 801), now);
        assert_eq!(known.treatment(&address_of(0, 802), now), Treatment::Alone);
        (1..LETHAL_MAX as u32).for_each(|node| known.closed_over(address_of(node, 800), now));
        assert_eq!(known.treatment(&address_of(0, 802), now), Treatment::Drop);
        assert_eq!(known.treatment(&address_of(0, 800), now), Treatment::Beside);
    }

    #[test]
    fn only_the_newest_are_known() {
        let mut recent = Recent::<u32, 2>::default();
        [1, 2, 2, 3].into_iter().for_each(|value| recent.insert(value));
        assert_eq!([1, 2, 3].map(|value| recent.contains(&value)), [false, true, true]);
        assert_eq!(recent.in_order.len(), 2);
    }
}
