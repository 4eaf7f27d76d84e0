//! What `vramq status` shows of models: their processes, and revisions that differ between workers. Pure.

use std::collections::BTreeMap;
use std::time::Instant;

use vramq_schemas::status::{ModelStatus, ProcessStatus};

use super::fleet::Fleet;
use super::severity::{Line, NAME_COLUMNS, Severity, with_severities};
use super::worker_snapshot::Presence;
use crate::output::text::{Align, bytes, cut};

/// Processes of models that are shown; a fleet that has more is looked at with `--json`.
const PROCESSES_SHOWN_MAX: usize = 64;

/// The processes of models that run in processes of their own.
pub(super) fn process_table(fleet: &Fleet, now: Instant) -> Vec<Line> {
    let head = [
        ("PROCESS OF", Align::Left),
        ("MODEL", Align::Left),
        ("PID", Align::Right),
        ("STATE", Align::Left),
        ("MEMORY", Align::Right),
        ("PASSES", Align::Right),
        ("STARTS", Align::Right),
    ];
    let here = fleet.workers(now).filter(|(_, presence)| *presence == Presence::Here);
    let all = here.flat_map(|(snapshot, _)| {
        let of_model = |model: &ModelStatus| {
            let row = |process: &ProcessStatus| process_row(&snapshot.last.worker, &model.model, process);
            model.processes.iter().map(row).collect::<Vec<_>>()
        };
        snapshot.last.models.iter().flat_map(of_model).collect::<Vec<_>>()
    });
    let (rows, severities): (Vec<_>, Vec<_>) = all.take(PROCESSES_SHOWN_MAX).unzip();
    if rows.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![Line::new("", Severity::Normal)];
    lines.extend(with_severities(&head, rows, severities.into_iter()));
    lines
}

fn process_row(worker: &str, model: &str, process: &ProcessStatus) -> (Vec<String>, Severity) {
    let row = vec![
        cut(worker, NAME_COLUMNS),
        cut(model, NAME_COLUMNS),
        process.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
        cut(&process.state, NAME_COLUMNS),
        bytes(process.held),
        process.passes.to_string(),
        process.starts.to_string(),
    ];
    let severity = match process.state.as_str() {
        "withheld" => Severity::Error,
        "backing-off" | "waiting-for-memory" => Severity::Warning,
        _ => Severity::Normal,
    };
    (row, severity)
}

/// Further queues that workers cannot consume.
pub(super) fn missing_queues(fleet: &Fleet, now: Instant) -> Vec<Line> {
    let mut lines = Vec::new();
    for (snapshot, _) in fleet.workers(now).filter(|(_, presence)| *presence == Presence::Here) {
        for model in &snapshot.last.models {
            for queue in model.queues.iter().filter(|queue| queue.missing) {
                let cut = |name| cut(name, NAME_COLUMNS);
                let (worker, model, queue) =
                    (cut(&snapshot.last.worker), cut(&model.model), cut(&queue.queue));
                let why = "it is gone, not as workers declare it, or not theirs to read";
                let text = format!("{worker}: cannot consume `{queue}` for {model}: {why}");
                lines.push(Line::new(text, Severity::Error));
            }
        }
    }
    if !lines.is_empty() {
        lines.insert(0, Line::new("", Severity::Normal));
    }
    lines
}

/// Models that workers serve in several revisions: their outputs do not belong into one store.
pub(super) fn mixed_revisions(fleet: &Fleet, now: Instant) -> Vec<Line> {
    let mut of_models: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    for (snapshot, _) in fleet.workers(now).filter(|(_, presence)| *presence == Presence::Here) {
        for model in &snapshot.last.models {
            if let Some(revision) = &model.revision {
                *of_models.entry(&model.model).or_default().entry(revision).or_default() += 1;
            }
        }
    }
    let mixed = of_models.into_iter().filter(|(_, revisions)| revisions.len() > 1);
    let line = |(model, revisions): (&str, BTreeMap<&str, usize>)| {
        let each = revisions
            .iter()
            .map(|(revision, workers)| format!("{} ({workers})", cut(revision, NAME_COLUMNS)));
        let each = each.collect::<Vec<_>>().join(", ");
        Line::new(
            format!("{}: workers have different revisions: {each}", cut(model, NAME_COLUMNS)),
            Severity::Warning,
        )
    };
    mixed.map(line).collect()
}

#[cfg(test)]
mod tests {
    use vramq_schemas::status::{Heartbeat, QueueStatus, WorkerState};

    use super::super::lines::lines;
    use super::*;

    fn heartbeat(worker: &str, revision: &str) -> Heartbeat {
        let (model, revision) = ("minilm".to_owned(), Some(revision.to_owned()));
        Heartbeat {
            worker: worker.to_owned(),
            sent_at_ms: 1_000,
            interval_ms: 5_000,
            state: WorkerState::Consuming,
            models: vec![ModelStatus { model, revision, ..ModelStatus::default() }],
            ..Heartbeat::default()
        }
    }

    fn hear(fleet: &mut Fleet, heartbeat: &Heartbeat, now: Instant) {
        fleet.heard(&serde_json::to_vec(heartbeat).unwrap(), now);
    }

    fn texts(fleet: &Fleet, now: Instant) -> String {
        lines(fleet, now).iter().map(|line| line.text.clone() + "\n").collect()
    }

    #[test]
    fn a_queue_that_a_worker_cannot_consume_is_shown() {
        let start = Instant::now();
        let mut fleet = Fleet::new(&[], start);
        fleet.connected(start);
        let mut one = heartbeat("one", "a");
        let queue = |queue: &str, missing| QueueStatus { queue: queue.to_owned(), weight: 1, missing };
        one.models[0].queues = vec![queue("vramq.jobs.minilm", false), queue("team-a.jobs", true)];
        hear(&mut fleet, &one, start);
        let shown = texts(&fleet, start);
        assert!(
            shown.contains("one: cannot consume `team-a.jobs` for minilm: it is gone, not as"),
            "{shown}"
        );
        assert_eq!(shown.matches("cannot consume").count(), 1);
    }

    #[test]
    fn processes_and_mixed_revisions_are_shown() {
        let start = Instant::now();
        let mut fleet = Fleet::new(&[], start);
        fleet.connected(start);
        let mut one = heartbeat("one", "f32-aaaa");
        let process = |instance, state: &str, pid| ProcessStatus {
            instance,
            state: state.to_owned(),
            pid,
            held: 3 << 30,
            passes: 7,
            starts: 2,
        };
        one.models[0].processes = vec![process(0, "running", Some(4711)), process(1, "withheld", None)];
        hear(&mut fleet, &one, start);
        let shown = texts(&fleet, start);
        assert!(
            shown.contains(
                "\nPROCESS OF  MODEL    PID  STATE      MEMORY  PASSES  STARTS\n\
                 one         minilm  4711  running   3.0 GiB       7       2\n\
                 one         minilm     -  withheld  3.0 GiB       7       2\n"
            ),
            "{shown}"
        );
        assert!(!shown.contains("different revisions"), "{shown}");
        hear(&mut fleet, &heartbeat("two", "f16-bbbb"), start);
        let shown = texts(&fleet, start);
        assert!(
            shown.contains("minilm: workers have different revisions: f16-bbbb (1), f32-aaaa (1)\n"),
            "{shown}"
        );
    }
}
