//! Text for people: foreign text with control characters escaped, sizes, times, counts. Pure, except [`unix_ms`].

use std::time::SystemTime;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Whether a character changes the terminal's state or how nearby text reads: control characters, changes of text direction, characters
/// without width.
pub fn is_active(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Foreign text on one line, with active characters escaped as `\n` or `\u{1b}`.
pub fn safe(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_active(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    shown
}

/// Foreign text on as many lines as it has, each escaped as by [`safe`], and indented after the first.
pub fn safe_lines(text: &str, indentation: &str) -> String {
    text.lines().map(safe).collect::<Vec<_>>().join(&format!("\n{indentation}"))
}

/// Now, in Unix milliseconds.
pub fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

/// A time in UTC.
pub fn moment(at_ms: u64) -> String {
    let at = i64::try_from(at_ms / 1000).ok().and_then(|at| OffsetDateTime::from_unix_timestamp(at).ok());
    at.and_then(|at| at.format(&Rfc3339).ok()).unwrap_or_else(|| format!("{at_ms} ms after 1970"))
}

/// A size in a suitable unit.
pub fn bytes(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    let n = bytes as f64;
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", n / KIB),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", n / (KIB * KIB)),
        _ => format!("{:.1} GiB", n / (KIB * KIB * KIB)),
    }
}

/// A size that is needed or held, rounded up to a tenth of a suitable unit: so much is enough.
pub fn bytes_needed(bytes: u64) -> String {
    in_tenths(bytes, u128::div_ceil)
}

/// A size that is free, or the whole that it is a part of, rounded down: what does not fit never reads as if it did.
pub fn bytes_free(bytes: u64) -> String {
    in_tenths(bytes, |tenths, unit| tenths / unit)
}

fn in_tenths(bytes: u64, divided: impl Fn(u128, u128) -> u128) -> String {
    let (unit, name) = match bytes {
        0..1024 => return format!("{bytes} B"),
        1024..1_048_576 => (1 << 10, "KiB"),
        1_048_576..1_073_741_824 => (1 << 20, "MiB"),
        _ => (1 << 30, "GiB"),
    };
    let tenths = divided(u128::from(bytes) * 10, unit);
    format!("{}.{} {name}", tenths / 10, tenths % 10)
}

/// `1 letter`, `2 letters`.
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
