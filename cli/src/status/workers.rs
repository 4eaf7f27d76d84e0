//! The table of workers that `vramq status` prints, and why workers do not consume or are slow. Pure.

use std::collections::BTreeMap;
use std::time::Instant;

use vramq_schemas::status::{CeilingStatus, DeviceStatus, WorkerState};

use super::fleet::Fleet;
use super::severity::{Line, NAME_COLUMNS, Severity, rate, with_severities};
use super::worker_snapshot::{Presence, WorkerSnapshot};
use crate::output::text::{Align, age, bytes, cut, safe};

pub(super) fn worker_table(fleet: &Fleet, now: Instant) -> Vec<Line> {
    let head = [
        ("WORKER", Align::Left),
        ("STATE", Align::Left),
        ("DEVICE", Align::Left),
        ("FREE", Align::Right),
        ("OF", Align::Right),
        ("SLOTS", Align::Right),
        ("UNACKED", Align::Right),
        ("ITEMS/S", Align::Right),
        ("OOM", Align::Right),
        ("LIMITS", Align::Right),
        ("VERSION", Align::Left),
        ("HEARD", Align::Right),
    ];
    let (rows, severities): (Vec<_>, Vec<_>) = fleet
        .workers(now)
        .map(|(snapshot, presence)| {
            (worker_row(snapshot, presence, now), worker_severity(snapshot, presence))
        })
        .unzip();
    with_severities(&head, rows, severities.into_iter())
}

fn worker_row(snapshot: &WorkerSnapshot, presence: Presence, now: Instant) -> Vec<String> {
    let last = &snapshot.last;
    let devices: Vec<_> = last.devices.iter().map(device_in_words).collect();
    let memory = |of: fn(&DeviceStatus) -> u64| {
        let figures: Vec<_> = last.devices.iter().map(|device| bytes(of(device))).collect();
        if figures.is_empty() { "-".to_owned() } else { figures.join("+") }
    };
    let sum = |of: fn(&vramq_schemas::status::ModelStatus) -> u64| {
        last.models.iter().fold(0_u64, |sum, model| sum.saturating_add(of(model))).to_string()
    };
    vec![
        cut(&last.worker, NAME_COLUMNS),
        state(snapshot, presence).to_owned(),
        cut(&devices.join("+"), NAME_COLUMNS),
        memory(|device| device.free),
        memory(|device| device.total),
        sum(|model| model.slots.into()),
        sum(|model| model.in_hand),
        rate(snapshot.items_per_s()),
        sum(|model| model.counters.out_of_memory_alone.saturating_add(model.counters.out_of_memory_shared)),
        learned_limits(&last.ceilings),
        cut(&last.version, NAME_COLUMNS),
        age(now.saturating_duration_since(snapshot.heard)),
    ]
}

/// A device's name and, of a GPU, temperature and utilization.
fn device_in_words(device: &DeviceStatus) -> String {
    let celsius = device.temperature_celsius.map(|degrees| format!(" {degrees}°C"));
    let busy = device.utilization_percent.map(|percent| format!(" {percent}%"));
    [Some(device.device.clone()), celsius, busy].into_iter().flatten().collect()
}

fn state(snapshot: &WorkerSnapshot, presence: Presence) -> &'static str {
    match presence {
        Presence::Here => snapshot.last.state.as_str(),
        Presence::Silent => "silent",
        Presence::Left => "gone",
    }
}

fn worker_severity(snapshot: &WorkerSnapshot, presence: Presence) -> Severity {
    match (presence, snapshot.last.state) {
        (Presence::Left, _) => Severity::Dim,
        (Presence::Silent, _) | (_, WorkerState::Sick | WorkerState::Blocked) => Severity::Error,
        (Presence::Here, state) if state.is_ready() => Severity::Ok,
        (Presence::Here, _) => Severity::Warning,
    }
}

/// The number of learned limits, and the lowest.
fn learned_limits(limits: &[CeilingStatus]) -> String {
    let lowest = limits.iter().map(|learned| learned.limit).min();
    lowest.map_or_else(|| "-".to_owned(), |limit| format!("{}, from {}", limits.len(), bytes(limit)))
}

/// Names that several workers have.
fn shared_names(fleet: &Fleet, now: Instant) -> Vec<Line> {
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    for (snapshot, _) in fleet.workers(now).filter(|(_, presence)| *presence == Presence::Here) {
        *names.entry(&snapshot.last.worker).or_default() += 1;
    }
    let shared = names.into_iter().filter(|(_, workers)| *workers > 1);
    let line = |(name, workers): (&str, usize)| {
        let name = cut(name, NAME_COLUMNS);
        let text = format!(
            "{name}: {workers} workers have this name: commands reach all; answers, replies and metrics do not tell them apart"
        );
        Line::new(text, Severity::Warning)
    };
    shared.map(line).collect()
}

/// The end of NVML's names for slowdowns by heat or lack of power. Other names are limits that the owner has set.
const SLOWDOWN: &str = "slowdown";

/// Why workers do not consume or are slow, and which are missing.
pub(super) fn reasons(fleet: &Fleet, now: Instant) -> Vec<Line> {
    let mut lines = Vec::new();
    for (snapshot, presence) in fleet.workers(now) {
        let name = cut(&snapshot.last.worker, NAME_COLUMNS);
        for device in snapshot.last.devices.iter().filter(|_| presence == Presence::Here) {
            let slowed: Vec<_> = device.throttled.iter().filter(|why| why.ends_with(SLOWDOWN)).collect();
            if let [first, ..] = slowed[..] {
                let (device, why) = (cut(&device.device, NAME_COLUMNS), cut(first, NAME_COLUMNS));
                let text = format!("{name}: {device} is slowed down by heat or lack of power: {why}");
                lines.push(Line::new(text, Severity::Warning));
            }
        }
        let text = match (presence, &snapshot.last.reason) {
            (Presence::Silent, _) => {
                let age = age(now.saturating_duration_since(snapshot.heard));
                format!("{name}: silent for {age}: it has died or is cut off; the broker requeues its jobs")
            }
            (Presence::Here, Some(reason)) => {
                format!("{name}: {}: {}", snapshot.last.state.as_str(), safe(reason))
            }
            _ => continue,
        };
        lines.push(Line::new(text, worker_severity(snapshot, presence)));
    }
    lines.extend(shared_names(fleet, now));
    if !lines.is_empty() {
        lines.insert(0, Line::new("", Severity::Normal));
    }
    lines
}
