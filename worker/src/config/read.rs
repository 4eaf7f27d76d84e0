//! Reads the configuration from its tables: every key, its default and its limits.

use std::num::{NonZeroU16, NonZeroU32};
use std::path::PathBuf;
use std::time::Duration;

use vramq_core::poison_policy::PoisonPolicy;
use vramq_program::no_folder;
use vramq_schemas::BODY_BYTES_MAX;
use vramq_schemas::topology::{check_model_name, default_reply_queue};

use super::broker::broker;
use super::device::{check_types, device};
use super::listen;
use super::process;
use super::publishers::{callers_max, publishers};
use super::queues;
use super::section::Section;
use super::stores;
use super::{BrokerConfig, Config, EngineConfig, Listen, ModelConfig, PressureConfig};
use crate::engine::encoder::{ComputeType, Source};
use crate::host_memory::{self, Want};
use crate::publishers::direct_address::DIRECT_REPLIES;
use crate::publishers::reply_to::is_internal_queue;
use crate::stores::StoreConfig;
use vramq_inference::process::Place;

/// Slots are limited even with plenty of memory. Each holds a job's body in host memory, and no other worker can take the unacknowledged
/// jobs.
const SLOTS_MAX_DEFAULT: NonZeroU16 = NonZeroU16::new(256).unwrap();

/// The items per job for which a slot's memory is computed.
const JOB_ITEMS_DEFAULT: u32 = 32;

/// Less than the 30 s between SIGTERM and SIGKILL of Kubernetes and of spot instances.
const DRAIN_S_DEFAULT: u32 = 25;

/// Four fifths of RabbitMQ's `consumer_timeout`, by default 30 minutes, after which it closes the channel of a consumer that still
/// holds a job.
const JOB_S_DEFAULT: u32 = 1440;

/// The largest body of a job by default, which is the most that one may have on the wire.
const BODY_MIB_MAX: u32 = (BODY_BYTES_MAX >> 20) as u32;

/// The most bytes of all replies to a job. A body of 16 MiB of short texts gives some hundred thousand vectors.
const REPLY_MIB_MAX_DEFAULT: u32 = 1024;

/// The longest name of a worker. It is a part of names of queues, which have at most 255 bytes.
const NAME_BYTES_MAX: usize = 64;

/// Enough for any sensible ratio.
pub(super) const WEIGHT_MAX: u32 = 1000;

/// See the core's `poison_policy.rs`.
const SUSPECT_AFTER_DEFAULT: u32 = 2;
const CRASHES_MAX_DEFAULT: u32 = 5;

/// A device that is this full has no room for anything unplanned. After so long it is not just a peak.
const PRESSURE_PERCENT_DEFAULT: u32 = 90;
const PRESSURE_S_DEFAULT: u32 = 300;

/// Long enough that reading and tokenising a job again costs little in comparison. Short enough that others wait for seconds, not minutes.
const LARGE_TURN_S_DEFAULT: u32 = 30;

/// Frequent enough for a person who watches, rare enough that a thousand workers are no load.
const HEARTBEAT_S_DEFAULT: u32 = 5;

pub(super) fn config(mut root: Section, place: &Place) -> Option<Config> {
    let broker = broker(root.section("broker"));
    let http = http(root.section("http"));
    let mut worker = root.section("worker");
    let name = name(&mut worker);
    let heartbeat = at_least_one(&mut worker, "heartbeat_s", HEARTBEAT_S_DEFAULT);
    let drain = worker.number("drain_s", 0..=u32::MAX).unwrap_or(DRAIN_S_DEFAULT);
    let state = state(&mut worker);
    let pressure = pressure(&mut worker);
    let job_limit = Duration::from_secs(at_least_one(&mut worker, "job_s", JOB_S_DEFAULT).into());
    let large_turn =
        Duration::from_secs(at_least_one(&mut worker, "large_turn_s", LARGE_TURN_S_DEFAULT).into());
    let poison = poison(&mut worker);
    let device = device(root.section("device"));
    let host_memory = host_bytes(&mut worker, device.host_bytes());
    let stores = stores::stores(&mut root);
    let (fetch_memory, host_memory) = stores::memory(&mut worker, host_memory, !stores.is_empty());
    let control = worker.take("control").unwrap_or(true);
    let failpoint = parsed(&mut worker, "drill");
    worker.finish();
    if device.gpus.is_some() && http.as_ref().is_some_and(Listen::is_one_port) {
        let what =
            "is one port, and each GPU has a worker with pages of its own: give a range, IP:FIRST-LAST";
        root.fault("http.listen", what);
    }
    let mut publishers = publishers(root.section("reply"), root.section("fairness"));
    let callers_max = callers_max(root.section("metrics"));
    let mut models = Vec::new();
    // If models are named but all are wrong, their own faults are enough.
    if root.is_empty_at("model") {
        root.fault(
            "model",
            "names no model: add a table [model.NAME] with `path` or `hub`, or --model NAME=FOLDER",
        );
    }
    for (name, section) in root.named_sections("model") {
        models.extend(model(&name, section, place, &stores, fetch_memory));
    }
    queues::check_models(&root, &models);
    check_types(&root, &models, &device.kind);
    let host_slots = host_slots(&root, host_memory, &models);
    publishers.job_queues = models.iter().flat_map(queues::further).map(|queue| queue.name.clone()).collect();
    root.finish();
    let drain = Duration::from_secs(drain.into());
    let heartbeat = Duration::from_secs(heartbeat.into());
    Some(Config {
        broker: BrokerConfig { control, ..broker? },
        http,
        heartbeat,
        name,
        drain,
        job_limit,
        large_turn,
        poison,
        failpoint,
        state,
        pressure,
        host_memory,
        host_slots,
        fetch_memory,
        stores,
        device,
        publishers,
        callers_max,
        models,
        absent: Vec::new(),
    })
}

fn name(worker: &mut Section) -> String {
    let name = worker.take::<String>("name").unwrap_or_else(default_name);
    if name.len() > NAME_BYTES_MAX {
        worker.fault("name", format!("is longer than {NAME_BYTES_MAX} bytes"));
    }
    if name.chars().any(char::is_control) {
        worker.fault(
            "name",
            "has a line end or another control character, which logs and terminals would obey",
        );
    }
    name
}

/// Bytes of the host's memory that the worker may use, including those of its device.
fn host_bytes(worker: &mut Section, of_device: u64) -> u64 {
    match worker.number("host_memory_mib", 1..=u32::MAX) {
        None => host_memory::default_bytes(of_device),
        Some(mib) => u64::from(mib) << 20,
    }
}

/// The folder of learned limits. One that cannot be written to is no fault, only logged: the worker learns again.
fn state(worker: &mut Section) -> Option<PathBuf> {
    let folder = PathBuf::from(worker.take::<String>("state")?);
    if let Some(what) = no_folder(&folder) {
        worker.fault("state", format!("is {}, which {what}", folder.display()));
    }
    Some(folder)
}

fn http(mut section: Section) -> Option<Listen> {
    let listen = section.take::<String>("listen").unwrap_or_else(|| listen::DEFAULT.to_owned());
    let read = match listen.as_str() {
        "off" => None,
        text => {
            text.parse().map_err(|what: String| section.fault("listen", format!("is wrong: {what}"))).ok()
        }
    };
    section.finish();
    read
}

/// The most slots of each model that the host's memory allows. A fault if it does not allow one for each.
fn host_slots(root: &Section, host_memory: u64, models: &[ModelConfig]) -> Vec<NonZeroU16> {
    let want = |model: &ModelConfig| Want { body_max: model.body_max, slots_max: model.slots_max };
    let wants: Vec<_> = models.iter().map(want).collect();
    host_memory::slots(host_memory, &wants).unwrap_or_else(|error| {
        root.fault("worker.host_memory_mib", error.to_string());
        Vec::new()
    })
}

fn poison(worker: &mut Section) -> PoisonPolicy {
    let suspect_after = at_least_one(worker, "suspect_after", SUSPECT_AFTER_DEFAULT);
    let crashes_max = worker
        .number("crashes_max", 0..=u32::MAX)
        .unwrap_or(CRASHES_MAX_DEFAULT.max(suspect_after.saturating_add(1)));
    if crashes_max <= suspect_after {
        let what = format!("is {crashes_max}; it must be more than suspect_after, {suspect_after}");
        worker.fault("crashes_max", what);
    }
    PoisonPolicy { suspect_after, crashes_max }
}

/// Reads a string with its own syntax.
pub(super) fn parsed<T: std::str::FromStr<Err = String>>(
    section: &mut Section,
    key: &'static str,
) -> Option<T> {
    match section.take::<String>(key)?.parse() {
        Ok(value) => Some(value),
        Err(what) => {
            section.fault(key, format!("is wrong: {what}"));
            None
        }
    }
}

fn pressure(worker: &mut Section) -> PressureConfig {
    let percent = worker.number("pressure_percent", 1..=100).unwrap_or(PRESSURE_PERCENT_DEFAULT);
    let tolerated = worker.number("pressure_s", 0..=u32::MAX).unwrap_or(PRESSURE_S_DEFAULT);
    PressureConfig {
        percent: u8::try_from(percent).unwrap_or(100),
        tolerated: Duration::from_secs(tolerated.into()),
    }
}

fn model(
    name: &str,
    mut section: Section,
    place: &Place,
    stores: &[StoreConfig],
    fetch_memory: u64,
) -> Option<ModelConfig> {
    if let Err(e) = check_model_name(name) {
        section.fault("name", e.to_string());
    }
    let kind = section.take::<String>("engine");
    let is_process = kind.as_deref() == Some("process");
    let engine = if is_process { None } else { engine(&mut section, kind.as_deref()) };
    if let Some(what) = engine.as_ref().and_then(EngineConfig::missing_folder) {
        section.faults().add_missing(section.key("path"), what);
    }
    let reply_queue = reply_queue(name, &mut section);
    let key: String = section.take("key").unwrap_or_else(|| name.to_owned());
    let larger = section.take::<String>("larger");
    let queues = queues::queues(&mut section, &key);
    for (option, value) in [("key", Some(&key)), ("larger", larger.as_ref())] {
        if let Some(Err(e)) = value.map(|value| check_model_name(value)) {
            section.fault(option, e.to_string());
        }
    }
    if larger.as_ref() == Some(&key) {
        section.fault("larger", "is the model's own key: its jobs would be requeued for ever");
    }
    let slots_max = slots_max(&mut section);
    let weight = section.number("weight", 1..=WEIGHT_MAX).unwrap_or(1);
    let body_mib_max = section.number("body_mib_max", 1..=BODY_MIB_MAX).unwrap_or(BODY_MIB_MAX);
    let reply_mib_max = at_least_one(&mut section, "reply_mib_max", REPLY_MIB_MAX_DEFAULT);
    let fetch_max = stores::fetch_max(&mut section, fetch_memory);
    let outputs = stores::outputs(&mut section, stores);
    // A program's item costs are unknown before its items are, so slots are computed for one item.
    let job_items = match is_process {
        true => 1,
        false => at_least_one(&mut section, "job_items", JOB_ITEMS_DEFAULT),
    };
    let (engine, pass_tokens) = match is_process {
        true => (process::engine(name, &key, section, place), None),
        false => {
            let is_set = section.has("pass_tokens");
            let pass_tokens = at_least_one(&mut section, "pass_tokens", 1) as usize;
            section.finish();
            (engine, is_set.then_some(pass_tokens))
        }
    };
    Some(ModelConfig {
        name: name.to_owned(),
        engine: engine?,
        key,
        queues,
        reply_queue,
        larger,
        job_items,
        pass_tokens,
        slots_max,
        weight: NonZeroU32::new(weight).unwrap_or(NonZeroU32::MIN),
        body_max: u64::from(body_mib_max) << 20,
        reply_max: u64::from(reply_mib_max) << 20,
        fetch_max,
        outputs,
    })
}

/// The queue for replies to jobs without a `reply_to`.
fn reply_queue(model: &str, section: &mut Section) -> String {
    let queue: String = section.take("reply_queue").unwrap_or_else(|| default_reply_queue(model));
    if is_internal_queue(&queue) {
        section
            .fault("reply_queue", "is a queue of jobs or dead letters: its replies would come back as jobs");
    }
    if queue.starts_with(DIRECT_REPLIES) {
        section.fault("reply_queue", "is an address for direct replies, which belongs to one caller");
    }
    if queue.len() > 255 {
        section.fault("reply_queue", "is longer than the 255 bytes of a queue's name");
    }
    queue
}

fn slots_max(section: &mut Section) -> NonZeroU16 {
    let slots = section.number("slots_max", 1..=u16::MAX.into());
    slots.and_then(|slots| u16::try_from(slots).ok()).and_then(NonZeroU16::new).unwrap_or(SLOTS_MAX_DEFAULT)
}

fn engine(section: &mut Section, kind: Option<&str>) -> Option<EngineConfig> {
    let path = section.take::<String>("path");
    let hub = section.take::<String>("hub");
    let revision = section.take::<String>("revision");
    let dtype = parsed::<ComputeType>(section, "dtype");
    if revision.is_some() && hub.is_none() {
        section.fault("revision", "belongs to `hub`, which is absent");
    }
    if kind == Some("echo") {
        if path.is_some() || hub.is_some() {
            section.fault("engine", "`echo` loads nothing: leave out `path` and `hub`");
        }
        if dtype.is_some() {
            section.fault("dtype", "`echo` computes nothing: leave it out");
        }
        return Some(EngineConfig::Echo);
    }
    let dtype = dtype.unwrap_or_default();
    match (kind, path, hub) {
        (None | Some("encoder"), Some(path), None) => {
            Some(EngineConfig::Encoder { source: Source::Folder(path.into()), dtype })
        }
        (None | Some("encoder"), None, Some(id)) => {
            Some(EngineConfig::Encoder { source: Source::Hub { id, revision }, dtype })
        }
        (None | Some("encoder"), ..) => {
            section.fault("path", "give either `path`, a folder, or `hub`, a repository such as sentence-transformers/all-MiniLM-L6-v2");
            None
        }
        (Some(other), ..) => {
            section.fault("engine", format!("is `{other}`; it must be `encoder`, `echo` or `process`"));
            None
        }
    }
}

pub(super) fn at_least_one(section: &mut Section, key: &'static str, default: u32) -> u32 {
    section.number(key, 1..=u32::MAX).unwrap_or(default)
}

/// The host's name and the process id. Distinguishes workers on one host, and shows where each runs.
fn default_name() -> String {
    let host = host_name();
    format!(
        "{}-{}",
        if host.is_empty() { "worker" } else { &host[..host.floor_char_boundary(48)] },
        std::process::id()
    )
}

/// This machine's name; empty if the system does not provide it.
pub fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}
