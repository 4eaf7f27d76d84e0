//! Predicts what happens to a job of a model: whether a worker serves it, how many jobs wait before it, and for how long it will
//! wait. Pure.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use vramq_amqp::Depth;

/// Models whose queues are remembered: names come from requests.
const QUEUES_MAX: usize = 1_000;

/// How long a count of a queue is used. Jobs published since then are added to it.
const FRESH: Duration = Duration::from_secs(1);

/// How long a count shows whether there is a backlog: two heartbeats at the default interval. A backlog of an older count may have ended.
const BACKLOG_RECENT: Duration = Duration::from_secs(10);

/// The depths of queues, as they were counted.
#[derive(Debug, Default)]
pub struct Queues {
    by_model: HashMap<String, Counted>,
}

#[derive(Debug)]
struct Counted {
    /// The routing key of the queue, if that is not the model's name.
    key: Option<String>,
    depth: Depth,
    at: Instant,
    /// Jobs that this gateway has published since.
    published: u32,
}

/// The prospects of a job: its place in the queue, and its wait.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Jobs that wait in the queue.
    pub depth: u32,
    /// `None` while the workers' rate is not known.
    pub wait: Option<Duration>,
}

impl Outlook {
    /// When a job that is refused now will be accepted, if no others come: a full queue has room again, and the estimated wait is at most
    /// `most`. `None` while the workers' rate is not known.
    pub fn accepted_after(&self, most: Duration) -> Option<Duration> {
        let wait = self.wait?;
        // The wait gets shorter with each job that is taken.
        let one = wait / self.depth.max(1);
        Some(one.max(wait.saturating_sub(most)))
    }
}

impl Queues {
    /// The count of a model's queue, if it is fresh.
    pub fn fresh(&self, model: &str, now: Instant) -> Option<Depth> {
        let counted = self.by_model.get(model)?;
        let fresh = now.saturating_duration_since(counted.at) < FRESH;
        fresh.then(|| counted.with_published())
    }

    /// Takes a count. `key` is that of the queue, if it is not the model's name.
    pub fn note(&mut self, model: &str, key: Option<String>, depth: Depth, now: Instant) {
        if !self.by_model.contains_key(model) {
            self.make_room(now);
            if self.by_model.len() >= QUEUES_MAX {
                return;
            }
        }
        self.by_model.insert(model.to_owned(), Counted { key, depth, at: now, published: 0 });
    }

    /// Forgets counts if there are too many. First those of names that may have no queue: a request can make up any name, and some users may
    /// not ask the broker whether it has a queue. Last old ones with a key: jobs of a model whose key is forgotten go to a queue that does
    /// not exist.
    fn make_room(&mut self, now: Instant) {
        let has_queue = |counted: &Counted| matches!(counted.depth, Depth::Messages { .. });
        let is_fresh = |counted: &Counted| now.saturating_duration_since(counted.at) < FRESH;
        let stays: [&dyn Fn(&Counted) -> bool; 3] = [
            &|counted: &Counted| counted.key.is_some() || has_queue(counted),
            &|counted: &Counted| counted.key.is_some() || is_fresh(counted),
            &is_fresh,
        ];
        for stays in stays {
            if self.by_model.len() < QUEUES_MAX {
                return;
            }
            self.by_model.retain(|_, counted| stays(counted));
        }
    }

    pub fn published(&mut self, model: &str) {
        if let Some(counted) = self.by_model.get_mut(model) {
            counted.published = counted.published.saturating_add(1);
        }
    }

    /// Whether jobs waited when the queue was last counted, within the last 10 s.
    pub fn has_backlog(&self, model: &str, now: Instant) -> bool {
        self.by_model.get(model).is_some_and(|counted| {
            matches!(counted.depth, Depth::Messages { ready: 1.., .. })
                && now.saturating_duration_since(counted.at) < BACKLOG_RECENT
        })
    }

    /// The key under which jobs of a model are published, if that is not its name.
    pub fn key(&self, model: &str) -> Option<&str> {
        self.by_model.get(model)?.key.as_deref()
    }

    /// The last count, however old.
    pub fn last(&self, model: &str) -> Option<Depth> {
        self.by_model.get(model).map(|counted| counted.depth)
    }
}

impl Counted {
    fn with_published(&self) -> Depth {
        match self.depth {
            Depth::Messages { ready, consumers } => {
                Depth::Messages { ready: ready.saturating_add(self.published), consumers }
            }
            other => other,
        }
    }
}

/// How long a job waits behind `depth` others.
pub fn wait(depth: u32, jobs_per_s: Option<f64>) -> Option<Duration> {
    if depth == 0 {
        return Some(Duration::ZERO);
    }
    let rate = jobs_per_s.filter(|rate| *rate > 0.0)?;
    // At most some years: a Duration can hold it.
    Some(Duration::from_secs_f64((f64::from(depth) / rate).min(1e8)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_published_since_the_count_add_to_the_wait() {
        let (mut queues, now) = (Queues::default(), Instant::now());
        queues.note("m", None, Depth::Messages { ready: 3, consumers: 1 }, now);
        queues.published("m");
        queues.published("m");
        assert_eq!(queues.fresh("m", now), Some(Depth::Messages { ready: 5, consumers: 1 }));
        assert_eq!(queues.fresh("m", now + FRESH), None);
    }

    #[test]
    fn a_backlog_is_one_that_was_counted_recently() {
        let (mut queues, now) = (Queues::default(), Instant::now());
        queues.note("m", None, Depth::Messages { ready: 1, consumers: 1 }, now);
        queues.note("empty", None, Depth::Messages { ready: 0, consumers: 1 }, now);
        assert!(queues.has_backlog("m", now) && queues.has_backlog("m", now + Duration::from_secs(9)));
        assert!(!queues.has_backlog("m", now + BACKLOG_RECENT));
        assert!(!queues.has_backlog("empty", now) && !queues.has_backlog("other", now));
    }

    #[test]
    fn a_wait_is_depth_over_rate() {
        assert_eq!(wait(0, None), Some(Duration::ZERO));
        assert_eq!(wait(10, Some(4.0)), Some(Duration::from_millis(2_500)));
        assert_eq!((wait(10, None), wait(10, Some(0.0))), (None, None));
        assert!(wait(u32::MAX, Some(1e-300)).is_some());
    }

    /// Workers that take a job every 1 / rate seconds, and a client that asks again and again.
    #[test]
    fn a_retry_after_is_the_time_until_a_job_is_accepted() {
        for (depth, rate, most_s) in
            [(1, 0.5, 60), (10, 4.0, 60), (1_000, 10.0, 60), (100, 0.5, 0), (500, 100.0, 60), (130, 2.0, 60)]
        {
            let most = Duration::from_secs(most_s);
            let estimate = |depth| Outlook { depth, wait: wait(depth, Some(rate)) };
            let taken = (1..=depth).find(|taken| estimate(depth - taken).wait.unwrap() <= most).unwrap();
            let real = f64::from(taken) / rate;
            let said = estimate(depth).accepted_after(most).unwrap().as_secs_f64();
            assert!((said..=2.0 * said).contains(&(real + 1e-9)), "{depth} at {rate}/s: {said} for {real}");
        }
        assert_eq!(Outlook { depth: 3, wait: None }.accepted_after(Duration::ZERO), None);
        let empty = Outlook { depth: 0, wait: Some(Duration::ZERO) };
        assert_eq!(empty.accepted_after(Duration::ZERO), Some(Duration::ZERO));
    }

    #[test]
    fn names_from_requests_take_bounded_memory() {
        let (mut queues, now) = (Queues::default(), Instant::now());
        let served = Depth::Messages { ready: 0, consumers: 1 };
        for n in 0..QUEUES_MAX + 10 {
            queues.note(&n.to_string(), None, served, now);
        }
        assert_eq!(queues.by_model.len(), QUEUES_MAX);
        queues.note("later", None, Depth::NoQueue, now + FRESH);
        assert_eq!(queues.by_model.len(), 1);
    }

    #[test]
    fn names_that_are_made_up_push_out_no_model() {
        // The second one: to a user of the broker who may not ask about other queues than some.
        for unknown in [Depth::NoQueue, Depth::NoPermission] {
            let (mut queues, now) = (Queues::default(), Instant::now());
            let served = Depth::Messages { ready: 0, consumers: 1 };
            let make_up = |queues: &mut Queues, now: Instant| {
                for n in 0..QUEUES_MAX + 10 {
                    queues.note(&format!("made-up-{n}"), None, unknown, now);
                    assert!(queues.by_model.len() <= QUEUES_MAX);
                }
            };
            let models = [
                ("before", Some("key"), served),
                ("named", None, served),
                ("away", Some("key"), unknown),
                ("meanwhile", Some("key"), served),
            ];
            let [before @ .., meanwhile] = models;
            let note = |queues: &mut Queues, (model, key, depth): (&str, Option<&str>, Depth)| {
                queues.note(model, key.map(str::to_owned), depth, now);
            };
            for model in before {
                note(&mut queues, model);
            }
            make_up(&mut queues, now);
            note(&mut queues, meanwhile);
            make_up(&mut queues, now + Duration::from_secs(60));
            for (model, key, depth) in models {
                assert_eq!((queues.key(model), queues.last(model)), (key, Some(depth)), "{model}");
            }
        }
    }

    #[test]
    fn keys_are_remembered_for_longer_than_other_counts() {
        let (mut queues, now) = (Queues::default(), Instant::now());
        let served = Depth::Messages { ready: 0, consumers: 1 };
        queues.note("model", Some("key".to_owned()), served, now);
        for n in 0..QUEUES_MAX {
            queues.note(&n.to_string(), None, served, now);
        }
        queues.note("later", None, served, now + FRESH);
        assert_eq!((queues.key("model"), queues.by_model.len()), (Some("key"), 2));
        // Their number is bounded, too.
        let mut queues = Queues::default();
        for n in 0..QUEUES_MAX + 10 {
            queues.note(&n.to_string(), Some("key".to_owned()), served, now);
        }
        assert_eq!(queues.by_model.len(), QUEUES_MAX);
        queues.note("later", None, served, now + FRESH);
        assert_eq!(queues.by_model.len(), 1);
    }
}
