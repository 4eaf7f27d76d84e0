//! Text for terminals: foreign text with control characters escaped, tables, ages, sizes. Pure.

use std::fmt::Write as _;
use std::time::Duration;

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};
use vramq_dlq::text::is_active;
pub(crate) use vramq_dlq::text::{bytes, counted, moment, safe, safe_lines};

/// JSON with active characters escaped; JSON itself requires that of a few only.
pub(crate) fn safe_json(json: &str) -> String {
    let mut shown = String::with_capacity(json.len());
    for c in json.chars() {
        if is_active(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a string does not fail.
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(c);
        }
    }
    shown
}

/// Foreign text, escaped, with at most so many columns.
pub(crate) fn cut(text: &str, columns: usize) -> String {
    let shown = safe(text);
    if shown.width() <= columns {
        return shown;
    }
    let mut width = 0;
    let kept = shown.chars().take_while(|c| {
        width += c.width().unwrap_or(0);
        width < columns
    });
    kept.collect::<String>() + "…"
}

/// The age of a moment in Unix milliseconds; `?` if it is unknown.
pub(crate) fn ago(at_ms: Option<u64>, now_ms: u64) -> String {
    at_ms.map_or_else(|| "?".to_owned(), |at_ms| age(Duration::from_millis(now_ms.saturating_sub(at_ms))))
}

/// An age in one unit.
pub(crate) fn age(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// The alignment of a column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A table; each column is as wide as its widest text. The texts must be escaped.
pub(crate) fn table(head: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let widths: Vec<_> = head
        .iter()
        .enumerate()
        .map(|(at, (name, _))| {
            let of_rows = rows.iter().filter_map(|row| row.get(at)).map(|text| text.width());
            of_rows.chain([name.width()]).max().unwrap_or(0)
        })
        .collect();
    let mut out = String::new();
    let names: Vec<_> = head.iter().map(|(name, _)| (*name).to_owned()).collect();
    for row in std::iter::once(&names).chain(rows) {
        let mut line = String::new();
        for (at, text) in row.iter().enumerate() {
            let pad = " ".repeat(widths[at].saturating_sub(text.width()));
            match head[at].1 {
                Align::Left => line += &format!("{text}{pad}  "),
                Align::Right => line += &format!("{pad}{text}  "),
            }
        }
        out += line.trim_end();
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(safe("a\u{1b}[31mb\nc\u{9b}d"), "a\\u{1b}[31mb\\nc\\u{9b}d");
        assert_eq!(safe("\u{202e}gnp.exe\u{200b}"), "\\u{202e}gnp.exe\\u{200b}");
        assert_eq!(safe("Grüße 日本 \"x\""), "Grüße 日本 \"x\"");
        assert_eq!(safe_lines("a\u{1b}\r\n b\rc\n", "  "), "a\\u{1b}\n   b\\rc");
        assert_eq!(safe_json("\"\u{9b}\u{202e}\u{e0001}\""), "\"\\u009b\\u202e\\udb40\\udc01\"");
    }

    proptest! {
        #[test]
        fn whatever_the_text(text in any::<String>(), columns in 1usize..40) {
            prop_assert!(!safe(&text).chars().any(is_active));
            prop_assert!(cut(&text, columns).width() <= columns + 1);
            let json = safe_json(&serde_json::to_string(&text).unwrap());
            prop_assert!(!json.chars().any(is_active));
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
    }

    #[test]
    fn ages_sizes_and_moments() {
        let now = 1_700_000_000_000;
        for (seconds, expected) in [(0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (172_800, "2d")] {
            assert_eq!(ago(Some(now - seconds * 1000), now), expected);
        }
        assert_eq!((ago(None, now), ago(Some(now + 5), now)), ("?".to_owned(), "0s".to_owned()));
        assert_eq!(moment(now), "2023-11-14T22:13:20Z");
        assert_eq!(moment(u64::MAX), "18446744073709551615 ms after 1970");
        assert_eq!(
            [bytes(0), bytes(1536), bytes(3 << 20), bytes(5 << 30)],
            ["0 B", "1.5 KiB", "3.0 MiB", "5.0 GiB"]
        );
        assert_eq!([counted(1, "letter"), counted(0, "letter")], ["1 letter", "0 letters"]);
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["日本".to_owned(), "1".to_owned()], vec!["a".to_owned(), "100".to_owned()]];
        let shown = table(&[("NAME", Align::Left), ("N", Align::Right)], &rows);
        assert_eq!(shown, "NAME    N\n日本    1\na     100\n");
    }
}
