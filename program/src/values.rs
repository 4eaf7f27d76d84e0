//! Words about TOML texts and their values. None repeats a value that may be a secret.

use toml::Value;

/// What is wrong with a TOML text, and where: line, column and, of a key that is set twice, the key. The error's own text would quote
/// the line, which may contain a password.
pub fn toml_fault(error: &toml::de::Error, text: &str) -> String {
    let mut what = error.message().trim_end().replace('\n', ", ");
    let Some(span) = error.span() else { return what };
    if what == "duplicate key"
        && let Some(key) = text.get(span.clone())
    {
        what = format!("`{key}` is set twice");
    }
    let column =
        text[..text.floor_char_boundary(span.start)].chars().rev().take_while(|c| *c != '\n').count();
    format!("{}, column {}: {what}", line_at(text, span.start), column + 1)
}

/// `line N`, of the byte `at` of a text.
pub fn line_at(text: &str, at: usize) -> String {
    format!("line {}", text[..text.floor_char_boundary(at)].matches('\n').count() + 1)
}

/// A value for an error message. Texts are not shown, because they may be secrets.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Integer(n) => n.to_string(),
        Value::Float(n) => n.to_string(),
        Value::Boolean(b) => b.to_string(),
        Value::String(text) if text.is_empty() => "empty".to_owned(),
        Value::String(_) => "a text".to_owned(),
        other => format!("a value of type {}", other.type_str()),
    }
}

/// The longest text that can be a number that somebody meant.
const NUMBER_CHARS_MAX: usize = 20;

/// The same where a number is expected. Variables and flags give numbers as texts: those are shown.
pub fn shown_number(value: &Value) -> String {
    match value {
        Value::String(text) if text.len() <= NUMBER_CHARS_MAX && text.parse::<f64>().is_ok() => text.clone(),
        Value::String(text) if !text.is_empty() => "a text and no number".to_owned(),
        other => shown(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_shown_only_if_they_are_numbers_where_one_is_expected() {
        let text = |text: &str| Value::String(text.to_owned());
        assert_eq!((shown(&text("7")), shown(&text(""))), ("a text".to_owned(), "empty".to_owned()));
        for (given, expected) in [("99999999999", "99999999999"), ("-1", "-1"), ("1.5", "1.5"), ("", "empty")]
        {
            assert_eq!(shown_number(&text(given)), expected);
        }
        assert_eq!(shown_number(&text("hunter2")), "a text and no number");
        assert_eq!(shown_number(&text(&"7".repeat(21))), "a text and no number");
    }

    #[test]
    fn a_fault_in_toml_names_its_place_and_no_value() {
        for (text, expected) in [
            ("[a]\nb = 1\nb = 'hunter2'", "line 3, column 1: `b` is set twice"),
            ("[a]\nb = 1\n[a]", "line 3, column 2: `a` is set twice"),
            ("[a]\nurl = amqp://hunter2", "line 2, column 7: "),
        ] {
            let error = text.parse::<toml::Table>().unwrap_err();
            let fault = toml_fault(&error, text);
            assert!(fault.starts_with(expected) && !fault.contains("hunter2"), "{fault}");
        }
    }
}
