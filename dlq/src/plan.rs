//! The plan of an action: which dead letters it takes, and what it publishes for each. A scan creates the plan; the action
//! carries out nothing else. Pure.

use std::collections::HashMap;

use crate::dead_letter::{DeadLetter, Fingerprint, Summary};
use crate::error::Error;
use crate::pairing::Pairing;
use crate::select::{Filter, Name, NameMatch};

/// What the arguments select.
#[derive(Debug)]
pub struct Query {
    pub names: Vec<Name>,
    pub filter: Filter,
    /// At most so many, oldest first.
    pub first: Option<u64>,
}

/// A selected dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected {
    pub fingerprint: Fingerprint,
    pub id: Option<String>,
    pub kind: Kind,
    /// It was retried before.
    pub retried: bool,
}

/// What a dead letter holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Job,
    Results,
    /// A job whose complete results are in these other dead letters, which are also selected. Delivering them answers the job.
    AnsweredBy(Vec<Fingerprint>),
}

/// The plan for one queue.
#[derive(Debug, Default)]
pub struct Plan {
    pub selected: Vec<Selected>,
    /// How many dead letters match the query, selected or not. Identical ones have one fingerprint.
    copies: HashMap<Fingerprint, usize>,
    /// What each name matches, by id and by fingerprint.
    matches: HashMap<usize, (Vec<Fingerprint>, Vec<Fingerprint>)>,
}

/// Builds the plan for one queue from all its dead letters, oldest first.
#[derive(Debug, Default)]
pub struct PlanBuilder {
    plan: Plan,
    pairing: Pairing,
}

/// What a plan's letters are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds {
    /// To be run again.
    pub jobs: u64,
    /// Results, which a retry delivers.
    pub results: u64,
    /// Jobs that these results answer, so that they do not run again.
    pub answered: u64,
    /// Of all, those that were retried before and failed again.
    pub retried: u64,
}

impl PlanBuilder {
    /// Considers the next dead letter of the queue. Returns whether it is selected. `before` is how many are selected in other queues.
    pub fn consider(&mut self, letter: &DeadLetter, query: &Query, before: u64) -> bool {
        let (plan, summary) = (&mut self.plan, letter.summary());
        if !query.filter.takes(letter, &summary) || !plan.is_named(&summary, &query.names) {
            return false;
        }
        *plan.copies.entry(summary.fingerprint).or_default() += 1;
        if query.first.is_some_and(|first| before + plan.selected.len() as u64 >= first) {
            return false;
        }
        self.pairing.add(letter, &summary, plan.selected.len());
        let kind = if summary.results.is_some() { Kind::Results } else { Kind::Job };
        let Summary { fingerprint, id, retries, .. } = summary;
        plan.selected.push(Selected { fingerprint, id, kind, retried: retries > 0 });
        true
    }

    /// The plan. Now that all results are known, jobs are paired with theirs.
    pub fn finish(self) -> Plan {
        let Self { mut plan, pairing } = self;
        for (at, results) in pairing.answered() {
            plan.selected[at].kind = Kind::AnsweredBy(results);
        }
        plan
    }
}

impl Plan {
    fn is_named(&mut self, letter: &Summary, names: &[Name]) -> bool {
        let mut is_named = names.is_empty();
        for (at, name) in names.iter().enumerate() {
            let name_match = name.matches(letter);
            let (by_id, by_fingerprint) = self.matches.entry(at).or_default();
            match name_match {
                NameMatch::ById => by_id.push(letter.fingerprint),
                NameMatch::ByFingerprint => by_fingerprint.push(letter.fingerprint),
                NameMatch::None => {}
            }
            is_named |= name_match != NameMatch::None;
        }
        is_named
    }

    /// The letters with the results of jobs that need not run again.
    pub(crate) fn results_of_answered(&self) -> impl Iterator<Item = Fingerprint> {
        let results = self.selected.iter().filter_map(|selected| match &selected.kind {
            Kind::AnsweredBy(results) => Some(results),
            Kind::Job | Kind::Results => None,
        });
        results.flatten().copied()
    }

    /// Counts the selected letters by what they are.
    pub fn kinds(&self) -> Kinds {
        let mut kinds = Kinds::default();
        for selected in &self.selected {
            match selected.kind {
                Kind::Job => kinds.jobs += 1,
                Kind::Results => kinds.results += 1,
                Kind::AnsweredBy(_) => kinds.answered += 1,
            }
            kinds.retried += u64::from(selected.retried);
        }
        kinds
    }

    /// What is to be taken from the queue.
    pub(crate) fn claims(&self) -> Claims {
        let mut kinds: HashMap<_, Vec<_>> = HashMap::new();
        for Selected { fingerprint, kind, .. } in &self.selected {
            kinds.entry(*fingerprint).or_default().push(kind.clone());
        }
        Claims { kinds, copies: self.copies.clone(), settled: HashMap::new() }
    }
}

/// The names that match nothing in any queue.
///
/// # Errors
/// An ambiguous name: an action on the wrong dead letter cannot be undone.
pub fn unmatched<'a>(
    plans: impl Iterator<Item = &'a Plan> + Clone,
    names: &'a [Name],
) -> Result<Vec<&'a str>, Error> {
    let mut unmatched = Vec::new();
    for (at, name) in names.iter().enumerate() {
        let mut by_id = Vec::new();
        let mut by_fingerprint = Vec::new();
        for (ids, fingerprints) in plans.clone().filter_map(|plan| plan.matches.get(&at)) {
            by_id.extend_from_slice(ids);
            by_fingerprint.extend_from_slice(fingerprints);
        }
        by_fingerprint.sort_unstable();
        by_fingerprint.dedup();
        if by_fingerprint.len() > 1 || (!by_id.is_empty() && !by_fingerprint.is_empty()) {
            return Err(Error::Usage(format!(
                "`{}` is ambiguous: it starts more than one fingerprint, or is an id as well; use more digits, or id:… or fp:…",
                crate::text::safe(&name.text)
            )));
        }
        if by_id.is_empty() && by_fingerprint.is_empty() {
            unmatched.push(name.text.as_str());
        }
    }
    Ok(unmatched)
}

/// What is still to be taken, over several readings of the queue.
#[derive(Debug)]
pub(crate) struct Claims {
    kinds: HashMap<Fingerprint, Vec<Kind>>,
    /// How many dead letters the plan saw, taken or not.
    copies: HashMap<Fingerprint, usize>,
    /// How many of them the destination has. They were acknowledged.
    settled: HashMap<Fingerprint, usize>,
}

/// What to do with a dead letter that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    Leave,
    Take(Kind),
    /// It was taken and acknowledged before, but the broker lost the acknowledgement.
    Remove,
}

impl Claims {
    pub(crate) fn left(&self) -> usize {
        self.kinds.values().map(Vec::len).sum()
    }

    /// Stops taking further letters: they stay.
    pub(crate) fn give_up(&mut self) {
        self.kinds.clear();
    }

    /// Whether anything was taken, so that lost acknowledgements have to be looked for.
    pub(crate) fn has_settled(&self) -> bool {
        !self.settled.is_empty()
    }

    /// Starts a reading of the queue, which delivers each letter once at most.
    pub(crate) fn reading(&mut self) -> Reading<'_> {
        let staying = self.settled.iter().map(|(fingerprint, settled)| {
            let seen = self.copies.get(fingerprint).copied().unwrap_or_default();
            let claimed = self.kinds.get(fingerprint).map_or(0, Vec::len);
            (*fingerprint, seen.saturating_sub(settled + claimed))
        });
        Reading { staying: staying.collect(), claims: self }
    }
}

#[derive(Debug)]
pub(crate) struct Reading<'a> {
    claims: &'a mut Claims,
    /// How many identical letters stay in the queue, for each letter that the destination had before this reading. They were not selected, or
    /// could not be stored, or the broker has not said whether they were.
    staying: HashMap<Fingerprint, usize>,
}

impl Reading<'_> {
    pub(crate) fn left(&self) -> usize {
        self.claims.left()
    }

    /// Decides on the next letter. `redelivered`: a consumer got it before. The reader that made the plan got all letters of the plan.
    pub(crate) fn claim(&mut self, fingerprint: Fingerprint, redelivered: bool) -> Claim {
        if let Some(kinds) = self.claims.kinds.get_mut(&fingerprint) {
            let kind = kinds.pop();
            if kinds.is_empty() {
                self.claims.kinds.remove(&fingerprint);
            }
            return kind.map_or(Claim::Leave, Claim::Take);
        }
        match self.staying.get_mut(&fingerprint) {
            Some(0) if redelivered => Claim::Remove,
            // A later one that is identical to one of the plan's.
            Some(0) => Claim::Leave,
            Some(staying) => {
                *staying -= 1;
                Claim::Leave
            }
            None => Claim::Leave,
        }
    }

    /// Gives a claim back, so that another reading takes the letter.
    pub(crate) fn unclaim(&mut self, fingerprint: Fingerprint, kind: Kind) {
        self.claims.kinds.entry(fingerprint).or_default().push(kind);
    }

    pub(crate) fn settle(&mut self, fingerprint: Fingerprint) {
        *self.claims.settled.entry(fingerprint).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letter::tests::written;
    use vramq_schemas::headers::ITEMS_DONE;
    use vramq_schemas::{Reason, ReplyHeaders, fields};

    fn query(names: &[&str], first: Option<u64>) -> Query {
        let names = names.iter().map(|text| Name { text: (*text).to_owned() }).collect();
        Query { names, filter: Filter::default(), first }
    }

    fn planned(letters: &[DeadLetter], query: &Query) -> Plan {
        let mut plan = PlanBuilder::default();
        for letter in letters {
            plan.consider(letter, query, 0);
        }
        plan.finish()
    }

    /// Of a job of five items: with the results from `offset` on, or with the job that stopped there.
    fn unroutable(id: &str, offset: u32, results: bool) -> DeadLetter {
        let letter = written(id, Reason::Unroutable, |table| {
            if results {
                let reply =
                    ReplyHeaders { offset, items: 5 - offset, items_total: 5, ..ReplyHeaders::default() };
                for (name, value) in &reply.to_table() {
                    table.insert(name.clone(), value.clone());
                }
            } else {
                table.insert(ITEMS_DONE.into(), fields::long(offset.into()));
            }
        });
        let properties = letter.properties.with_reply_to("replies".into());
        let properties = if results { properties.with_type("done".into()) } else { properties };
        DeadLetter { properties, ..letter }
    }

    #[test]
    fn a_job_is_answered_by_results_that_begin_where_it_stopped() {
        let letters = [
            unroutable("a", 3, false),
            unroutable("a", 3, true),
            unroutable("b", 3, false),
            unroutable("b", 0, true),
            unroutable("c", 0, false),
        ];
        let kinds = |plan: Plan| plan.selected.into_iter().map(|selected| selected.kind).collect::<Vec<_>>();
        let answered = Kind::AnsweredBy(vec![letters[1].fingerprint()]);
        let all = planned(&letters, &query(&[], None));
        assert_eq!(kinds(all), [answered, Kind::Results, Kind::Job, Kind::Results, Kind::Job]);
        // Without its results it is a job to be run.
        let alone = planned(&letters, &query(&[&letters[0].fingerprint().to_string()], None));
        assert_eq!(kinds(alone), [Kind::Job]);
    }

    #[test]
    fn the_first_few_are_the_oldest() {
        let letters = ["a", "b", "c"].map(|id| written(id, Reason::Malformed, |_| {}));
        let plan = planned(&letters, &query(&[], Some(2)));
        let ids: Vec<_> = plan.selected.iter().filter_map(|selected| selected.id.as_deref()).collect();
        assert_eq!(ids, ["a", "b"]);
        let mut later = PlanBuilder::default();
        assert!(!later.consider(&letters[2], &query(&[], Some(2)), 2));
        assert_eq!(later.finish().selected, []);
    }

    #[test]
    fn an_ambiguous_name_is_refused() {
        let letter = written("a", Reason::Malformed, |_| {});
        let digits = letter.fingerprint().to_string();
        let impostor = written(&digits, Reason::Malformed, |_| {});
        let named = query(&[&digits, "b"], None);
        let plans = [planned(&[letter, impostor], &named)];
        assert!(unmatched(plans.iter(), &named.names).is_err());
        let named = query(&[&format!("fp:{digits}"), "b"], None);
        let plans = [planned(&[written("a", Reason::Malformed, |_| {})], &named)];
        assert_eq!(unmatched(plans.iter(), &named.names).unwrap(), ["b"]);
    }

    #[test]
    fn a_taken_letter_that_is_delivered_again_is_removed_and_its_copies_stay() {
        let [twin, other] = ["a", "b"].map(|id| written(id, Reason::Malformed, |_| {}));
        let plan = planned(&[twin.clone(), twin.clone(), other.clone()], &query(&["a"], Some(1)));
        let mut claims = plan.claims();
        let mut reading = claims.reading();
        assert_eq!(reading.claim(other.fingerprint(), true), Claim::Leave);
        assert_eq!(reading.claim(twin.fingerprint(), true), Claim::Take(Kind::Job));
        reading.settle(twin.fingerprint());
        assert_eq!(claims.left(), 0);
        // Another reading: the copy that was not selected, and the taken one, whose acknowledgement the broker lost.
        let mut reading = claims.reading();
        assert_eq!(reading.claim(twin.fingerprint(), true), Claim::Leave);
        assert_eq!(reading.claim(twin.fingerprint(), true), Claim::Remove);
        assert_eq!(reading.claim(other.fingerprint(), true), Claim::Leave);
    }

    /// One of three identical letters is transferred. The next one cannot be stored, and the last one is not read before the action ends.
    #[test]
    fn identical_letters_that_were_not_transferred_stay() {
        let twin = written("a", Reason::Malformed, |_| {});
        let fingerprint = twin.fingerprint();
        let mut claims = planned(&[twin.clone(), twin.clone(), twin], &query(&[], None)).claims();
        let mut reading = claims.reading();
        assert_eq!(reading.claim(fingerprint, true), Claim::Take(Kind::Job));
        reading.settle(fingerprint);
        assert_eq!(reading.claim(fingerprint, true), Claim::Take(Kind::Job));
        claims.give_up();
        // Another reading, without and with the transferred one, whose acknowledgement the broker lost.
        for removed in [0, 1] {
            let mut reading = claims.reading();
            let claimed: Vec<_> = (0..2 + removed).map(|_| reading.claim(fingerprint, true)).collect();
            assert_eq!(claimed[..2], [Claim::Leave, Claim::Leave]);
            assert_eq!(claimed[2..], vec![Claim::Remove; removed]);
            // One that came later.
            assert_eq!(reading.claim(fingerprint, false), Claim::Leave);
        }
    }
}
