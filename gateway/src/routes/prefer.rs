//! The header `Prefer` (RFC 7240): how long a request waits for its job.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName};

const PREFER: HeaderName = HeaderName::from_static("prefer");

/// The seconds of `wait=SECONDS`, at most as long as requests may wait.
pub fn wait_of(headers: &HeaderMap, most: Duration) -> Option<Duration> {
    let preferences = headers.get_all(PREFER).iter().filter_map(|value| value.to_str().ok());
    let mut preferences = preferences.flat_map(|value| value.split([',', ';']));
    let seconds = preferences.find_map(|preference| {
        let (name, value) = preference.split_once('=')?;
        if !name.trim().eq_ignore_ascii_case("wait") {
            return None;
        }
        let digits = value.trim().trim_matches('"');
        let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        // A number too large for `u64` is larger than any wait.
        is_number.then(|| digits.parse().unwrap_or(u64::MAX))
    })?;
    Some(Duration::from_secs(seconds).min(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preference_for_waiting_is_bounded() {
        let most = Duration::from_secs(60);
        let wait = |value: &str| wait_of(&[(PREFER, value.parse().unwrap())].into_iter().collect(), most);
        assert_eq!(wait("wait=5"), Some(Duration::from_secs(5)));
        assert_eq!(wait("respond-async, Wait = 7"), Some(Duration::from_secs(7)));
        for long in ["wait=3600", "wait=4294967296", "wait=99999999999999999999999"] {
            assert_eq!(wait(long), Some(most), "{long}");
        }
        assert_eq!(wait("wait=x, wait=0"), Some(Duration::ZERO));
        for none in ["wait=x", "wait=-5", "wait=+5", "wait=", "wait=1.5", "wait", "respond-async", ""] {
            assert_eq!(wait(none), None, "{none}");
        }
    }
}
