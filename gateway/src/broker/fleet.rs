//! The workers by their heartbeats: which are alive, which models they serve, how fast they answer jobs. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use serde::Serialize;
use vramq_schemas::status::{CeilingStatus, DeviceStatus, Heartbeat, ModelStatus, WorkerState};
use vramq_schemas::topology::check_model_name;

use super::rates::Rates;

/// The most workers that are followed. Heartbeats of further ones are dropped, so that a flood of made-up names takes no memory.
const WORKERS_MAX: usize = 1_000;

/// Bytes of a heartbeat that is read. One of a hundred models has some 50 KiB.
const HEARTBEAT_BYTES_MAX: usize = 256 * 1024;

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
    /// Bytes of the passes that run.
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
    /// Records a heartbeat. `backlog` says whether jobs of a model waited in its queue when they were last counted.
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

    /// The longest time between the heartbeats of a live worker; `None` while none is known.
    pub fn interval(&self, now: Instant) -> Option<Duration> {
        let alive = self.workers.values().filter(|seen| seen.alive(now));
        alive.map(|seen| seen.heartbeat.interval()).max()
    }

    /// Models that can be asked for: those of workers that live.
    pub fn models(&self, now: Instant) -> BTreeMap<String, ModelView> {
        let mut models = BTreeMap::<String, ModelView>::new();
        let keys = self.keys(now);
        for seen in self.workers.values().filter(|seen| seen.alive(now)) {
            let is_reached =
                |model: &&ModelStatus| keys.get(model.model.as_str()) == Some(&model.key.as_str());
            for model in seen.heartbeat.models.iter().filter(is_reached) {
                let view = models.entry(model.model.clone()).or_default();
                let since_s = seen.heartbeat.started_at_ms / 1000;
                view.since_s = if view.workers == 0 { since_s } else { view.since_s.min(since_s) };
                view.workers += 1;
                view.consuming += usize::from(model.consuming);
                view.slots += u64::from(model.slots);
                view.unacknowledged = view.unacknowledged.saturating_add(model.in_hand);
                if let (Some(rate), true) = (seen.rates.get(&model.model), model.consuming) {
                    view.jobs_per_s = Some(view.jobs_per_s.unwrap_or_default() + rate.per_s);
                }
            }
        }
        models
    }

    /// The key by which jobs of each model reach live workers. The model's name, if a worker uses that as its key: other keys are then for
    /// jobs that workers forward. Otherwise the first of the keys.
    fn keys(&self, now: Instant) -> HashMap<&str, &str> {
        let mut keys = HashMap::<&str, &str>::new();
        let alive = self.workers.values().filter(|seen| seen.alive(now));
        for ModelStatus { model, key, .. } in alive.flat_map(|seen| &seen.heartbeat.models) {
            if check_model_name(key).is_ok() {
                let best = keys.entry(model).or_insert(key);
                if *best != model.as_str() && (key == model || key.as_str() < *best) {
                    *best = key;
                }
            }
        }
        keys
    }

    /// The key of a model whose live workers all use another key than its name.
    pub fn other_key(&self, model: &str, now: Instant) -> Option<String> {
        self.keys(now).get(model).filter(|key| **key != model).map(|key| (*key).to_owned())
    }

    /// The model that has `name` as its key, if `name` is no model itself. Workers reject a job that names the key as its model.
    pub fn model_under(&self, name: &str, now: Instant) -> Option<String> {
        let alive = self.workers.values().filter(|seen| seen.alive(now));
        let mut found: Option<&String> = None;
        for status in alive.flat_map(|seen| &seen.heartbeat.models) {
            if status.model == name {
                return None;
            }
            if status.key == name && found.is_none_or(|before| before > &status.model) {
                found = Some(&status.model);
            }
        }
        found.cloned()
    }

    /// Whether a worker that lives has a model.
    pub fn serves(&self, model: &str, now: Instant) -> bool {
        let mut alive = self.workers.values().filter(|seen| seen.alive(now));
        alive.any(|seen| seen.heartbeat.models.iter().any(|it| it.model == model))
    }

    /// Whether a worker that lives takes jobs of a model that come under a key.
    pub fn takes(&self, model: &str, key: &str, now: Instant) -> bool {
        self.workers.values().any(|seen| seen.alive(now) && seen.takes(model, key))
    }

    /// The further queues that a model's jobs under a key come from, as its workers name them.
    pub fn further_queues(&self, model: &str, key: &str, now: Instant) -> Vec<String> {
        let alive = self.workers.values().filter(|seen| seen.alive(now));
        let of_model = alive
            .flat_map(|seen| &seen.heartbeat.models)
            .filter(|status| status.model == model && status.key == key);
        let named = of_model.flat_map(|status| status.queues.iter().skip(1));
        let names: BTreeSet<_> = named.map(|queue| queue.queue.as_str()).collect();
        names.into_iter().take(FURTHER_QUEUES_MAX).map(str::to_owned).collect()
    }

    /// Jobs per second of a model under a key that its workers can answer. `None` until one of them was seen fully loaded.
    pub fn jobs_per_s(&self, model: &str, key: &str, now: Instant) -> Option<f64> {
        let serving = self.workers.values().filter(|seen| seen.alive(now) && seen.takes(model, key));
        let rates: Vec<_> = serving.filter_map(|seen| seen.rates.get(model)).collect();
        rates.iter().any(|rate| rate.is_full).then(|| rates.iter().map(|rate| rate.per_s).sum())
    }

    /// Every worker, by name, including those that left less than `GONE_SHOWN` ago.
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
    fn takes(&self, model: &str, key: &str) -> bool {
        self.heartbeat.models.iter().any(|it| it.model == model && it.key == key && it.consuming)
    }

    fn alive(&self, now: Instant) -> bool {
        self.heartbeat.state != WorkerState::Gone
            && now.saturating_duration_since(self.at) <= self.heartbeat.silence_max()
    }

    fn forgotten(&self, now: Instant) -> bool {
        !self.alive(now) && now.saturating_duration_since(self.at) > self.heartbeat.silence_max() + GONE_SHOWN
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
    sum(counters.map(|c| c.out_of_memory_alone.saturating_add(c.out_of_memory_shared)))
}

/// Saturating sum of figures from heartbeats, which may have any value.
fn sum(figures: impl Iterator<Item = u64>) -> u64 {
    figures.fold(0, u64::saturating_add)
}

fn sample(heartbeat: &Heartbeat, out_of_memory: u64) -> Sample {
    let of_devices = |of: fn(&DeviceStatus) -> u64| sum(heartbeat.devices.iter().map(of));
    Sample {
        at_ms: heartbeat.sent_at_ms,
        total: of_devices(|device| device.total),
        used: of_devices(|device| device.total.saturating_sub(device.free)),
        held: of_devices(|device| device.held),
        slots: sum(heartbeat.models.iter().map(|model| u64::from(model.slots))),
        unacknowledged: sum(heartbeat.models.iter().map(|model| model.in_hand)),
        out_of_memory,
    }
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
