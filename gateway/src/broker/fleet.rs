//! The workers by their heartbeats: which are alive, which models they serve, how fast they answer jobs. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use serde::Serialize;
use vramq_schemas::status::{
    CeilingStatus, DeviceStatus, HEARTBEATS_MISSED_MAX, Heartbeat, ModelStatus, WorkerState,
};

use super::rates::Rates;

/// Workers that are followed. Beyond them heartbeats are dropped: a flood of made-up names takes no memory.
const WORKERS_MAX: usize = 1_000;

/// Bytes of a heartbeat that is read. One of a hundred models has some 50 KiB.
pub const HEARTBEAT_BYTES_MAX: usize = 256 * 1024;

/// Samples of a worker's memory: ten minutes at the default interval.
const SAMPLES_MAX: usize = 120;

/// Further queues of a model that are counted: each costs a request, and a worker has at most seven.
const FURTHER_QUEUES_MAX: usize = 16;

/// A worker that is gone is shown for so long.
const GONE_SHOWN: Duration = Duration::from_secs(60);

/// All workers that have sent heartbeats.
#[derive(Debug, Default)]
pub struct Fleet {
    workers: HashMap<String, Seen>,
}

#[derive(Debug)]
struct Seen {
    heartbeat: Heartbeat,
    at: Instant,
    rates: Rates,
    samples: VecDeque<Sample>,
}

/// Memory and work at one moment, for the timeline of the page.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    pub at_ms: u64,
    pub total: u64,
    pub used: u64,
    /// Of passes that ran.
    pub held: u64,
    pub slots: u64,
    pub unacknowledged: u64,
    /// Passes that ran out of memory since the sample before.
    pub out_of_memory: u64,
}

/// One worker, as the page shows it.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerView {
    pub worker: String,
    pub version: String,
    pub host: String,
    pub state: WorkerState,
    pub reason: Option<String>,
    pub alive: bool,
    pub silent_ms: u64,
    pub devices: Vec<DeviceStatus>,
    pub models: Vec<ModelStatus>,
    pub learned_limits: Vec<CeilingStatus>,
    pub timeline: Vec<Sample>,
}

/// A model and its workers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ModelView {
    /// Workers that live, and those of them that take jobs.
    pub workers: usize,
    pub consuming: usize,
    pub slots: u64,
    pub unacknowledged: u64,
    /// When the oldest of its workers started, in Unix seconds.
    pub since_s: u64,
    /// Jobs a second that they can answer at least; `None` while nothing was measured.
    pub jobs_per_s: Option<f64>,
}

impl Fleet {
    /// Takes a heartbeat in. `backlog` says whether jobs of a model waited in its queue when they were counted a moment ago.
    pub fn hear(&mut self, body: &[u8], now: Instant, backlog: impl Fn(&str) -> bool) {
        if body.len() > HEARTBEAT_BYTES_MAX {
            return;
        }
        let Ok(heartbeat) = serde_json::from_slice::<Heartbeat>(body) else { return };
        if !self.workers.contains_key(&heartbeat.worker) && self.workers.len() >= WORKERS_MAX {
            self.forget_gone(now);
            if self.workers.len() >= WORKERS_MAX {
                return;
            }
        }
        let before = self.workers.remove(&heartbeat.worker);
        let before = before.filter(|seen| seen.heartbeat.started_at_ms == heartbeat.started_at_ms);
        let (mut rates, mut samples) = (Rates::default(), VecDeque::new());
        let mut out_of_memory = 0;
        if let Some(before) = before {
            out_of_memory = failures(&heartbeat).saturating_sub(failures(&before.heartbeat));
            rates = before.rates;
            samples = before.samples;
            rates.update(&before.heartbeat, &heartbeat, backlog);
        }
        if samples.len() >= SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back(sample(&heartbeat, out_of_memory));
        self.workers.insert(heartbeat.worker.clone(), Seen { heartbeat, at: now, rates, samples });
    }

    /// Models that can be asked for: those of workers that live.
    pub fn models(&self, now: Instant) -> BTreeMap<String, ModelView> {
        let mut models = BTreeMap::<String, ModelView>::new();
        for seen in self.workers.values().filter(|seen| seen.alive(now)) {
            // Jobs are routed by the model's name; a queue under another key is for what workers send on.
            for model in seen.heartbeat.models.iter().filter(|model| model.key == model.model) {
                let view = models.entry(model.model.clone()).or_default();
                let since_s = seen.heartbeat.started_at_ms / 1000;
                view.since_s = if view.workers == 0 { since_s } else { view.since_s.min(since_s) };
                view.workers += 1;
                view.consuming += usize::from(model.consuming);
                view.slots += u64::from(model.slots);
                view.unacknowledged += model.in_hand;
                if let (Some(rate), true) = (seen.rates.get(&model.model), model.consuming) {
                    view.jobs_per_s = Some(view.jobs_per_s.unwrap_or_default() + rate.per_s);
                }
            }
        }
        models
    }

    /// Whether a worker that lives has a model.
    pub fn serves(&self, model: &str, now: Instant) -> bool {
        let mut alive = self.workers.values().filter(|seen| seen.alive(now));
        alive.any(|seen| seen.heartbeat.models.iter().any(|it| it.model == model && it.key == model))
    }

    /// The queues that jobs of a model come from besides its own, as its workers name them.
    pub fn further_queues(&self, model: &str, now: Instant) -> Vec<String> {
        let alive = self.workers.values().filter(|seen| seen.alive(now));
        let of_model = alive
            .flat_map(|seen| &seen.heartbeat.models)
            .filter(|status| status.model == model && status.key == model);
        let named = of_model.flat_map(|status| status.queues.iter().skip(1));
        let names: BTreeSet<_> = named.map(|queue| queue.queue.as_str()).collect();
        names.into_iter().take(FURTHER_QUEUES_MAX).map(str::to_owned).collect()
    }

    /// Jobs of a model that its workers can answer in a second; `None` until one of them had more to do than it could.
    pub fn jobs_per_s(&self, model: &str, now: Instant) -> Option<f64> {
        let serves = |seen: &&Seen| {
            let mut models = seen.heartbeat.models.iter();
            seen.alive(now) && models.any(|it| it.model == model && it.key == model && it.consuming)
        };
        let serving = self.workers.values().filter(serves);
        let rates: Vec<_> = serving.filter_map(|seen| seen.rates.get(model)).collect();
        rates.iter().any(|rate| rate.is_full).then(|| rates.iter().map(|rate| rate.per_s).sum())
    }

    /// Every worker, by name; also who went a moment ago.
    pub fn workers(&self, now: Instant) -> Vec<WorkerView> {
        let mut views: Vec<_> =
            self.workers.values().filter(|seen| !seen.forgotten(now)).map(|seen| seen.view(now)).collect();
        views.sort_by(|a, b| a.worker.cmp(&b.worker));
        views
    }

    fn forget_gone(&mut self, now: Instant) {
        self.workers.retain(|_, seen| !seen.forgotten(now));
    }
}

impl Seen {
    fn alive(&self, now: Instant) -> bool {
        self.heartbeat.state != WorkerState::Gone && now.saturating_duration_since(self.at) <= self.patience()
    }

    fn forgotten(&self, now: Instant) -> bool {
        !self.alive(now) && now.saturating_duration_since(self.at) > self.patience() + GONE_SHOWN
    }

    /// How long it may be silent: bounded, whatever it says of its interval.
    fn patience(&self) -> Duration {
        Duration::from_millis(self.heartbeat.interval_ms.clamp(100, 60_000)) * HEARTBEATS_MISSED_MAX
    }

    fn view(&self, now: Instant) -> WorkerView {
        let Heartbeat { worker, version, host, state, reason, devices, models, ceilings, .. } =
            self.heartbeat.clone();
        WorkerView {
            worker,
            version,
            host,
            state,
            reason,
            alive: self.alive(now),
            silent_ms: u64::try_from(now.saturating_duration_since(self.at).as_millis()).unwrap_or(u64::MAX),
            devices,
            models,
            learned_limits: ceilings,
            timeline: self.samples.iter().cloned().collect(),
        }
    }
}

fn failures(heartbeat: &Heartbeat) -> u64 {
    let counters = heartbeat.models.iter().map(|model| &model.counters);
    counters.map(|c| c.out_of_memory_alone + c.out_of_memory_shared).sum()
}

fn sample(heartbeat: &Heartbeat, out_of_memory: u64) -> Sample {
    let sum = |of: fn(&DeviceStatus) -> u64| heartbeat.devices.iter().map(of).fold(0u64, u64::saturating_add);
    Sample {
        at_ms: heartbeat.sent_at_ms,
        total: sum(|device| device.total),
        used: sum(|device| device.total.saturating_sub(device.free)),
        held: sum(|device| device.held),
        slots: heartbeat.models.iter().map(|model| u64::from(model.slots)).sum(),
        unacknowledged: heartbeat.models.iter().map(|model| model.in_hand).sum(),
        out_of_memory,
    }
}

#[cfg(test)]
mod tests {
    use vramq_amqp::Depth;
    use vramq_schemas::status::{Counters, QueueStatus};

    use super::super::outlook::Queues;
    use super::*;

    fn heartbeat(second: u64, answered: u64) -> Vec<u8> {
        heartbeat_with(second, answered, 0, 0)
    }

    /// With so many unacknowledged jobs, and so many that wait for a pass.
    fn heartbeat_with(second: u64, answered: u64, in_hand: u64, waiting: u64) -> Vec<u8> {
        let counters = Counters { answered, ..Counters::default() };
        let model = ModelStatus {
            model: "m".to_owned(),
            key: "m".to_owned(),
            slots: 4,
            in_hand,
            waiting,
            consuming: true,
            counters,
            ..ModelStatus::default()
        };
        serde_json::to_vec(&Heartbeat {
            worker: "w".to_owned(),
            started_at_ms: 7_000,
            sent_at_ms: second * 1_000,
            interval_ms: 5_000,
            state: WorkerState::Consuming,
            models: vec![model],
            ..Heartbeat::default()
        })
        .unwrap()
    }

    #[test]
    fn a_rate_is_what_a_busy_worker_does_and_at_least_what_an_idle_one_did() {
        let (mut fleet, now) = (Fleet::default(), Instant::now());
        for (second, answered, in_hand, can, why) in [
            (10, 0, 0, None, "nothing was measured"),
            (20, 1, 0, None, "a single job says nothing of a wait"),
            (30, 2, 4, None, "busy at one end"),
            (40, 102, 4, Some(10.0), "busy at both"),
            (50, 102, 4, Some(8.0), "busy, and nothing answered"),
            (60, 102, 0, Some(8.0), "idle: it can still do as much"),
            (70, 102, 0, Some(8.0), "and still"),
            (80, 302, 1, Some(20.0), "it can do more than was known"),
            (90, 303, 1, Some(20.0), "an unacknowledged job, and no backlog: it can still do as much"),
        ] {
            // A backlog that was counted once says nothing of workers without jobs.
            fleet.hear(&heartbeat_with(second, answered, in_hand, 0), now, |_| in_hand == 0);
            assert_eq!(fleet.jobs_per_s("m", now), can, "{second}: {why}");
        }
        assert_eq!(fleet.models(now)["m"].jobs_per_s, Some(20.0));
    }

    #[test]
    fn a_worker_is_busy_if_jobs_wait_in_it_or_for_it() {
        for (in_hand, waiting, backlog, is_busy) in [
            (4, 0, false, true),
            (2, 1, false, true),
            (2, 0, true, true),
            (2, 0, false, false),
            (0, 0, true, false),
        ] {
            let (mut fleet, now) = (Fleet::default(), Instant::now());
            for (second, answered) in [(10, 0), (20, 10)] {
                fleet.hear(&heartbeat_with(second, answered, in_hand, waiting), now, |_| backlog);
            }
            let can = fleet.jobs_per_s("m", now);
            assert_eq!(
                can,
                is_busy.then_some(1.0),
                "{in_hand} unacknowledged, {waiting} wait, backlog: {backlog}"
            );
            assert_eq!(fleet.models(now)["m"].jobs_per_s, Some(1.0));
        }
    }

    #[test]
    fn an_old_count_of_the_queue_makes_no_worker_busy() {
        let counted = Instant::now();
        let mut queues = Queues::default();
        queues.note("m", Depth::Messages { ready: 5, consumers: 1 }, counted);
        for (age_s, can) in [(0, Some(1.0)), (9, Some(1.0)), (10, None), (3_600, None)] {
            let (mut fleet, now) = (Fleet::default(), counted + Duration::from_secs(age_s));
            for (second, answered) in [(10, 0), (20, 10)] {
                let heartbeat = heartbeat_with(second, answered, 1, 0);
                fleet.hear(&heartbeat, now, |model| queues.has_backlog(model, now));
            }
            assert_eq!(fleet.jobs_per_s("m", now), can, "counted {age_s} s ago");
        }
    }

    #[test]
    fn busy_workers_are_estimated_together_with_others() {
        let (mut fleet, now) = (Fleet::default(), Instant::now());
        let of = |worker: &str, heartbeat: Vec<u8>| {
            String::from_utf8(heartbeat)
                .unwrap()
                .replace("\"worker\":\"w\"", &format!("\"worker\":\"{worker}\""))
        };
        for (second, answered) in [(10, 0), (20, 10)] {
            fleet.hear(of("idle", heartbeat(second, answered)).as_bytes(), now, |_| false);
        }
        assert_eq!(fleet.jobs_per_s("m", now), None);
        for (second, answered) in [(10, 0), (20, 40)] {
            fleet.hear(of("busy", heartbeat_with(second, answered, 4, 0)).as_bytes(), now, |_| false);
        }
        assert_eq!(fleet.jobs_per_s("m", now), Some(5.0));
        assert_eq!(fleet.jobs_per_s("m", now + Duration::from_secs(16)), None, "both are silent");
    }

    #[test]
    fn further_queues_are_those_that_living_workers_name() {
        let (mut fleet, now) = (Fleet::default(), Instant::now());
        fleet.hear(&heartbeat(10, 0), now, |_| false);
        assert!(fleet.further_queues("m", now).is_empty());
        let mut with: Heartbeat = serde_json::from_slice(&heartbeat(20, 0)).unwrap();
        let queue = |name: &str| QueueStatus { queue: name.to_owned(), ..QueueStatus::default() };
        with.models[0].queues = vec![queue("vramq.jobs.m"), queue("b"), queue("a"), queue("b")];
        fleet.hear(&serde_json::to_vec(&with).unwrap(), now, |_| false);
        assert_eq!(fleet.further_queues("m", now), ["a", "b"]);
        assert!(fleet.further_queues("other", now).is_empty());
        assert!(fleet.further_queues("m", now + Duration::from_secs(16)).is_empty());
        with.models[0].queues.extend((0..100).map(|at| queue(&at.to_string())));
        fleet.hear(&serde_json::to_vec(&with).unwrap(), now, |_| false);
        assert_eq!(fleet.further_queues("m", now).len(), FURTHER_QUEUES_MAX);
    }

    #[test]
    fn the_silent_and_the_gone_have_no_models() {
        let (mut fleet, now) = (Fleet::default(), Instant::now());
        fleet.hear(&heartbeat(10, 0), now, |_| false);
        assert_eq!(fleet.models(now)["m"].consuming, 1);
        assert!(fleet.serves("m", now) && !fleet.serves("other", now));
        assert!(fleet.models(now + Duration::from_secs(16)).is_empty());
        assert!(!fleet.serves("m", now + Duration::from_secs(16)));
        let workers = fleet.workers(now + Duration::from_secs(16));
        assert!(!workers[0].alive && workers[0].timeline.len() == 1);
        assert!(fleet.workers(now + Duration::from_secs(76)).is_empty());
    }

    #[test]
    fn a_restart_starts_the_counting_again() {
        let (mut fleet, now) = (Fleet::default(), Instant::now());
        fleet.hear(&heartbeat(10, 1_000), now, |_| false);
        let restarted = String::from_utf8(heartbeat(20, 3))
            .unwrap()
            .replace("\"started_at_ms\":7000", "\"started_at_ms\":15000");
        fleet.hear(restarted.as_bytes(), now, |_| false);
        assert_eq!(fleet.jobs_per_s("m", now), None);
    }

    #[test]
    fn made_up_workers_and_garbage_take_no_memory() {
        let (mut fleet, now) = (Fleet::default(), Instant::now());
        for n in 0..WORKERS_MAX + 50 {
            let named = String::from_utf8(heartbeat(10, 0))
                .unwrap()
                .replace("\"worker\":\"w\"", &format!("\"worker\":\"w{n}\""));
            fleet.hear(named.as_bytes(), now, |_| false);
        }
        assert_eq!(fleet.workers.len(), WORKERS_MAX);
        fleet.hear(b"{", now, |_| false);
        fleet.hear(&vec![b' '; HEARTBEAT_BYTES_MAX + 1], now, |_| false);
        assert_eq!(fleet.workers.len(), WORKERS_MAX);
    }
}
