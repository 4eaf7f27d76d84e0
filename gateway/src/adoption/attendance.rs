//! Decides from the consumers of a reply queue whether its gateway is gone. No I/O.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use vramq_amqp::Depth;

/// How long a reply queue must be without a consumer before another gateway adopts it. Longer than the 10 s that a disconnected gateway
/// waits at most between two attempts to reconnect.
const GONE_AFTER: Duration = Duration::from_secs(15);

/// How long one count of a queue's consumers is reused. All jobs of a gateway share one reply queue, so requests often ask about the same
/// queue.
const FRESH: Duration = Duration::from_secs(1);

/// An older count is dropped: the owner may have consumed the queue since then. A gateway with a slow result store still counts often
/// enough: before each count it asks the store twice, which takes at most 10 s.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30);

/// The reply queues of other gateways, as they were last seen.
#[derive(Debug, Default)]
pub struct Attendance {
    by_queue: HashMap<String, Seen>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Instant,
    /// When the queue was first seen without a consumer; `None` while it has one.
    alone_since: Option<Instant>,
    exists: bool,
}

/// What is known of the gateway that a reply queue belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The gateway is connected, or may come back.
    Wait,
    /// The gateway is gone. Its replies wait in the queue.
    Gone,
    /// The gateway and its queue are gone.
    Lost,
}

impl Attendance {
    /// The presence by the last count. `None` if that count is missing or too old: count again.
    pub fn fresh(&self, queue: &str, now: Instant) -> Option<Presence> {
        let seen = self.by_queue.get(queue)?;
        (now.saturating_duration_since(seen.at) < FRESH).then(|| seen.presence(now))
    }

    /// Records a count; `depth` is `None` if the broker did not answer.
    pub fn note(&mut self, queue: &str, depth: Option<Depth>, now: Instant) -> Presence {
        self.by_queue.retain(|_, seen| now.saturating_duration_since(seen.at) < FORGOTTEN_AFTER);
        let is_alone = matches!(depth, Some(Depth::Messages { consumers: 0, .. } | Depth::NoQueue));
        let before = self.by_queue.get(queue).and_then(|seen| seen.alone_since);
        let alone_since = is_alone.then_some(before.unwrap_or(now));
        let seen = Seen { at: now, alone_since, exists: depth != Some(Depth::NoQueue) };
        self.by_queue.insert(queue.to_owned(), seen);
        seen.presence(now)
    }

    /// Forgets the counts of a queue, because another gateway has consumed it since.
    pub fn forget(&mut self, queue: &str) {
        self.by_queue.remove(queue);
    }
}

impl Seen {
    fn presence(&self, now: Instant) -> Presence {
        let is_gone =
            self.alone_since.is_some_and(|since| now.saturating_duration_since(since) >= GONE_AFTER);
        match (is_gone, self.exists) {
            (false, _) => Presence::Wait,
            (true, true) => Presence::Gone,
            (true, false) => Presence::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Option<Depth> = Some(Depth::Messages { ready: 1, consumers: 0 });
    const ATTENDED: Option<Depth> = Some(Depth::Messages { ready: 0, consumers: 1 });

    /// The last presence, with a look each second.
    fn after(looks: impl IntoIterator<Item = Option<Depth>>) -> Presence {
        let (mut attendance, start) = (Attendance::default(), Instant::now());
        let presences = looks.into_iter().zip(0..).map(|(look, second)| {
            let now = start + Duration::from_secs(second);
            let presence = attendance.note("q", look, now);
            assert_eq!(attendance.fresh("q", now), Some(presence));
            assert_eq!(attendance.fresh("q", now + FRESH), None);
            presence
        });
        presences.last().unwrap()
    }

    #[test]
    fn a_gateway_is_gone_when_its_queue_has_long_had_no_consumer() {
        assert_eq!(after([ALONE; 15]), Presence::Wait);
        assert_eq!(after([ALONE; 16]), Presence::Gone);
        assert_eq!(after([Some(Depth::NoQueue); 16]), Presence::Lost);
        for other in [ATTENDED, None, Some(Depth::NoPermission)] {
            assert_eq!(after([other; 30]), Presence::Wait);
            assert_eq!(after([ALONE; 15].into_iter().chain([other]).chain([ALONE; 15])), Presence::Wait);
            assert_eq!(after([ALONE; 15].into_iter().chain([other]).chain([ALONE; 16])), Presence::Gone);
        }
    }

    #[test]
    fn a_forgotten_queue_is_observed_from_the_beginning() {
        let (mut attendance, start) = (Attendance::default(), Instant::now());
        attendance.note("q", ALONE, start);
        attendance.note("q", ALONE, start + GONE_AFTER / 2);
        assert_eq!(attendance.note("q", ALONE, start + GONE_AFTER), Presence::Gone);
        attendance.forget("q");
        assert_eq!(attendance.fresh("q", start + GONE_AFTER), None);
        assert_eq!(attendance.note("q", ALONE, start + GONE_AFTER), Presence::Wait);
    }

    #[test]
    fn two_observations_suffice_although_a_slow_store_delays_the_second() {
        let (mut attendance, start) = (Attendance::default(), Instant::now());
        let slow = Duration::from_secs(2 + 2 * 10);
        assert_eq!(attendance.note("q", ALONE, start), Presence::Wait);
        assert_eq!(attendance.note("q", ALONE, start + slow), Presence::Gone);
    }

    #[test]
    fn an_old_observation_does_not_count() {
        let (mut attendance, start) = (Attendance::default(), Instant::now());
        for at in [Duration::ZERO, FORGOTTEN_AFTER] {
            assert_eq!(attendance.note("q", ALONE, start + at), Presence::Wait);
        }
        attendance.note("other", ALONE, start + 2 * FORGOTTEN_AFTER);
        assert_eq!(attendance.by_queue.len(), 1);
    }
}
