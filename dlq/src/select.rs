//! Filters and names that select dead letters. Pure.

use crate::dead_letter::{DeadLetter, Summary};

/// The fewest digits of a fingerprint that match.
pub const DIGITS_MIN: usize = 6;

/// Conditions that a dead letter must meet.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Only dead letters with one of these reasons; empty: with any.
    pub reason: Vec<String>,
    /// Only those dead-lettered since.
    pub since: Option<Since>,
    /// Only one group: REASON/MODEL/VERSION, as [`Group`](crate::dead_letter::Group) displays itself.
    pub group: Option<String>,
    /// Only those whose error has this text in it, in any case.
    pub error: Option<String>,
    /// Only those that one of these workers dead-lettered; empty: by any, or by the broker.
    pub worker: Vec<String>,
    /// Only those of one trace: the 32 hexadecimal digits of its id.
    pub trace: Option<String>,
}

/// A moment in Unix milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Since(pub u64);

impl Filter {
    pub fn is_empty(&self) -> bool {
        let Self { reason, since, group, error, worker, trace } = self;
        reason.is_empty()
            && since.is_none()
            && group.is_none()
            && error.is_none()
            && worker.is_empty()
            && trace.is_none()
    }

    /// Whether the letter meets all conditions. A letter without a time passes `since`, because it may be recent enough.
    pub fn takes(&self, letter: &DeadLetter, summary: &Summary) -> bool {
        (self.reason.is_empty() || self.reason.contains(&summary.group.reason))
            && self.since.is_none_or(|Since(at)| summary.dead_at_ms.is_none_or(|dead_at| dead_at >= at))
            && self.group.as_ref().is_none_or(|group| *group == summary.group.to_string())
            && (self.worker.is_empty() || summary.worker.as_ref().is_some_and(|it| self.worker.contains(it)))
            && self.trace.as_ref().is_none_or(|trace| summary.trace.as_ref() == Some(trace))
            // The summary has only the beginning of the text.
            && self.error.as_ref().is_none_or(|text| {
                letter.cause().error.to_lowercase().contains(&text.to_lowercase())
            })
    }
}

/// A message id, or the start of a fingerprint; the prefixes `id:` and `fp:` restrict it to one of them.
#[derive(Clone, Debug)]
pub struct Name {
    pub text: String,
}

/// How a name matches a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameMatch {
    ById,
    ByFingerprint,
    None,
}

impl Name {
    /// The id, and the start of a fingerprint, that it may be.
    fn parts(&self) -> (Option<&str>, Option<&str>) {
        match self.text.split_once(':') {
            Some(("id", id)) => (Some(id), None),
            Some(("fp", digits)) => (None, Some(digits)),
            _ => (Some(self.text.as_str()), Some(self.text.as_str())),
        }
    }

    /// Whether it may be the start of a fingerprint that is too short to match.
    pub fn is_too_short(&self) -> bool {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        self.parts().1.is_some_and(|digits| digits.len() < DIGITS_MIN && digits.bytes().all(is_digit))
    }

    pub fn matches(&self, letter: &Summary) -> NameMatch {
        let (id, digits) = self.parts();
        if id.is_some() && id == letter.id.as_deref() {
            return NameMatch::ById;
        }
        let starts = digits.is_some_and(|digits| {
            digits.len() >= DIGITS_MIN && letter.fingerprint.digits().starts_with(digits)
        });
        if starts { NameMatch::ByFingerprint } else { NameMatch::None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letter::tests::{dead_lettered_by_broker, written};
    use vramq_schemas::Reason;
    use vramq_schemas::dead_letter::ERROR;
    use vramq_schemas::fields::text;
    use vramq_schemas::headers::TRACEPARENT;

    const NOW_MS: u64 = 1_700_000_000_000;

    #[test]
    fn every_condition_must_hold() {
        let letter = written("a", Reason::OutOfMemory, |_| {});
        let summary = letter.summary();
        let filter = |reason: &str, since, group: &str| Filter {
            reason: (!reason.is_empty()).then(|| reason.to_owned()).into_iter().collect(),
            since: Some(Since(since)),
            group: (!group.is_empty()).then(|| group.to_owned()),
            ..Filter::default()
        };
        assert!(Filter::default().takes(&letter, &summary) && Filter::default().is_empty());
        for (filter, takes) in [
            (filter("out-of-memory", NOW_MS, "out-of-memory/minilm/0.1.0"), true),
            (filter("", NOW_MS, ""), true),
            (filter("malformed", NOW_MS, ""), false),
            (filter("", NOW_MS + 1, ""), false),
            (filter("", 0, "out-of-memory/minilm/0.1.1"), false),
        ] {
            assert_eq!(filter.takes(&letter, &summary), takes, "{filter:?}");
            assert!(!filter.is_empty());
        }
        let timeless = Summary { dead_at_ms: None, ..summary };
        assert!(filter("", NOW_MS + 1, "").takes(&letter, &timeless));
    }

    #[test]
    fn error_worker_and_trace_are_conditions() {
        const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        let letter = written("a", Reason::EngineFailed, |headers| {
            headers.insert(TRACEPARENT.into(), text(&format!("00-{TRACE}-00f067aa0ba902b7-01")));
            // Longer than what a list keeps of it.
            headers.insert(ERROR.into(), text(&format!("{} CUDA error 700", "x".repeat(300))));
        });
        let error = |text: &str| Filter { error: Some(text.to_owned()), ..Filter::default() };
        let worker = |names: &[&str]| Filter {
            worker: names.iter().map(|name| (*name).to_owned()).collect(),
            ..Filter::default()
        };
        let trace = |id: &str| Filter { trace: Some(id.to_owned()), ..Filter::default() };
        for (filter, takes) in [
            (error("cuda error"), true),
            (error("CUDA ERROR 700"), true),
            (error("out of memory"), false),
            (worker(&["w1"]), true),
            (worker(&["w0", "w1"]), true),
            (worker(&["w"]), false),
            (trace(TRACE), true),
            (trace("4bf92f3577b34da6a3ce929d0e0e4737"), false),
            (Filter { worker: vec!["w2".to_owned()], ..error("cuda") }, false),
        ] {
            assert_eq!(filter.takes(&letter, &letter.summary()), takes, "{filter:?}");
            assert!(!filter.is_empty());
        }
        // Neither a worker nor a trace is known of what the broker dead-lettered.
        let by_broker = dead_lettered_by_broker("expired");
        for filter in [worker(&["w1"]), trace(TRACE)] {
            assert!(!filter.takes(&by_broker, &by_broker.summary()), "{filter:?}");
        }
    }

    #[test]
    fn a_name_matches_an_id_or_a_fingerprint() {
        let letter = written("job-1", Reason::Malformed, |_| {}).summary();
        let digits = letter.fingerprint.digits();
        let matches = |text: &str| Name { text: text.to_owned() }.matches(&letter);
        assert_eq!(matches("job-1"), NameMatch::ById);
        assert_eq!(matches("id:job-1"), NameMatch::ById);
        assert_eq!(matches("fp:job-1"), NameMatch::None);
        assert_eq!(matches("job"), NameMatch::None);
        for named in [&digits[..6], &digits[..10], &digits, &format!("fp:{}", &digits[..8])] {
            assert_eq!(matches(named), NameMatch::ByFingerprint, "{named}");
        }
        let is_too_short = |text: &str| Name { text: text.to_owned() }.is_too_short();
        for short in [&digits[..5], "fp:", &format!("fp:{}", &digits[..2])] {
            assert!(is_too_short(short), "{short}");
        }
        for other in ["job-1", "id:12345", &digits[..6]] {
            assert!(!is_too_short(other), "{other}");
        }
        for not in [&digits[..5], &format!("id:{digits}"), ""] {
            assert_eq!(matches(not), NameMatch::None, "{not}");
        }
    }
}
