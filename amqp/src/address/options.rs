//! Checks the options of a broker's URL. The parser ignores those that it does not know. Pure.

/// The URL's options that are numbers, each with its largest value. There is one more, [`AUTH_MECHANISM`].
const NUMBERS: [(&str, u64); 4] = [
    ("heartbeat", u16::MAX as u64),
    ("connection_timeout", u64::MAX),
    ("channel_max", u16::MAX as u64),
    ("frame_max", u32::MAX as u64),
];

/// The URL's option that is a word.
const AUTH_MECHANISM: &str = "auth_mechanism";

/// Refuses options that would have no effect. `tail` is what follows the hosts.
pub(super) fn check_options(tail: &str) -> Result<(), String> {
    let query = tail.split_once('?').map_or("", |(_, query)| query);
    let query = query.split_once('#').map_or(query, |(query, _)| query);
    for option in query.split('&').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        if let Some((_, max)) = NUMBERS.iter().find(|(known, _)| *known == name) {
            if !value.parse::<u64>().is_ok_and(|number| number <= *max) {
                return Err(format!("its {name} is not a number from 0 to {max}"));
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
        for query in ["", "heartbeat=0", all] {
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
        ] {
            assert_eq!(refused(query).unwrap_err(), what, "{query}");
        }
    }
}
