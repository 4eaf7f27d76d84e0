//! Checks the options of a broker's URL. The parser ignores those that it does not know. Pure.

use crate::header_frame::FRAME_MAX_DEFAULT;

/// The URL's options that are numbers, each with its largest value. There is one more, [`AUTH_MECHANISM`].
const NUMBERS: [(&str, u64); 4] = [
    ("heartbeat", u16::MAX as u64),
    ("connection_timeout", u64::MAX),
    ("channel_max", u16::MAX as u64),
    (FRAME_MAX, u32::MAX as u64),
];

/// The URL's option for the largest frame; 0 leaves it to the broker.
const FRAME_MAX: &str = "frame_max";

/// The URL's option that is a word.
const AUTH_MECHANISM: &str = "auth_mechanism";

/// Refuses options that would have no effect, and frames that are too small for headers of jobs. `tail` is what follows the hosts.
pub(super) fn check_options(tail: &str) -> Result<(), String> {
    let query = tail.split_once('?').map_or("", |(_, query)| query);
    let query = query.split_once('#').map_or(query, |(query, _)| query);
    for option in query.split('&').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        if let Some((_, max)) = NUMBERS.iter().find(|(known, _)| *known == name) {
            let Some(number) = value.parse::<u64>().ok().filter(|number| number <= max) else {
                return Err(format!("its {name} is not a number from 0 to {max}"));
            };
            // The broker sends what other clients may publish to it, and a client that takes less would lose each connection over it.
            if name == FRAME_MAX && (1..FRAME_MAX_DEFAULT as u64).contains(&number) {
                return Err(format!(
                    "its {FRAME_MAX} is less than {FRAME_MAX_DEFAULT}, and headers of jobs need frames of that size: leave it out"
                ));
            }
        } else if name != AUTH_MECHANISM {
            let known = NUMBERS.map(|(name, _)| name).join(", ");
            // It may be a part of a password with a `?` that is not percent-encoded.
            let which = if tail.contains('@') {
                "an option is unknown, or a `?` in the password is not written as %3F".to_owned()
            } else {
                format!("the option {} is unknown", name.escape_default())
            };
            return Err(format!("{which}: there are {known}, {AUTH_MECHANISM}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_would_have_no_effect_are_refused() {
        let refused = |query: &str| check_options(&format!("/%2f?{query}"));
        let all =
            "heartbeat=1&connection_timeout=5000&channel_max=2047&frame_max=131072&auth_mechanism=plain";
        for query in ["", "heartbeat=0", "frame_max=0", all] {
            assert_eq!(refused(query), Ok(()), "{query}");
        }
        let unknown = "the option hartbeat is unknown: there are heartbeat, connection_timeout, channel_max, frame_max, auth_mechanism";
        assert_eq!(refused("heartbeat=1&hartbeat=1").unwrap_err(), unknown);
        assert_eq!(refused("cacertfile=/ca.pem").unwrap_err(), unknown.replace("hartbeat", "cacertfile"));
        for (query, what) in [
            ("heartbeat=abc", "its heartbeat is not a number from 0 to 65535"),
            ("heartbeat", "its heartbeat is not a number from 0 to 65535"),
            ("channel_max=65536", "its channel_max is not a number from 0 to 65535"),
            ("frame_max=-1", "its frame_max is not a number from 0 to 4294967295"),
            (
                "frame_max=131071",
                "its frame_max is less than 131072, and headers of jobs need frames of that size: leave it out",
            ),
        ] {
            assert_eq!(refused(query).unwrap_err(), what, "{query}");
        }
    }
}
