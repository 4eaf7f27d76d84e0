//! Tests of what the answers and heartbeats of workers mean for a command.

use super::*;

const HOSTILE: &str = "\u{1b}[2J\u{202e}\u{9b}31m\r\n";

fn hostile(outcome: Outcome) -> Answer {
    let (worker, text) = (HOSTILE.to_owned(), HOSTILE.to_owned());
    Answer { worker, at_ms: 0, outcome, text, last: true, state: WorkerState::default() }
}

fn answer(worker: &str, outcome: Outcome) -> Answer {
    Answer { worker: worker.to_owned(), text: "as asked".to_owned(), ..hostile(outcome) }
}

fn heartbeat(worker: &str, pid: u32, state: WorkerState) -> Heartbeat {
    Heartbeat { worker: worker.to_owned(), pid, state, ..Heartbeat::default() }
}

#[test]
fn workers_with_one_name_answer_one_by_one() {
    let named = ["twin".to_owned()];
    let how = |expect| {
        let mut how = How::default();
        how.expect = expect;
        how
    };
    let [one, two, gone] = [(1, WorkerState::Consuming), (2, WorkerState::Consuming), (1, WorkerState::Gone)]
        .map(|(pid, state)| heartbeat("twin", pid, state));
    let mut responses = Responses::default();
    responses.workers.insert("twin".to_owned(), Known::default());
    let ends = |responses: &Responses, expect| responses.is_complete(&Command::Pause, &named, &how(expect));
    assert!(!ends(&responses, None));
    responses.answered(answer("twin", Outcome::Done), false).unwrap();
    assert!(ends(&responses, None) && !ends(&responses, Some(2)));
    // The heartbeats show that there are two.
    responses.heartbeat(one, &named);
    assert!(ends(&responses, None));
    responses.heartbeat(two, &named);
    assert!(!ends(&responses, None));
    assert_eq!(responses.report(&Command::Pause, &how(None)).unwrap(), exit::FAILED);
    responses.answered(answer("twin", Outcome::Done), false).unwrap();
    assert!(ends(&responses, None) && ends(&responses, Some(2)));
    assert_eq!(responses.report(&Command::Pause, &how(None)).unwrap(), exit::DONE);
    // One that refuses is not hidden by another that has obeyed.
    responses.answered(answer("twin", Outcome::Refused), false).unwrap();
    assert_eq!(responses.report(&Command::Pause, &how(None)).unwrap(), exit::FAILED);
    // One that has ended is not waited for.
    let mut responses = Responses::default();
    responses.heartbeat(heartbeat("twin", 1, WorkerState::Consuming), &named);
    responses.heartbeat(gone, &named);
    responses.answered(answer("twin", Outcome::Done), false).unwrap();
    responses.heartbeat(heartbeat("twin", 3, WorkerState::Consuming), &named);
    assert!(ends(&responses, None));
}

/// They do not answer, however long the command waits.
#[test]
fn workers_that_do_not_listen_count_among_the_expected_ones() {
    let named = ["there".to_owned(), "off".to_owned()];
    let mut how = How::default();
    how.expect = Some(2);
    let workers = named.iter().map(|name| (name.clone(), Known::default())).collect();
    let mut responses = Responses { workers, ..Responses::default() };
    responses.not_listening.insert("off".to_owned());
    assert!(!responses.is_complete(&Command::Pause, &named, &how));
    responses.answered(answer("there", Outcome::Done), false).unwrap();
    assert!(responses.is_complete(&Command::Pause, &named, &how));
    assert_eq!(responses.report(&Command::Pause, &how).unwrap(), exit::FAILED);
}

#[test]
fn texts_of_workers_are_escaped() {
    for json in [false, true] {
        let shown = shown(&hostile(Outcome::Refused), json);
        assert!(!shown.chars().any(|c| (c.is_control() && c != '\t') || c == '\u{202e}'), "{shown:?}");
        assert!(shown.contains("[2J"), "{shown:?}");
    }
}
