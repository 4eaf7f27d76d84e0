//! Reads durations such as `30s` from arguments.

use std::time::Duration;

/// Reads `500ms`, `30s`, `5m`, `2h`; a bare number is seconds.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err("use for example 500ms, 30s, 5m or 2h".to_owned()),
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(unit_ms))
        .filter(|ms| *ms > 0)
        .map(Duration::from_millis)
        .ok_or_else(|| "use for example 500ms, 30s, 5m or 2h, and more than zero".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_number_and_a_unit() {
        for (text, ms) in
            [("500ms", 500), ("30", 30_000), ("30s", 30_000), ("5m", 300_000), ("2h", 7_200_000)]
        {
            assert_eq!(parse(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in [
            "",
            "s",
            "0",
            "0ms",
            "-1s",
            "1.5s",
            "5 m",
            "1d",
            "99999999999999999999s",
            "18446744073709551615h",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
