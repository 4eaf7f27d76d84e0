//! A letter's story in words that a tired person understands. Pure.

use vramq_schemas::dead_letter::{ITEM, ITEM_COST, NEEDS_BYTES};
use vramq_schemas::headers;
use vramq_schemas::headers::{ITEMS_DONE, ITEMS_TOTAL, OFFSET, RETRIES};
use vramq_schemas::{Attempt, Reason, ReplyKind};

use super::letter::{BY_BROKER, Cause, Letter};
use crate::cli::screen::{bytes, counted, moment, safe};

/// What an attempt's `outcome` says of a worker that vanished, and of a device that did.
const WORKER_LOST: &str = "worker-lost";
const DEVICE_LOST: &str = "device-lost";
const PROCESS_LOST: &str = "process-lost";

/// The story, a paragraph with a heading after the other.
pub(super) fn story(letter: &Letter) -> Vec<(&'static str, Vec<String>)> {
    let cause = letter.cause();
    let mut told = vec![("What it is", what_it_is(letter))];
    let attempts: Vec<_> = letter.history().iter().map(attempt).collect();
    if !attempts.is_empty() {
        told.push(("What happened", attempts));
    }
    told.push(("Why it ended", why_it_ended(&cause)));
    if let Some(fit) = what_would_fit(letter) {
        told.push(("What would fit", vec![fit]));
    }
    told.push(("What to do", vec![what_to_do(letter, &cause)]));
    told
}

fn what_it_is(letter: &Letter) -> Vec<String> {
    let id = letter.id().map_or("without an id".to_owned(), safe);
    let queue = safe(&letter.queue);
    let mut told = match letter.results() {
        None => vec![format!("Job {id}, in {queue}.")],
        Some(kind) => {
            let (offset, items) =
                (letter.number(OFFSET).unwrap_or(0), letter.number(headers::ITEMS).unwrap_or(0));
            let total = letter.number(ITEMS_TOTAL).unwrap_or(0);
            let last = if kind == ReplyKind::Done { ", the last ones" } else { "" };
            vec![format!(
                "Results of job {id}, in {queue}: {} from number {offset} on, of {total}{last}. The job itself is a letter \
                 of its own.",
                counted(items, "item")
            )]
        }
    };
    match letter.number(ITEMS_DONE).unwrap_or(0) {
        0 => {}
        done => told.push(format!(
            "{} of it are answered already: a retry goes on after them.",
            counted(done, "item")
        )),
    }
    match letter.count(RETRIES) {
        0 => {}
        retries => {
            told.push(format!("It was sent on from here {} before, and failed again.", times(retries)));
        }
    }
    told
}

fn times(n: u32) -> String {
    if n == 1 { "once".to_owned() } else { format!("{n} times") }
}

fn attempt(attempt: &Attempt) -> String {
    let Attempt { at_ms, worker, device, outcome, item, items, longest, asked, free, total, foreign, alone } =
        attempt;
    let (at, worker, device) = (moment(*at_ms), safe(worker), safe(device));
    if outcome == WORKER_LOST {
        return format!("{at}  A worker vanished while it held the job; {worker} noticed.");
    }
    if outcome == DEVICE_LOST {
        return format!("{at}  The device of {worker} was lost, or did not come back, with the job on it.");
    }
    if outcome == PROCESS_LOST {
        return format!(
            "{at}  A process of the model died while it ran the job; its worker, {worker}, went on."
        );
    }
    let company = if *alone { "nobody else on the device" } else { "other processes on the device" };
    let others =
        if *foreign > 0 { format!(", {} with other processes", bytes(*foreign)) } else { String::new() };
    let ended =
        if outcome == Reason::OutOfMemory.as_str() { "ran out of memory".to_owned() } else { safe(outcome) };
    format!(
        "{at}  {worker} ran {} from number {item} on, the longest of cost {longest}, with {company}. It asked {device} for \
         {}; free were {} of {}{others}: {ended}.",
        counted((*items).into(), "item"),
        bytes(*asked),
        bytes(*free),
        bytes(*total),
    )
}

fn why_it_ended(cause: &Cause) -> Vec<String> {
    let at = cause.died_at_ms.map_or("At a time that nobody wrote down".to_owned(), moment);
    let who = match (&cause.worker, cause.version.as_str()) {
        (Some(worker), version) => format!(", {}, version {}", safe(worker), safe(version)),
        (None, BY_BROKER) => ", the broker".to_owned(),
        (None, _) => String::new(),
    };
    vec![format!("{at}{who}: {}.", safe(&cause.reason)), safe(&cause.error)]
}

fn what_would_fit(letter: &Letter) -> Option<String> {
    let needs = letter.number(NEEDS_BYTES)?;
    let (item, cost) = (letter.number(ITEM)?, letter.number(ITEM_COST)?);
    Some(format!(
        "Item {item}, of cost {cost}, runs alone on a device with {} free beside the model's weights ({needs} bytes).",
        bytes(needs)
    ))
}

fn what_to_do(letter: &Letter, cause: &Cause) -> String {
    let name = letter.fingerprint();
    let model = safe(letter.model());
    let retry = format!("vramq dlq retry --model {model} {name}");
    if letter.results().is_some() {
        return format!(
            "Make the reply queue {} again, then `{retry}`: it delivers these results, and the job need not run again if \
             both are retried together. If its caller is gone for good, drop both.",
            letter.properties.reply_to().as_ref().map_or(String::new(), |queue| safe(queue.as_str()))
        );
    }
    let Ok(reason) = cause.reason.parse::<Reason>() else {
        return match cause.reason.as_str() {
            "delivery-limit" => format!(
                "Workers came and went without settling it; their logs at that time say why. It may bring workers down: \
                 `{retry}`, and watch one worker."
            ),
            "maxlen" => format!("The queue was full. When there is room: `{retry}`."),
            _ => format!("If its cause is gone: `{retry}`."),
        };
    };
    match reason {
        Reason::Malformed | Reason::UnsupportedEncoding | Reason::InvalidInput => format!(
            "A retry would fail in the same way: what published it has to be mended, and publish anew. Look at the body with \
             --body; drop it when that is done. If workers have learned to read it since: `{retry}`."
        ),
        Reason::TooLarge => {
            "Publish it anew in smaller jobs, or with its inputs by reference. Then drop it.".to_owned()
        }
        Reason::WrongModel => {
            format!("It went to the wrong queue: `{retry} --to vramq.jobs.MODEL` sends it to another.")
        }
        Reason::Expired => format!(
            "It waited longer than its publisher allowed. If somebody still wants the answer: `{retry}`; it does not expire \
             again, unless --set expiration=… says so. If many expire, there are too few workers."
        ),
        Reason::Unroutable => format!(
            "It ran, but its reply queue did not exist, or stayed full. Make the queue again; then retry it together with its \
             results (another letter with the same id), and nothing runs twice. Alone it runs again: `{retry}`."
        ),
        Reason::OutOfMemory => format!(
            "Give the device more free memory (fewer neighbours, another device), then `{retry}`; or send it to workers with \
             larger devices: `{retry} --to QUEUE`. Otherwise its publisher has to send shorter items."
        ),
        Reason::EngineFailed => format!(
            "The device was well, so it is this job, or a fault in the engine: the error above, and the worker's log, say more. \
             When it is mended: `{retry}`, one at first."
        ),
        Reason::Crashed => format!(
            "It is likely to bring workers down. Keep a copy (vramq dlq export), and find out why on a worker that nobody \
             needs. A retry starts it alone: `{retry}`."
        ),
        Reason::TimedOut => format!(
            "Nothing of it was finished within worker.job_s. Publish it in smaller jobs, or raise worker.job_s (and the \
             broker's consumer_timeout above it), then `{retry}`."
        ),
        Reason::Cancelled => {
            format!("Somebody asked for it (vramq control cancel). If it is wanted after all: `{retry}`.")
        }
        // A reason of a later version.
        _ => format!("If its cause is gone: `{retry}`."),
    }
}

#[cfg(test)]
mod tests {
    use super::super::letter::tests::written;
    use super::*;
    use lapin::types::AMQPValue;
    use vramq_schemas::{JobHeaders, Misfit};

    const MIB: u64 = 1 << 20;

    fn text(letter: &Letter) -> String {
        let told = story(letter).into_iter();
        told.map(|(heading, lines)| format!("{heading}\n{}\n", lines.join("\n"))).collect()
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
            let misfit = Misfit { item: 3, cost: 512, needs_bytes: 900 * MIB };
            let letter = vramq_schemas::DeadLetter::read(table).unwrap();
            vramq_schemas::DeadLetter { misfit: Some(misfit), ..letter }.write(table);
        });
        let told = text(&letter);
        for part in [
            "Job job-7, in vramq.dead.minilm.",
            "3 items of it are answered already",
            "sent on from here 2 times before",
            "2023-11-14T22:13:20Z  w1 ran 2 items from number 3 on, the longest of cost 512, with other processes on the device. \
             It asked cuda:0 for 900.0 MiB; free were 100.0 MiB of 1000.0 MiB, 50.0 MiB with other processes: ran out of memory.",
            "w1 ran 1 item from number 3 on, the longest of cost 512, with nobody else on the device.",
            "A worker vanished while it held the job; w1 noticed.",
            "2023-11-14T22:13:20Z, w1, version 0.1.0: out-of-memory.",
            "Item 3, of cost 512, runs alone on a device with 900.0 MiB free beside the model's weights (943718400 bytes).",
            &format!("vramq dlq retry --model minilm {}", letter.fingerprint()),
        ] {
            assert!(told.contains(part), "no {part:?} in {told}");
        }
    }

    #[test]
    fn every_reason_says_what_to_do_and_nothing_of_a_stranger_is_active() {
        for reason in Reason::ALL {
            let letter = written("\u{1b}]0;x\u{7}", reason, |table| {
                for name in ["error", "worker"] {
                    table.insert(name.into(), AMQPValue::LongString("\u{1b}[31m\u{202e}\r".into()));
                }
            });
            let told = text(&letter);
            assert!(told.contains("What to do\n") && told.contains(reason.as_str()), "{told}");
            assert!(!told.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{told:?}");
        }
    }

    #[test]
    fn results_say_where_they_belong() {
        let letter = written("a", Reason::Unroutable, |table| {
            for (name, value) in [(OFFSET, 5), (headers::ITEMS, 2), (ITEMS_TOTAL, 7)] {
                table.insert(name.into(), AMQPValue::LongLongInt(value));
            }
        });
        let properties = letter.properties.with_type("done".into()).with_reply_to("answers".into());
        let told = text(&Letter { properties, ..letter });
        assert!(
            told.contains(
                "Results of job a, in vramq.dead.minilm: 2 items from number 5 on, of 7, the last ones."
            ),
            "{told}"
        );
        assert!(told.contains("Make the reply queue answers again"), "{told}");
    }
}
