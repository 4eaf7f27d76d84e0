//! The flags that select dead letters.

use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use vramq_dlq::dead_letter::UNKNOWN;
use vramq_dlq::select::{Filter, Since};
use vramq_dlq::text::unix_ms;
use vramq_schemas::{Reason, Traceparent};

use crate::duration;

/// Conditions that a dead letter must meet.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct FilterArgs {
    /// Only dead letters with this reason; may be repeated.
    #[arg(long, value_parser = reason, value_name = "REASON")]
    reason: Vec<String>,
    /// Only those dead-lettered since: 2h, 30m, or a time such as 2026-11-21T18:00:00Z.
    #[arg(long, value_parser = since, value_name = "TIME")]
    since: Option<Since>,
    /// Only one group, as printed by `list`: REASON/MODEL/VERSION.
    #[arg(long, value_name = "GROUP", value_parser = group)]
    group: Option<String>,
    /// Only those whose error has TEXT in it, in upper or lower case.
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    error: Option<String>,
    /// Only those that this worker dead-lettered; may be repeated.
    #[arg(long, value_name = "WORKER")]
    worker: Vec<String>,
    /// Only those of one trace: its id of 32 hexadecimal digits, or a `traceparent`.
    #[arg(long, value_parser = trace, value_name = "TRACE")]
    trace: Option<String>,
}

impl FilterArgs {
    pub(super) fn filter(&self) -> Filter {
        let Self { reason, since, group, error, worker, trace } = self.clone();
        Filter { reason, since, group, error, worker, trace }
    }
}

/// Reasons that are not a [`Reason`]: the broker's, and that of messages without a record of dead-lettering. `expired` is used by the
/// broker and by workers.
const OTHER_REASONS: [&str; 4] = ["delivery-limit", "maxlen", "rejected", UNKNOWN];

/// Rejects unknown reasons: they would select nothing, which looks as if there were no dead letters.
fn reason(text: &str) -> Result<String, String> {
    let known = || Reason::ALL.map(Reason::as_str).into_iter().chain(OTHER_REASONS);
    if known().any(|name| name == text) {
        return Ok(text.to_owned());
    }
    let names: Vec<_> = known().collect();
    Err(format!("there are {}; for a reason of a later version use --group", names.join(", ")))
}

/// Rejects texts that `list` cannot print as a group: they would select nothing, which looks as if there were no dead letters.
fn group(text: &str) -> Result<String, String> {
    // The name of a model may have slashes.
    let of_three =
        text.split_once('/').is_some_and(|(reason, rest)| !reason.is_empty() && rest.contains('/'));
    of_three
        .then(|| text.to_owned())
        .ok_or_else(|| "a group is REASON/MODEL/VERSION, as `vramq dlq list` prints it".to_owned())
}

/// The id of a trace, as tracing systems show it, or as the `traceparent` of a log line has it.
fn trace(text: &str) -> Result<String, String> {
    let text = text.to_ascii_lowercase();
    let parent = text.parse().or_else(|_| format!("00-{text}-0000000000000001-00").parse::<Traceparent>());
    let parent = parent.map_err(|_| "a trace id has 32 hexadecimal digits, not all of them 0".to_owned())?;
    Ok(parent.trace_id().to_owned())
}

fn since(text: &str) -> Result<Since, String> {
    since_at(text, unix_ms())
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

#[cfg(test)]
mod tests {
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
    fn a_trace_is_named_by_its_id_or_a_traceparent() {
        const ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        for text in [ID, &ID.to_ascii_uppercase(), &format!("00-{ID}-00f067aa0ba902b7-01")] {
            assert_eq!(trace(text).as_deref(), Ok(ID), "{text}");
        }
        for text in ["", "4bf92f35", &"0".repeat(32), &format!("{ID}0"), &"g".repeat(32)] {
            assert!(trace(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_group_has_three_parts() {
        for right in
            ["expired/minilm/0.3.0", "out-of-memory/org/model/0.3.0", "of-a-later-version/minilm/broker"]
        {
            assert_eq!(group(right).as_deref(), Ok(right));
        }
        for wrong in ["", "expired", "expired/minilm", "/minilm/0.3.0"] {
            assert!(group(wrong).unwrap_err().contains("REASON/MODEL/VERSION"), "{wrong}");
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
}
