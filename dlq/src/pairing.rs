//! Finds the jobs whose results are all there as other dead letters, in one reply or in parts. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use lapin::types::ShortString;
use vramq_schemas::headers::{CALLER, ITEMS_DONE, USER};
use vramq_schemas::{Reason, ReplyHeaders, ReplyKind};

use crate::dead_letter::{DeadLetter, Fingerprint, Summary};

/// The jobs that workers could not answer, and the results, of one queue.
#[derive(Debug, Default)]
pub(crate) struct Pairing {
    jobs: Vec<UnansweredJob>,
    results: HashMap<Identity, BTreeMap<Run, Vec<Part>>>,
}

/// What a job and its replies have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity {
    message_id: Option<String>,
    /// If the job has no correlation id, its replies carry its message id here.
    correlation_id: String,
    user: Option<String>,
    caller: Option<String>,
}

/// What the replies of one run of a job have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Run {
    reply_to: String,
    items_total: u32,
    attempt: u32,
    worker: String,
}

#[derive(Debug)]
struct UnansweredJob {
    identity: Identity,
    /// Empty if the job names no reply queue. Its replies then name the model's default reply queue.
    reply_to: String,
    items_done: u32,
    /// Its number in the plan.
    at: usize,
}

/// A dead letter with results.
#[derive(Debug)]
struct Part {
    offset: u32,
    items: u32,
    is_last: bool,
    fingerprint: Fingerprint,
}

impl Identity {
    fn of(letter: &DeadLetter) -> Option<Self> {
        let p = &letter.properties;
        let message_id = text(p.message_id().as_ref());
        let correlation_id = text(p.correlation_id().as_ref()).or_else(|| message_id.clone())?;
        Some(Self { message_id, correlation_id, user: letter.text(USER), caller: letter.text(CALLER) })
    }
}

impl Pairing {
    /// Adds a dead letter, with its number in the plan.
    pub(crate) fn add(&mut self, letter: &DeadLetter, summary: &Summary, at: usize) {
        let Some(identity) = Identity::of(letter) else { return };
        let reply_to = text(letter.properties.reply_to().as_ref()).unwrap_or_default();
        match summary.results {
            Some(kind) => {
                let Ok(headers) = ReplyHeaders::read(&letter.headers) else { return };
                let ReplyHeaders { offset, items, items_total, attempt, worker, .. } = headers;
                let run = Run { reply_to, items_total, attempt, worker };
                let (is_last, fingerprint) = (kind == ReplyKind::Done, summary.fingerprint);
                let part = Part { offset, items, is_last, fingerprint };
                self.results.entry(identity).or_default().entry(run).or_default().push(part);
            }
            None if summary.group.reason == Reason::Unroutable.as_str() => {
                let items_done = letter.number_u32(ITEMS_DONE);
                self.jobs.push(UnansweredJob { identity, reply_to, items_done, at });
            }
            None => {}
        }
    }

    /// The jobs whose results are complete, each by its number in the plan, with the letters that hold the results.
    pub(crate) fn answered(self) -> Vec<(usize, Vec<Fingerprint>)> {
        let Self { mut jobs, mut results } = self;
        for parts in results.values_mut().flat_map(BTreeMap::values_mut) {
            parts.sort_by_key(|part| Reverse(part.offset));
        }
        // Jobs without a reply queue last: they would take the results of others with the same id.
        jobs.sort_by_key(|job| job.reply_to.is_empty());
        let mut answered = Vec::new();
        for UnansweredJob { identity, reply_to, items_done, at } in jobs {
            let runs = results.get_mut(&identity).into_iter().flatten();
            let results = runs
                .filter(|(run, _)| reply_to.is_empty() || run.reply_to == reply_to)
                .find_map(|(run, parts)| take_all(parts, items_done, run.items_total));
            answered.extend(results.map(|results| (at, results)));
        }
        answered
    }
}

/// Removes the results of all items from `first` on from the parts of a run, which are in descending order. `None`, without a change, if an
/// item is missing.
fn take_all(parts: &mut Vec<Part>, first: u32, items_total: u32) -> Option<Vec<Fingerprint>> {
    // The parts, by offset, from which on all later items are there.
    let mut complete = HashMap::new();
    for (at, part) in parts.iter().enumerate() {
        let end = part.offset.checked_add(part.items);
        let is_complete = if part.is_last {
            end == Some(items_total)
        } else {
            part.items > 0 && end.is_some_and(|end| complete.contains_key(&end))
        };
        if is_complete {
            complete.insert(part.offset, at);
        }
    }
    let mut chain = Vec::new();
    let mut next = first;
    loop {
        let at = *complete.get(&next)?;
        chain.push(at);
        if parts[at].is_last {
            break;
        }
        next = next.checked_add(parts[at].items)?;
    }
    // Offsets rise along the chain, so indices fall, and removing one part does not move those still to be removed.
    Some(chain.into_iter().map(|at| parts.remove(at).fingerprint).collect())
}

/// An empty property is none: workers leave it out of replies.
fn text(text: Option<&ShortString>) -> Option<String> {
    text.map(|text| text.as_str().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letter::tests::written;
    use lapin::BasicProperties;
    use lapin::types::AMQPValue;
    use vramq_schemas::ReplyKind::{Done, Part as PartOf};

    /// The properties that identify a job, and what a worker makes of them in its replies.
    #[derive(Clone, Copy)]
    struct Named {
        message_id: Option<&'static str>,
        correlation_id: Option<&'static str>,
        reply_to: Option<&'static str>,
    }

    const BOTH: Named = Named { message_id: Some("a"), correlation_id: Some("c"), reply_to: Some("replies") };

    const NONE: [(usize, Vec<usize>); 0] = [];

    impl Named {
        fn properties(self) -> BasicProperties {
            let mut properties = BasicProperties::default();
            if let Some(id) = self.message_id {
                properties = properties.with_message_id(id.into());
            }
            if let Some(id) = self.correlation_id {
                properties = properties.with_correlation_id(id.into());
            }
            if let Some(queue) = self.reply_to {
                properties = properties.with_reply_to(queue.into());
            }
            properties
        }

        fn job(self, items_done: u32) -> DeadLetter {
            let letter = written("", Reason::Unroutable, |table| {
                table.insert(ITEMS_DONE.into(), AMQPValue::LongLongInt(items_done.into()));
            });
            DeadLetter { properties: self.properties(), ..letter }
        }

        /// Results of some items of twelve.
        fn reply(self, kind: ReplyKind, offset: u32, items: u32) -> DeadLetter {
            let headers = ReplyHeaders { offset, items, items_total: 12, ..ReplyHeaders::default() };
            let letter = written("", Reason::Unroutable, |table| {
                for (name, value) in &headers.to_table() {
                    table.insert(name.clone(), value.clone());
                }
            });
            let of_reply = Self {
                correlation_id: self.correlation_id.or(self.message_id),
                reply_to: self.reply_to.filter(|queue| !queue.is_empty()).or(Some("of the model")),
                ..self
            };
            let properties = of_reply.properties().with_type(kind.as_str().into());
            DeadLetter { properties, ..letter }
        }
    }

    /// Which letters answer which, by their numbers.
    fn answered(letters: &[DeadLetter]) -> Vec<(usize, Vec<usize>)> {
        let mut pairing = Pairing::default();
        for (at, letter) in letters.iter().enumerate() {
            pairing.add(letter, &letter.summary(), at);
        }
        let number = |it: Fingerprint| letters.iter().position(|letter| letter.fingerprint() == it).unwrap();
        let by_number = |(at, all): (usize, Vec<Fingerprint>)| (at, all.into_iter().map(number).collect());
        pairing.answered().into_iter().map(by_number).collect()
    }

    #[test]
    fn one_of_two_ids_is_enough_and_a_reply_queue_may_be_the_models() {
        for (message_id, correlation_id) in
            [(Some("a"), Some("c")), (Some("a"), None), (None, Some("c")), (Some("a"), Some("a"))]
        {
            for reply_to in [Some("replies"), Some(""), None] {
                let named = Named { message_id, correlation_id, reply_to };
                let letters = [named.reply(Done, 0, 12), named.job(0)];
                assert_eq!(
                    answered(&letters),
                    [(1, vec![0])],
                    "{message_id:?} {correlation_id:?} {reply_to:?}"
                );
            }
        }
    }

    #[test]
    fn an_empty_id_is_none() {
        let job = Named { message_id: Some(""), ..BOTH };
        let replies = Named { message_id: None, ..BOTH };
        assert_eq!(answered(&[replies.reply(Done, 0, 12), job.job(0)]), [(1, vec![0])]);
    }

    #[test]
    fn letters_of_other_jobs_answer_none() {
        let other_id = Named { message_id: Some("b"), ..BOTH };
        let other_correlation = Named { correlation_id: Some("d"), ..BOTH };
        let other_queue = Named { reply_to: Some("elsewhere"), ..BOTH };
        for other in [other_id, other_correlation, other_queue] {
            assert_eq!(answered(&[other.reply(Done, 0, 12), BOTH.job(0)]), NONE);
        }
        let mut of_other_user = BOTH.reply(Done, 0, 12);
        of_other_user.headers.insert(USER.into(), AMQPValue::LongString("mallory".into()));
        assert_eq!(answered(&[of_other_user, BOTH.job(0)]), NONE);
        // A job that was not `unroutable` has no undelivered results.
        let failed =
            DeadLetter { properties: BOTH.properties(), ..written("", Reason::EngineFailed, |_| {}) };
        assert_eq!(answered(&[BOTH.reply(Done, 0, 12), failed]), NONE);
    }

    #[test]
    fn parts_answer_a_job_if_all_are_there() {
        let parts = [BOTH.job(0), BOTH.reply(Done, 9, 3), BOTH.reply(PartOf, 0, 5), BOTH.reply(PartOf, 5, 4)];
        assert_eq!(answered(&parts), [(0, vec![2, 3, 1])]);
        for missing in 1..parts.len() {
            let some: Vec<_> =
                parts.iter().enumerate().filter(|(at, _)| *at != missing).map(|(_, it)| it.clone()).collect();
            assert_eq!(answered(&some), NONE, "without {missing}");
        }
        // Items that were answered before need no part.
        let [_, done, _, middle] = &parts;
        assert_eq!(answered(&[BOTH.job(5), middle.clone(), done.clone()]), [(0, vec![1, 2])]);
        // All items were answered before, and only the end was not taken.
        assert_eq!(answered(&[BOTH.job(12), BOTH.reply(Done, 12, 0)]), [(0, vec![1])]);
        // Gaps, overlaps and ends beyond the job's items complete nothing.
        for (offset, items) in [(0, 4), (0, 6), (0, 0), (1, 4), (0, u32::MAX)] {
            assert_eq!(
                answered(&[BOTH.job(0), BOTH.reply(PartOf, offset, items), middle.clone(), done.clone()]),
                NONE
            );
        }
        assert_eq!(answered(&[BOTH.job(0), BOTH.reply(Done, 0, 11)]), NONE);
    }

    #[test]
    fn a_reply_answers_one_job_and_runs_are_not_mixed() {
        let letters = [BOTH.job(0), BOTH.job(0), BOTH.reply(Done, 0, 12)];
        assert_eq!(answered(&letters), [(0, vec![2])]);
        let mut of_other_attempt = BOTH.reply(Done, 5, 7);
        of_other_attempt.headers.insert("attempt".into(), AMQPValue::LongLongInt(3));
        assert_eq!(answered(&[BOTH.job(0), BOTH.reply(PartOf, 0, 5), of_other_attempt]), NONE);
        // The job that names the queue gets its results, whichever comes first.
        let nameless = Named { reply_to: None, ..BOTH };
        assert_eq!(answered(&[nameless.job(0), BOTH.job(0), BOTH.reply(Done, 0, 12)]), [(1, vec![2])]);
    }
}
