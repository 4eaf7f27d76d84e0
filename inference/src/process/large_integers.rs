//! Integers of JSON that 64 bits do not hold. Parsed they would become floats, and so other numbers, without an error.

/// The first of them in a text that is valid JSON.
pub fn first_beyond_64_bits(json: &str) -> Option<&str> {
    let mut rest = json;
    while let Some(start) = rest.find(|char: char| char == '"' || char == '-' || char.is_ascii_digit()) {
        rest = &rest[start..];
        if let Some(string) = rest.strip_prefix('"') {
            rest = after_string(string);
            continue;
        }
        let is_of_number = |char: char| matches!(char, '0'..='9' | '+' | '-' | '.' | 'e' | 'E');
        let (number, after) = rest.split_at(rest.find(|char| !is_of_number(char)).unwrap_or(rest.len()));
        let is_integer = !number.contains(['.', 'e', 'E']);
        if is_integer && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
            return Some(number);
        }
        rest = after;
    }
    None
}

/// What follows a string, whose opening quote is gone.
fn after_string(mut rest: &str) -> &str {
    while let Some(at) = rest.find(['"', '\\']) {
        let (is_end, skipped) = if rest[at..].starts_with('"') { (true, 1) } else { (false, 2) };
        rest = rest.get(at + skipped..).unwrap_or_default();
        if is_end {
            return rest;
        }
    }
    ""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_that_64_bits_hold_and_floats_are_none() {
        for json in [
            "18446744073709551615",
            "-9223372036854775808",
            "[0, -0, 1.5, 1e400, 12345678901234567890123.0]",
            r#"{"12345678901234567890123": "12345678901234567890123 \" 12345678901234567890123 \\"}"#,
            r#"["ñ\u00f1", "\\", true, null]"#,
        ] {
            assert_eq!(first_beyond_64_bits(json), None, "{json}");
        }
    }

    #[test]
    fn others_are_found_wherever_they_are() {
        for (json, number) in [
            ("18446744073709551616", "18446744073709551616"),
            ("[1,-9223372036854775809]", "-9223372036854775809"),
            (r#"{"a": "\\", "b": {"c": [12345678901234567890123]}}"#, "12345678901234567890123"),
            (r#"{"a\"": 99999999999999999999}"#, "99999999999999999999"),
        ] {
            assert_eq!(first_beyond_64_bits(json), Some(number), "{json}");
        }
    }
}
