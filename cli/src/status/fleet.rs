//! The known workers and queues: takes heartbeats and counts, derives presence and rates. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use vramq_amqp::Depth;
use vramq_schemas::status::Heartbeat;

use super::worker_snapshot::{Down, Link, Presence, Rates, WorkerSnapshot};

/// The most workers that are kept: far more than a fleet has, and a bound if a program floods the exchange with names.
const WORKERS_MAX: usize = 1024;

/// The most queues that are counted: each costs a request every few seconds.
const KEYS_MAX: usize = 256;

/// The most further queues of a model that are counted; a worker has at most seven.
const FURTHER_MAX: usize = 16;

/// How long a worker is shown after it left, and after it became silent.
const LEFT_SHOWN: Duration = Duration::from_secs(15);
const SILENT_SHOWN: Duration = Duration::from_secs(60);

/// Identifies a worker's process. The name is not enough: two workers may have the same one, and a restarted worker keeps its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Identity {
    worker: String,
    host: String,
    pid: u32,
    started_at_ms: u64,
}

/// All known workers and queues.
#[derive(Debug)]
pub(super) struct Fleet {
    workers: BTreeMap<Identity, WorkerSnapshot>,
    /// By routing key.
    queues: BTreeMap<String, Known>,
    pub(super) link: Link,
    /// Whether the exchange of heartbeats exists, so workers have been on this virtual host. `None` until the broker was asked.
    pub(super) has_exchange: Option<bool>,
    /// Heartbeats that could not be read, or exceeded the most workers.
    pub(super) unreadable: u64,
}

/// What is known of a model's queues.
#[derive(Debug, Default)]
struct Known {
    /// Further queues that the model's jobs come from, as workers report them.
    further: BTreeSet<String>,
    /// `None` until counted.
    counted: Option<Counted>,
}

/// The queues to count, by a model's routing key: those that vramq names, and the further ones that its jobs come from.
pub(super) type ToCount = BTreeMap<String, BTreeSet<String>>;

/// The queues of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) jobs: Depth,
    /// Large jobs, which workers moved here unrun.
    pub(super) bulk: Depth,
    pub(super) suspects: Depth,
    pub(super) dead: Depth,
    /// Where its jobs come from besides its own queue.
    pub(super) further: Vec<(String, Depth)>,
}

/// The queues of a model, with what its workers report.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Queue<'a> {
    pub(super) key: &'a str,
    pub(super) counted: Option<&'a Counted>,
    /// Workers that consume the jobs, by their heartbeats. The broker's count of consumers says less: a worker has several.
    pub(super) workers: usize,
    pub(super) in_hand: u64,
    /// `None` until one of its workers has sent two heartbeats.
    pub(super) rates: Option<Rates>,
}

impl Fleet {
    /// With the keys of models from the arguments.
    pub(super) fn new(keys: &[String], now: Instant) -> Self {
        Self {
            workers: BTreeMap::new(),
            queues: keys.iter().map(|key| (key.clone(), Known::default())).collect(),
            link: Link::Down { since: now, why: Down::Connecting },
            has_exchange: None,
            unreadable: 0,
        }
    }

    pub(super) fn connected(&mut self, now: Instant) {
        self.link = Link::Up { since: now };
    }

    pub(super) fn lost(&mut self, why: Down, now: Instant) {
        let since = match self.link {
            Link::Down { since, .. } => since,
            Link::Up { .. } => now,
        };
        self.link = Link::Down { since, why };
    }

    /// Adds a message of the exchange of heartbeats.
    pub(super) fn heard(&mut self, body: &[u8], now: Instant) {
        let read = serde_json::from_slice::<Heartbeat>(body);
        // All fields have defaults; only a heartbeat with a name is one.
        let Some(heartbeat) = read.ok().filter(|heartbeat| !heartbeat.worker.is_empty()) else {
            self.unreadable += 1;
            return;
        };
        let identity = Identity {
            worker: heartbeat.worker.clone(),
            host: heartbeat.host.clone(),
            pid: heartbeat.pid,
            started_at_ms: heartbeat.started_at_ms,
        };
        if self.workers.len() >= WORKERS_MAX && !self.workers.contains_key(&identity) {
            self.unreadable += 1;
            return;
        }
        for model in &heartbeat.models {
            if self.queues.len() >= KEYS_MAX && !self.queues.contains_key(&model.key) {
                continue;
            }
            let known = self.queues.entry(model.key.clone()).or_default();
            for queue in model.queues.iter().skip(1) {
                if known.further.len() < FURTHER_MAX {
                    known.further.insert(queue.queue.clone());
                }
            }
        }
        match self.workers.get_mut(&identity) {
            Some(snapshot) => snapshot.take(heartbeat, now),
            None => {
                self.workers.insert(identity, WorkerSnapshot::new(heartbeat, now));
            }
        }
    }

    pub(super) fn counted(&mut self, key: &str, counted: Counted) {
        if let Some(queue) = self.queues.get_mut(key) {
            queue.counted = Some(counted);
        }
    }

    pub(super) fn to_count(&self) -> ToCount {
        self.queues.iter().map(|(key, known)| (key.clone(), known.further.clone())).collect()
    }

    /// The keys of models that may have dead letters, by the broker's last count.
    pub(super) fn with_letters(&self) -> Vec<String> {
        let has = |counted: &Counted| match counted.dead {
            // Letters that another operator holds do not count as ready, but that operator's consumer does.
            Depth::Messages { ready, consumers } => ready > 0 || consumers > 0,
            Depth::NoQueue => false,
            // Reading them will fail with an error that names the missing permission.
            Depth::NoPermission => true,
        };
        let queues = self.queues.iter().filter(|(_, known)| known.counted.as_ref().is_some_and(has));
        queues.map(|(key, _)| key.clone()).collect()
    }

    /// Removes workers that have been shown as gone or silent for long enough.
    pub(super) fn forget(&mut self, now: Instant) {
        let link = self.link.clone();
        self.workers.retain(|_, snapshot| {
            let unheard = snapshot.unheard(&link, now);
            match snapshot.presence(&link, now) {
                Presence::Here => true,
                Presence::Left => unheard < LEFT_SHOWN,
                Presence::Silent => unheard < snapshot.last.silence_max() + SILENT_SHOWN,
            }
        });
    }

    /// Workers by name, with their presence.
    pub(super) fn workers(&self, now: Instant) -> impl Iterator<Item = (&WorkerSnapshot, Presence)> {
        self.workers.values().map(move |snapshot| (snapshot, snapshot.presence(&self.link, now)))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }

    pub(super) fn queues(&self, now: Instant) -> Vec<Queue<'_>> {
        let mut queues: BTreeMap<&str, Queue<'_>> = BTreeMap::new();
        for (key, Known { counted, .. }) in &self.queues {
            queues.insert(key, Queue { key, counted: counted.as_ref(), workers: 0, in_hand: 0, rates: None });
        }
        for (snapshot, _) in self.workers(now).filter(|(_, presence)| *presence == Presence::Here) {
            for model in &snapshot.last.models {
                let Some(queue) = queues.get_mut(model.key.as_str()) else { continue };
                queue.workers += usize::from(model.consuming);
                queue.in_hand = queue.in_hand.saturating_add(model.in_hand);
                if let Some(rates) = snapshot.rates.get(&model.model) {
                    let sum = queue.rates.get_or_insert_default();
                    sum.jobs_per_s += rates.jobs_per_s;
                    sum.items_per_s += rates.items_per_s;
                }
            }
        }
        queues.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use vramq_schemas::status::{Counters, ModelStatus, WorkerState};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn heartbeat(worker: &str, sent_at_ms: u64, answered: u64) -> Heartbeat {
        let counters = Counters { answered, items: answered.saturating_mul(32), ..Counters::default() };
        Heartbeat {
            worker: worker.to_owned(),
            pid: 1,
            sent_at_ms,
            interval_ms: 1_000,
            state: WorkerState::Consuming,
            models: vec![ModelStatus {
                model: "m".to_owned(),
                key: "k".to_owned(),
                in_hand: 3,
                consuming: true,
                counters,
                ..ModelStatus::default()
            }],
            ..Heartbeat::default()
        }
    }

    fn hear(fleet: &mut Fleet, heartbeat: &Heartbeat, now: Instant) {
        fleet.heard(&serde_json::to_vec(heartbeat).unwrap(), now);
    }

    fn fleet(now: Instant) -> Fleet {
        let mut fleet = Fleet::new(&[], now);
        fleet.connected(now);
        fleet
    }

    fn presences(fleet: &Fleet, now: Instant) -> Vec<(String, Presence)> {
        fleet.workers(now).map(|(snapshot, presence)| (snapshot.last.worker.clone(), presence)).collect()
    }

    #[test]
    fn rates_are_differences_by_the_workers_clock() {
        let start = Instant::now();
        let mut fleet = fleet(start);
        hear(&mut fleet, &heartbeat("a", 10_000, 100), start);
        assert_eq!(fleet.queues(start)[0].rates, None);
        // A heartbeat for a change of state comes too soon to compute a rate.
        hear(&mut fleet, &heartbeat("a", 10_010, 101), start);
        assert_eq!(fleet.queues(start)[0].rates, None);
        // A heartbeat that arrives late: rates use the time of sending.
        hear(&mut fleet, &heartbeat("a", 12_000, 120), start + 9 * SECOND);
        let rates = Rates { jobs_per_s: 10.0, items_per_s: 320.0 };
        let now = start + 9 * SECOND;
        assert_eq!(fleet.queues(now)[0].rates, Some(rates));
        hear(&mut fleet, &heartbeat("b", 1, 7), now);
        hear(&mut fleet, &heartbeat("b", 1_001, 17), now);
        let queues = fleet.queues(now);
        assert_eq!((queues[0].key, queues[0].in_hand, queues.len()), ("k", 6, 1));
        assert_eq!(queues[0].workers, 2);
        assert_eq!(queues[0].rates, Some(Rates { jobs_per_s: 20.0, items_per_s: 640.0 }));
        // After counters that fall, or a clock that was set back, there is no rate.
        hear(&mut fleet, &heartbeat("b", 500, 3), now);
        hear(&mut fleet, &heartbeat("b", 2_500, 23), now);
        assert_eq!(fleet.queues(now)[0].rates, Some(Rates { jobs_per_s: 20.0, items_per_s: 640.0 }));
    }

    #[test]
    fn a_silent_worker_is_shown_as_such_and_then_removed() {
        let start = Instant::now();
        let mut fleet = fleet(start);
        hear(&mut fleet, &heartbeat("a", 1, 0), start);
        let at = |seconds| start + SECOND * seconds;
        assert_eq!(presences(&fleet, at(3)), [("a".to_owned(), Presence::Here)]);
        assert_eq!(presences(&fleet, at(4)), [("a".to_owned(), Presence::Silent)]);
        // The broker requeues the jobs of a silent worker.
        assert_eq!((fleet.queues(at(3))[0].in_hand, fleet.queues(at(4))[0].in_hand), (3, 0));
        assert_eq!((fleet.queues(at(3))[0].workers, fleet.queues(at(4))[0].workers), (1, 0));
        fleet.forget(at(62));
        assert_eq!(fleet.workers(at(62)).count(), 1);
        fleet.forget(at(63));
        assert!(fleet.is_empty());
    }

    #[test]
    fn a_worker_that_left_is_not_silent_and_its_successor_is_another_worker() {
        let start = Instant::now();
        let mut fleet = fleet(start);
        hear(&mut fleet, &heartbeat("a", 1, 0), start);
        hear(&mut fleet, &Heartbeat { state: WorkerState::Gone, ..heartbeat("a", 2, 0) }, start);
        hear(&mut fleet, &Heartbeat { pid: 2, ..heartbeat("a", 3, 0) }, start);
        let here = ("a".to_owned(), Presence::Here);
        assert_eq!(presences(&fleet, start), [("a".to_owned(), Presence::Left), here.clone()]);
        fleet.forget(start + 2 * SECOND);
        assert_eq!(fleet.workers(start).count(), 2);
        hear(&mut fleet, &Heartbeat { pid: 2, ..heartbeat("a", 9, 0) }, start + LEFT_SHOWN);
        fleet.forget(start + LEFT_SHOWN);
        assert_eq!(presences(&fleet, start + LEFT_SHOWN), [here]);
    }

    #[test]
    fn no_worker_is_silent_while_the_broker_is_away() {
        let start = Instant::now();
        let mut fleet = fleet(start);
        hear(&mut fleet, &heartbeat("a", 1, 0), start);
        fleet.lost(Down::Unreachable("gone".to_owned()), start + SECOND);
        fleet.lost(Down::Refused("still gone".to_owned()), start + 2 * SECOND);
        let later = start + 300 * SECOND;
        let why = Down::Refused("still gone".to_owned());
        assert_eq!(fleet.link, Link::Down { since: start + SECOND, why });
        fleet.forget(later);
        assert_eq!(presences(&fleet, later), [("a".to_owned(), Presence::Here)]);
        // Its three intervals count from the reconnection.
        fleet.connected(later);
        assert_eq!(presences(&fleet, later + 3 * SECOND), [("a".to_owned(), Presence::Here)]);
        assert_eq!(presences(&fleet, later + 4 * SECOND), [("a".to_owned(), Presence::Silent)]);
    }

    #[test]
    fn foreign_messages_cost_little() {
        let start = Instant::now();
        let mut fleet = fleet(start);
        for body in [&b""[..], b"[]", b"{}", b"{\"worker\": 1}", b"\xff\xfe"] {
            fleet.heard(body, start);
        }
        assert_eq!((fleet.unreadable, fleet.is_empty()), (5, true));
        let endless = Heartbeat { interval_ms: u64::MAX, ..heartbeat("endless", u64::MAX, u64::MAX) };
        hear(&mut fleet, &endless, start);
        hear(&mut fleet, &Heartbeat { sent_at_ms: 0, ..endless }, start);
        for number in 0..2 * WORKERS_MAX {
            let mut extra = heartbeat(&number.to_string(), 1, 0);
            extra.models[0].key = number.to_string();
            hear(&mut fleet, &extra, start);
        }
        assert_eq!((fleet.workers(start).count(), fleet.to_count().len()), (WORKERS_MAX, KEYS_MAX));
        assert!(fleet.unreadable > 5);
        fleet.forget(start + 4000 * SECOND);
        assert!(fleet.is_empty());
    }

    #[test]
    fn models_with_letters_are_known_by_their_counts() {
        let mut fleet = Fleet::new(
            &["empty", "gone", "read", "refused", "some", "unknown"].map(str::to_owned),
            Instant::now(),
        );
        let some = |ready, consumers| Depth::Messages { ready, consumers };
        for (key, dead) in [
            ("empty", some(0, 0)),
            ("gone", Depth::NoQueue),
            ("read", some(0, 1)),
            ("refused", Depth::NoPermission),
            ("some", some(3, 0)),
        ] {
            let [jobs, bulk, suspects] = [Depth::NoQueue; 3];
            fleet.counted(key, Counted { jobs, bulk, suspects, dead, further: Vec::new() });
        }
        assert_eq!(fleet.with_letters(), ["read", "refused", "some"]);
    }
}
