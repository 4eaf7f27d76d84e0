//! Lines with a severity, tables of them, and what their cells show.

use crate::output::text::{Align, table};

/// The width of names, which other programs choose.
pub(super) const NAME_COLUMNS: usize = 32;

/// The severity of a line; the view has a colour for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    Normal,
    Header,
    Ok,
    Warning,
    Error,
    Dim,
}

/// A line, with foreign text escaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) text: String,
    pub(super) severity: Severity,
}

impl Line {
    pub(super) fn new(text: impl Into<String>, severity: Severity) -> Self {
        Self { text: text.into(), severity }
    }
}

pub(super) fn with_severities(
    head: &[(&str, Align)],
    rows: Vec<Vec<String>>,
    severities: impl Iterator<Item = Severity>,
) -> Vec<Line> {
    let severities = std::iter::once(Severity::Header).chain(severities);
    table(head, &rows).lines().zip(severities).map(|(text, severity)| Line::new(text, severity)).collect()
}

pub(super) fn rate(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"))
}
