//! Explains a dead letter to an operator: what happened, why it ended, what would fit, what to do. Pure.

use vramq_schemas::dead_letter::{ITEM, ITEM_COST, NEEDS_BYTES};
use vramq_schemas::headers;
use vramq_schemas::headers::{
    DEVICE_LOST, ITEMS_DONE, ITEMS_TOTAL, OFFSET, PROCESS_LOST, RETRIES, WORKER_LOST,
};
use vramq_schemas::{Attempt, Reason, ReplyKind};

use crate::dead_letter::{BY_BROKER, DeadLetter, DeadLetterCause};
use crate::text::{bytes_free, bytes_needed, counted, moment, safe};

/// Paragraphs with their headings.
pub fn explain(letter: &DeadLetter) -> Vec<(&'static str, Vec<String>)> {
    let cause = letter.cause();
    let mut sections = vec![("What it is", what_it_is(letter))];
    let attempts: Vec<_> = letter.history().iter().map(attempt).collect();
    if !attempts.is_empty() {
        let is_known = !letter.is_by_broker();
        sections.push((if is_known { "What happened" } else { "What its headers say, unproven" }, attempts));
    }
    sections.push(("Why it ended", why_it_ended(&cause)));
    if let Some(fit) = what_would_fit(letter) {
        sections.push(("What would fit", vec![fit]));
    }
    sections.push(("What to do", vec![what_to_do(letter, &cause)]));
    sections
}

fn what_it_is(letter: &DeadLetter) -> Vec<String> {
    let id = letter.id().map_or("without an id".to_owned(), safe);
    let queue = safe(&letter.queue);
    let mut lines = match letter.results() {
        None => vec![format!("Job {id}, in {queue}.")],
        Some(kind) => {
            let (offset, items) =
                (letter.number(OFFSET).unwrap_or(0), letter.number(headers::ITEMS).unwrap_or(0));
            let total = letter.number(ITEMS_TOTAL).unwrap_or(0);
            let last = if kind == ReplyKind::Done { ", the last ones" } else { "" };
            vec![format!(
                "Results of job {id}, in {queue}: {} from number {offset} on, of {total}{last}. The job itself is another \
                 dead letter.",
                counted(items, "item")
            )]
        }
    };
    lines.extend(user(letter).map(|user| format!("The user {} published it.", safe(&user))));
    match letter.number(ITEMS_DONE).unwrap_or(0) {
        0 => {}
        // The broker's letters: a retry begins with the first item.
        _ if letter.is_by_broker() => {}
        done => lines.push(format!(
            "{} of it are answered already: a retry continues after them.",
            counted(done, "item")
        )),
    }
    match letter.number_u32(RETRIES) {
        0 => {}
        retries => {
            lines.push(format!("It was retried {} before, and failed again.", times(retries)));
        }
    }
    lines
}

/// The job's publisher, if the broker or a worker vouches for it. A header that no worker wrote proves nothing.
fn user(letter: &DeadLetter) -> Option<String> {
    let verified = letter.properties.user_id().as_ref().map(ToString::to_string);
    verified.or_else(|| letter.text(headers::USER).filter(|_| !letter.is_by_broker()))
}

fn times(n: u32) -> String {
    if n == 1 { "once".to_owned() } else { format!("{n} times") }
}

fn attempt(attempt: &Attempt) -> String {
    let Attempt { at_ms, worker, device, outcome, item, items, longest, asked, free, total, foreign, alone } =
        attempt;
    let (at, worker, device) = (moment(*at_ms), safe(worker), safe(device));
    if outcome == WORKER_LOST {
        return format!("{at}  A worker was lost while it held the job; {worker} reported it.");
    }
    if outcome == DEVICE_LOST {
        return format!("{at}  The device of {worker} was lost, or hung, while it ran the job.");
    }
    if outcome == PROCESS_LOST {
        return format!(
            "{at}  A process of the model died while it ran the job; its worker, {worker}, went on."
        );
    }
    let company = if *alone { "no other process on the device" } else { "other processes on the device" };
    let others = if *foreign > 0 {
        format!(", {} with other processes", bytes_needed(*foreign))
    } else {
        String::new()
    };
    let ended =
        if outcome == Reason::OutOfMemory.as_str() { "ran out of memory".to_owned() } else { safe(outcome) };
    let longest =
        known(u64::from(*longest)).map(|cost| format!(" the longest of cost {cost},")).unwrap_or_default();
    format!(
        "{at}  {worker} ran {} from number {item} on,{longest} with {company}. It asked {device} for {}; free were {} of \
         {}{others}: {ended}.",
        counted((*items).into(), "item"),
        bytes_needed(*asked),
        bytes_free(*free),
        bytes_free(*total),
    )
}

fn why_it_ended(cause: &DeadLetterCause) -> Vec<String> {
    let at = cause.dead_at_ms.map_or("At an unknown time".to_owned(), moment);
    let who = match (&cause.worker, cause.version.as_str()) {
        (Some(worker), version) => format!(", {}, version {}", safe(worker), safe(version)),
        (None, BY_BROKER) => ", the broker".to_owned(),
        (None, _) => String::new(),
    };
    let why = format!("{at}{who}: {}.", safe(&cause.reason));
    // A program's traceback has several.
    [why].into_iter().chain(cause.error.lines().map(safe)).collect()
}

fn what_would_fit(letter: &DeadLetter) -> Option<String> {
    let needs = letter.number(NEEDS_BYTES).filter(|_| !letter.is_by_broker())?;
    let (item, cost) = (letter.number(ITEM)?, letter.number(ITEM_COST)?);
    let of_cost = known(cost).map(|cost| format!(", of cost {cost},")).unwrap_or_default();
    Some(format!(
        "Item {item}{of_cost} runs alone on a device with {} free beside the model's weights ({needs} bytes).",
        bytes_needed(needs)
    ))
}

/// A cost that is known. Workers of 0.2.0 wrote the largest number in the place of one that is not.
fn known(cost: u64) -> Option<u64> {
    (cost > 0 && cost < u64::from(u32::MAX)).then_some(cost)
}

fn what_to_do(letter: &DeadLetter, cause: &DeadLetterCause) -> String {
    let name = letter.fingerprint();
    let model = safe(letter.model());
    let retry = format!("vramq dlq retry --model {model} {name}");
    if letter.results().is_some() {
        return format!(
            "Create the reply queue {} again, then `{retry}`: it delivers these results. If the job is retried together with \
             all its results, it does not run again. If the results are not wanted any more, drop them and the job.",
            letter.properties.reply_to().as_ref().map_or(String::new(), |queue| safe(queue.as_str()))
        );
    }
    match cause.reason.parse::<Reason>() {
        Ok(reason) => advice_for_reason(reason, &retry),
        Err(_) => advice_for_broker_reason(&cause.reason, &retry),
    }
}

/// What to do about a job that RabbitMQ dead-lettered for `reason`, or a worker of a later version. `retry` is the command that retries
/// the job.
fn advice_for_broker_reason(reason: &str, retry: &str) -> String {
    match reason {
        "delivery-limit" => format!(
            "Workers received it several times and never settled it; their logs of that time show why. It may crash \
             workers: `{retry}`, and watch one worker."
        ),
        "maxlen" => format!("The queue was full. When there is room: `{retry}`."),
        _ => format!("When the cause is removed: `{retry}`."),
    }
}

/// What to do about a job with a reason of workers, of which the broker has `expired` as well. `retry` is the command that retries it.
fn advice_for_reason(reason: Reason, retry: &str) -> String {
    match reason {
        Reason::Malformed | Reason::UnsupportedEncoding | Reason::InvalidInput => format!(
            "A retry would fail in the same way: correct the publisher and publish the job again; --body shows the body. Then \
             drop this dead letter. If newer workers can read it: `{retry}`."
        ),
        Reason::TooLarge => {
            "Publish it again as smaller jobs, or with its inputs by reference. Then drop it.".to_owned()
        }
        Reason::WrongModel => {
            format!("It went to the wrong queue: `{retry} --to vramq.jobs.MODEL` sends it to another.")
        }
        Reason::WrongRevision => format!(
            "It demands a revision of the model, and each worker that received it had another one: `vramq status --json` shows \
             the revisions of the workers. Start a worker with this revision, then: `{retry}`. Or change what the job \
             demands: `{retry} --from-start --change model-revision=…`."
        ),
        Reason::ReferenceDenied => format!(
            "No store of the workers covers an input's reference, or the store refused it: see the error above. Correct the \
             publisher, or give the workers such a store ([store.NAME], docs/stores.md), then: `{retry}`."
        ),
        Reason::ReferenceMissing => {
            format!("The store has no object for an input's reference. Put it there again, then: `{retry}`.")
        }
        Reason::ReferenceMismatch => format!(
            "The stored bytes do not have the digest that the job's publisher gave. When the right bytes are there: `{retry}`; else \
             its publisher has to publish it again with the digest of the new ones."
        ),
        Reason::StoreUnavailable => {
            format!("A store did not work: see the error above. When it does: `{retry}`.")
        }
        Reason::Expired => format!(
            "It waited longer than its publisher allowed, or a clock is wrong: the time counts from the job's timestamp, if it has \
             one. If the result is still wanted: `{retry}`; it does not expire again, unless --change expiration=… is given. If \
             many jobs expire, there are too few workers."
        ),
        Reason::Unroutable => format!(
            "It ran, but its reply queue did not exist or stayed full. Create the queue again. Retried together with all \
             its results (the other dead letters with the same id), it does not run again. Retried alone, it does: `{retry}`."
        ),
        Reason::OutOfMemory => format!(
            "Free memory on the device, or use another device, then `{retry}`; or send it to workers with larger devices: \
             `{retry} --to QUEUE`. Otherwise its publisher has to send shorter items."
        ),
        Reason::EngineFailed => format!(
            "The device passed its health probe, so this job or the engine is at fault: see the error above and the worker's \
             log. When it is fixed: `{retry}`, one job at first."
        ),
        Reason::Crashed => format!(
            "It probably crashes workers. Keep a copy (vramq dlq export), and reproduce it on a worker without other jobs. A \
             retry runs it in isolation: `{retry}`."
        ),
        Reason::TimedOut => format!(
            "None of its items finished within worker.job_s. Publish it as smaller jobs, or raise worker.job_s (and keep the \
             broker's consumer_timeout above it), then `{retry}`."
        ),
        Reason::Cancelled => {
            format!("An operator cancelled it (vramq control cancel). If it is wanted after all: `{retry}`.")
        }
        Reason::Withdrawn => "It was withdrawn, and should have left no dead letter.".to_owned(),
        // `Reason` is non-exhaustive outside its crate, so a test finds a missing reason instead of the compiler.
        _ => format!("When the cause is removed: `{retry}`."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letter::tests::written;
    use lapin::BasicProperties;
    use lapin::types::{AMQPValue, FieldTable};
    use vramq_schemas::{JobHeaders, MinimumRequirement};

    const MIB: u64 = 1 << 20;

    fn text(letter: &DeadLetter) -> String {
        let shown = explain(letter).into_iter();
        shown.map(|(heading, lines)| format!("{heading}\n{}\n", lines.join("\n"))).collect()
    }

    #[test]
    fn an_out_of_memory_from_the_first_attempt_to_what_would_fit() {
        let attempt = |items, outcome: &str, alone| Attempt {
            at_ms: 1_700_000_000_000,
            worker: "w1".to_owned(),
            device: "cuda:0".to_owned(),
            outcome: outcome.to_owned(),
            item: 3,
            items,
            longest: 512,
            asked: 900 * MIB,
            free: 100 * MIB,
            total: 1000 * MIB,
            foreign: if alone { 0 } else { 50 * MIB },
            alone,
        };
        let letter = written("job-7", Reason::OutOfMemory, |table| {
            let history = vec![
                attempt(2, "out-of-memory", false),
                attempt(1, "out-of-memory", true),
                attempt(0, WORKER_LOST, false),
                attempt(0, DEVICE_LOST, false),
            ];
            JobHeaders { history, items_done: 3, attempt: 2, ..JobHeaders::default() }.write(table);
            table.insert(RETRIES.into(), AMQPValue::LongLongInt(2));
            let requirement = MinimumRequirement { item: 3, cost: 512, needs_bytes: 900 * MIB };
            let letter = vramq_schemas::DeadLetter::read(table).unwrap();
            vramq_schemas::DeadLetter { requirement: Some(requirement), ..letter }.write(table);
        });
        let shown = text(&letter);
        for part in [
            "Job job-7, in vramq.dead.minilm.",
            "3 items of it are answered already",
            "retried 2 times before",
            "2023-11-14T22:13:20Z  w1 ran 2 items from number 3 on, the longest of cost 512, with other processes on the device. \
             It asked cuda:0 for 900.0 MiB; free were 100.0 MiB of 1000.0 MiB, 50.0 MiB with other processes: ran out of memory.",
            "w1 ran 1 item from number 3 on, the longest of cost 512, with no other process on the device.",
            "A worker was lost while it held the job; w1 reported it.",
            "2023-11-14T22:13:20Z, w1, version 0.1.0: out-of-memory.",
            "Item 3, of cost 512, runs alone on a device with 900.0 MiB free beside the model's weights (943718400 bytes).",
            &format!("vramq dlq retry --model minilm {}", letter.fingerprint()),
        ] {
            assert!(shown.contains(part), "no {part:?} in {shown}");
        }
    }

    /// As in the text of the worker that ran it: what it needs is enough, and what is free is there.
    #[test]
    fn needs_are_rounded_up_and_what_was_free_is_rounded_down() {
        let letter = written("job-9", Reason::OutOfMemory, |table| {
            let attempt = Attempt { outcome: "out-of-memory".to_owned(), items: 1, ..Attempt::default() };
            let attempt = Attempt { asked: 2_543_360, free: 2_086_000, total: 10 * MIB - 1, ..attempt };
            JobHeaders { history: vec![attempt], attempt: 1, ..JobHeaders::default() }.write(table);
            let requirement = MinimumRequirement { item: 3, cost: 512, needs_bytes: 2_543_360 };
            let letter = vramq_schemas::DeadLetter::read(table).unwrap();
            vramq_schemas::DeadLetter { requirement: Some(requirement), ..letter }.write(table);
        });
        let shown = text(&letter);
        for part in [
            "for 2.5 MiB; free were 1.9 MiB of 9.9 MiB",
            "with 2.5 MiB free beside the model's weights (2543360",
        ] {
            assert!(shown.contains(part), "no {part:?} in {shown}");
        }
    }

    #[test]
    fn a_cost_that_is_unknown_is_not_shown() {
        for unknown in [0, u32::MAX] {
            let letter = written("job-8", Reason::OutOfMemory, |table| {
                let attempt = Attempt { outcome: "out-of-memory".to_owned(), ..Attempt::default() };
                let attempt = Attempt { items: 1, longest: unknown, ..attempt };
                JobHeaders { history: vec![attempt], attempt: 1, ..JobHeaders::default() }.write(table);
                let requirement = MinimumRequirement { item: 3, cost: unknown, needs_bytes: MIB };
                let letter = vramq_schemas::DeadLetter::read(table).unwrap();
                vramq_schemas::DeadLetter { requirement: Some(requirement), ..letter }.write(table);
            });
            let shown = text(&letter);
            for part in ["ran 1 item from number 0 on, with other processes", "Item 3 runs alone on a device"]
            {
                assert!(shown.contains(part), "no {part:?} in {shown}");
            }
        }
    }

    #[test]
    fn every_reason_has_advice_and_foreign_text_is_escaped() {
        for reason in Reason::ALL {
            let letter = written("\u{1b}]0;x\u{7}", reason, |table| {
                for name in ["error", "worker"] {
                    table.insert(name.into(), AMQPValue::LongString("\u{1b}[31m\u{202e}\r".into()));
                }
            });
            let shown = text(&letter);
            assert!(shown.contains("What to do\n") && shown.contains(reason.as_str()), "{shown}");
            // The advice for a reason that is not known here.
            assert!(!shown.contains("When the cause is removed"), "{shown}");
            assert!(!shown.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{shown:?}");
        }
    }

    #[test]
    fn a_traceback_keeps_its_lines() {
        let letter = written("a", Reason::EngineFailed, |table| {
            table.insert(
                "error".into(),
                AMQPValue::LongString("Traceback:\n  File \u{1b}x\r\nKeyError: 'a'\n".into()),
            );
        });
        let shown = text(&letter);
        assert!(shown.contains("\nTraceback:\n  File \\u{1b}x\nKeyError: 'a'\nWhat to do\n"), "{shown}");
    }

    #[test]
    fn its_publisher_is_named_as_far_as_it_is_verified() {
        let forged = |table: &mut FieldTable| {
            table.insert(headers::USER.into(), AMQPValue::LongString("bob".into()));
        };
        let by_worker = written("a", Reason::Malformed, forged);
        assert!(text(&by_worker).contains("The user bob published it."));
        let mut by_broker = FieldTable::default();
        forged(&mut by_broker);
        let properties = BasicProperties::default().with_headers(by_broker);
        let unverified = DeadLetter::new("vramq.dead.m", properties.clone(), Vec::new());
        assert!(!text(&unverified).contains("published it"));
        let verified = DeadLetter::new("vramq.dead.m", properties.with_user_id("eve".into()), Vec::new());
        assert!(text(&verified).contains("The user eve published it."));
    }

    #[test]
    fn results_say_where_they_belong() {
        let letter = written("a", Reason::Unroutable, |table| {
            for (name, value) in [(OFFSET, 5), (headers::ITEMS, 2), (ITEMS_TOTAL, 7)] {
                table.insert(name.into(), AMQPValue::LongLongInt(value));
            }
        });
        let properties = letter.properties.with_type("done".into()).with_reply_to("answers".into());
        let shown = text(&DeadLetter { properties, ..letter });
        assert!(
            shown.contains(
                "Results of job a, in vramq.dead.minilm: 2 items from number 5 on, of 7, the last ones."
            ),
            "{shown}"
        );
        assert!(shown.contains("Create the reply queue answers again"), "{shown}");
    }
}
