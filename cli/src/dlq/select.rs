//! Filters and names that select dead letters. Pure.

use std::time::Duration;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use vramq_schemas::Reason;

use super::dead_letter::{FINGERPRINT_DIGITS, Summary, UNKNOWN};
use crate::duration;

/// The fewest digits of a fingerprint that match.
const DIGITS_MIN: usize = 6;

/// Conditions that a dead letter must meet.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Filter {
    /// Only dead letters with this reason; may be repeated.
    #[arg(long, value_parser = reason, value_name = "REASON")]
    pub(super) reason: Vec<String>,
    /// Only those dead-lettered since: 2h, 30m, or a time such as 2026-11-21T18:00:00Z.
    #[arg(long, value_parser = since, value_name = "TIME")]
    pub(super) since: Option<Since>,
    /// Only one group, as printed by `list`: REASON/MODEL/VERSION.
    #[arg(long, value_name = "GROUP")]
    pub(super) group: Option<String>,
}

/// A moment in Unix milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Since(pub(super) u64);

/// Reasons that are no [`Reason`]: those of the broker, and that of messages without a record of dead-lettering. `expired` is
/// both the broker's and a worker's.
const OTHER_REASONS: [&str; 4] = ["delivery-limit", "maxlen", "rejected", UNKNOWN];

/// A reason that does not exist would select nothing, which looks as if all were well.
fn reason(text: &str) -> Result<String, String> {
    let known = || Reason::ALL.map(Reason::as_str).into_iter().chain(OTHER_REASONS);
    if known().any(|name| name == text) {
        return Ok(text.to_owned());
    }
    let names: Vec<_> = known().collect();
    Err(format!("there are {}; for a reason of a later version use --group", names.join(", ")))
}

fn since(text: &str) -> Result<Since, String> {
    since_at(text, unix_ms())
}

pub(super) fn unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

fn since_at(text: &str, now_ms: u64) -> Result<Since, String> {
    if let Ok(at) = OffsetDateTime::parse(text, &Rfc3339) {
        return u64::try_from(at.unix_timestamp_nanos() / 1_000_000)
            .map(Since)
            .map_err(|_| "before 1970".to_owned());
    }
    let days = text.strip_suffix('d').and_then(|days| days.parse::<u64>().ok());
    let ago = match days {
        Some(days) => Ok(Duration::from_secs(days.saturating_mul(24 * 3600))),
        None => duration::parse(text),
    };
    ago.map(|ago| Since(now_ms.saturating_sub(u64::try_from(ago.as_millis()).unwrap_or(u64::MAX))))
        .map_err(|_| "use for example 30m, 2h, 7d or 2026-11-21T18:00:00Z".to_owned())
}

impl Filter {
    pub(super) fn is_empty(&self) -> bool {
        self.reason.is_empty() && self.since.is_none() && self.group.is_none()
    }

    /// A dead letter without a time passes `since`: it is not known to be older.
    pub(super) fn takes(&self, letter: &Summary) -> bool {
        (self.reason.is_empty() || self.reason.contains(&letter.group.reason))
            && self.since.is_none_or(|Since(at)| letter.dead_at_ms.is_none_or(|dead_at| dead_at >= at))
            && self.group.as_ref().is_none_or(|group| *group == letter.group.to_string())
    }
}

/// A message id, or the start of a fingerprint; the prefixes `id:` and `fp:` restrict it to one of them.
#[derive(Clone, Debug)]
pub(super) struct Name {
    pub(super) text: String,
}

/// How a name matches a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NameMatch {
    ById,
    ByFingerprint,
    None,
}

impl Name {
    pub(super) fn matches(&self, letter: &Summary) -> NameMatch {
        let (id, digits) = match self.text.split_once(':') {
            Some(("id", id)) => (Some(id), None),
            Some(("fp", digits)) => (None, Some(digits)),
            _ => (Some(self.text.as_str()), Some(self.text.as_str())),
        };
        if id.is_some() && id == letter.id.as_deref() {
            return NameMatch::ById;
        }
        let starts = digits.is_some_and(|digits| {
            digits.len() >= DIGITS_MIN.min(FINGERPRINT_DIGITS)
                && letter.fingerprint.digits().starts_with(digits)
        });
        if starts { NameMatch::ByFingerprint } else { NameMatch::None }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dead_letter::tests::written;
    use super::*;

    const NOW_MS: u64 = 1_700_000_000_000;

    #[test]
    fn times_are_relative_or_absolute() {
        for (text, ms) in [
            ("2h", NOW_MS - 7_200_000),
            ("30m", NOW_MS - 1_800_000),
            ("7d", NOW_MS - 7 * 86_400_000),
            ("2023-11-14T22:13:20Z", NOW_MS),
            ("2023-11-15T00:13:20+02:00", NOW_MS),
        ] {
            assert_eq!(since_at(text, NOW_MS), Ok(Since(ms)), "{text}");
        }
        for text in ["", "yesterday", "2h ago", "d", "-1d", "1969-01-01T00:00:00Z"] {
            assert!(since_at(text, NOW_MS).is_err(), "{text}");
        }
    }

    #[test]
    fn a_reason_that_does_not_exist_is_an_error_that_lists_those_that_do() {
        for known in Reason::ALL.map(Reason::as_str).into_iter().chain([
            "delivery-limit",
            "maxlen",
            "rejected",
            "unknown",
        ]) {
            assert_eq!(reason(known).as_deref(), Ok(known));
        }
        for unknown in ["", "oom", "out_of_memory", "Expired"] {
            let error = reason(unknown).unwrap_err();
            assert!(
                error.contains("out-of-memory, ") && error.contains("delivery-limit"),
                "{unknown}: {error}"
            );
        }
    }

    #[test]
    fn every_condition_must_hold() {
        let letter = written("a", Reason::OutOfMemory, |_| {}).summary();
        let filter = |reason: &str, since, group: &str| Filter {
            reason: (!reason.is_empty()).then(|| reason.to_owned()).into_iter().collect(),
            since: Some(Since(since)),
            group: (!group.is_empty()).then(|| group.to_owned()),
        };
        assert!(Filter::default().takes(&letter) && Filter::default().is_empty());
        for (filter, takes) in [
            (filter("out-of-memory", NOW_MS, "out-of-memory/minilm/0.1.0"), true),
            (filter("", NOW_MS, ""), true),
            (filter("malformed", NOW_MS, ""), false),
            (filter("", NOW_MS + 1, ""), false),
            (filter("", 0, "out-of-memory/minilm/0.1.1"), false),
        ] {
            assert_eq!(filter.takes(&letter), takes, "{filter:?}");
            assert!(!filter.is_empty());
        }
        let timeless = Summary { dead_at_ms: None, ..letter };
        assert!(filter("", NOW_MS + 1, "").takes(&timeless));
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
        for not in [&digits[..5], &format!("id:{digits}"), ""] {
            assert_eq!(matches(not), NameMatch::None, "{not}");
        }
    }
}
