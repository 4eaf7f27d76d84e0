//! The headers `traceparent` and `tracestate` of W3C Trace Context: where in a trace a job belongs.

use std::fmt;
use std::str::FromStr;

use amq_protocol_types::FieldTable;

use crate::fields::{as_text, text};
use crate::headers::{TRACEPARENT, TRACESTATE};

/// The bytes of the first version, which those of later ones start with.
const BYTES: usize = 55;

/// The longest `traceparent` that is accepted: later versions may be longer than the first.
const BYTES_MAX: usize = 256;

/// The longest `tracestate` that is carried, in bytes and in entries: what the standard asks of everybody.
const STATE_BYTES_MAX: usize = 512;
const STATE_ENTRIES_MAX: usize = 32;

/// Where in a trace a message belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub parent: Traceparent,
    /// What tracing systems of the callers add, unread.
    state: Option<Box<str>>,
}

impl TraceContext {
    /// The trace of a message; `None` if it has no valid `traceparent`. A `tracestate` that is invalid, or larger than everybody has to
    /// forward, is left out.
    pub fn of(headers: &FieldTable) -> Option<Self> {
        let value = |name| headers.inner().get(name).and_then(as_text);
        let parent = value(TRACEPARENT)?.parse().ok()?;
        let state = value(TRACESTATE).filter(|state| is_tracestate(state)).map(Into::into);
        Some(Self { parent, state })
    }

    /// `tracestate`, if there is one.
    pub fn state(&self) -> Option<&str> {
        self.state.as_deref()
    }

    /// Writes it as headers.
    pub fn write(&self, headers: &mut FieldTable) {
        headers.insert(TRACEPARENT.into(), text(self.parent.as_str()));
        if let Some(state) = &self.state {
            headers.insert(TRACESTATE.into(), text(state));
        }
    }
}

/// Whether a text is a valid `tracestate` (entries `key=value`, separated by commas), and no larger than everybody has to forward. Others
/// are left out, whoever sent them.
pub fn is_tracestate(state: &str) -> bool {
    let is_entry = |entry: &str| {
        entry.is_empty()
            || entry.split_once('=').is_some_and(|(key, value)| !key.is_empty() && !value.is_empty())
    };
    (1..=STATE_BYTES_MAX).contains(&state.len())
        && state.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\t'))
        && state.split(',').count() <= STATE_ENTRIES_MAX
        && state.split(',').all(|entry| is_entry(entry.trim()))
}

/// A valid `traceparent`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Traceparent(Box<str>);

/// An invalid `traceparent`. To be ignored: a trace is no reason to reject a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a traceparent of W3C Trace Context")]
pub struct InvalidTraceparent;

impl FromStr for Traceparent {
    type Err = InvalidTraceparent;

    fn from_str(text: &str) -> Result<Self, InvalidTraceparent> {
        let hex = |range| {
            let part: &str = text.get(range)?;
            part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')).then_some(part)
        };
        let dash = |at: usize| text.as_bytes().get(at) == Some(&b'-');
        let some = |part: &str| part.bytes().any(|b| b != b'0');
        let version = hex(0..2).filter(|version| *version != "ff");
        let length = match version {
            Some("00") => text.len() == BYTES,
            _ => text.len() == BYTES || (dash(BYTES) && text.len() <= BYTES_MAX),
        };
        let ids = hex(3..35).is_some_and(some) && hex(36..52).is_some_and(some) && hex(53..55).is_some();
        if version.is_some() && length && ids && dash(2) && dash(35) && dash(52) {
            Ok(Self(text.into()))
        } else {
            Err(InvalidTraceparent)
        }
    }
}

impl fmt::Display for Traceparent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Traceparent {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// 32 hexadecimal digits.
    pub fn trace_id(&self) -> &str {
        &self.0[3..35]
    }

    /// 16 hexadecimal digits.
    pub fn span_id(&self) -> &str {
        &self.0[36..52]
    }

    /// Whether the caller records the trace.
    pub fn is_sampled(&self) -> bool {
        // The last of the flags' bits.
        matches!(self.0.as_bytes()[54], b'1' | b'3' | b'5' | b'7' | b'9' | b'b' | b'd' | b'f')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_of_the_standard_is_read() {
        let parent: Traceparent = GOOD.parse().unwrap();
        assert_eq!(parent.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!((parent.span_id(), parent.is_sampled()), ("00f067aa0ba902b7", true));
        assert!(!GOOD.replace("-01", "-02").parse::<Traceparent>().unwrap().is_sampled());
        let later = format!("cc{}-what-comes", &GOOD[2..]);
        assert_eq!(later.parse::<Traceparent>().unwrap().to_string(), later);
    }

    fn context(parent: &str, state: &str) -> Option<TraceContext> {
        let mut headers = FieldTable::default();
        headers.insert(TRACEPARENT.into(), text(parent));
        headers.insert(TRACESTATE.into(), text(state));
        TraceContext::of(&headers)
    }

    #[test]
    fn a_state_is_carried_as_it_is() {
        let most = vec!["a=b"; 32].join(",");
        let longest = format!("a={}", "b".repeat(510));
        for state in ["vendor=t61rcWkgMzE", "a=b, tenant@system=1, ,c=d=e", &most, &longest] {
            let found = context(GOOD, state).unwrap();
            assert_eq!(found.state(), Some(state));
            let mut written = FieldTable::default();
            found.write(&mut written);
            assert_eq!(TraceContext::of(&written), Some(found));
        }
    }

    #[test]
    fn a_state_that_nobody_has_to_carry_is_left_out_and_without_a_parent_there_is_none() {
        let long = format!("a={}", "b".repeat(511));
        let many = vec!["a=b"; 33].join(",");
        for state in ["", "a", "=b", "a=", "a=\u{e9}", "a=b\n", &long, &many] {
            let found = context(GOOD, state).unwrap();
            assert_eq!((found.parent.as_str(), found.state()), (GOOD, None), "{state}");
        }
        assert_eq!(context("00-zz", "a=b"), None);
    }

    #[test]
    fn everything_else_is_refused() {
        let changed = |at: usize, by: &str| format!("{}{by}{}", &GOOD[..at], &GOOD[at + by.len()..]);
        let zeros = [changed(3, &"0".repeat(32)), changed(36, &"0".repeat(16))];
        let odd = [
            String::new(),
            GOOD[..54].to_owned(),
            format!("{GOOD}-more"),
            format!("cc{}-{}", &GOOD[2..], "x".repeat(300)),
            format!("cc{}x", &GOOD[2..]),
            changed(0, "ff"),
            changed(2, "_"),
            changed(5, "F"),
            changed(53, "zz"),
            "é".repeat(30),
        ];
        for text in zeros.iter().chain(&odd) {
            assert_eq!(text.parse::<Traceparent>(), Err(InvalidTraceparent), "{text}");
        }
    }
}
