//! The trace of a history: what happened, when and to whom.

use std::collections::VecDeque;
use std::fmt;

use super::agenda::{Micros, SECOND};

/// The most lines that are kept for a report: about the last minutes before a violation.
const LINES_MAX: usize = 400;

/// A rule that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub at: Micros,
    /// The invariant's name.
    pub rule: &'static str,
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", Clock(self.at), self.rule, self.text)
    }
}

/// A time of the simulation for a person: hours, minutes, seconds and milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Clock(pub Micros);

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, millis) = (self.0 / SECOND, self.0 % SECOND / 1_000);
        write!(f, "{}:{:02}:{:02}.{millis:03}", seconds / 3600, seconds / 60 % 60, seconds % 60)
    }
}

/// How much of a history is written down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// Nothing: for histories by the thousand.
    #[default]
    None,
    /// The last lines.
    Last,
    /// Every line, printed at once.
    Print,
}

/// The written history.
#[derive(Debug, Default)]
pub struct Trace {
    detail: Detail,
    lines: VecDeque<String>,
}

impl Trace {
    pub fn new(detail: Detail) -> Self {
        Self { detail, lines: VecDeque::new() }
    }

    pub fn is_on(&self) -> bool {
        self.detail != Detail::None
    }

    /// Writes a line. `text` is called only if the line is kept or printed.
    pub fn line(&mut self, at: Micros, who: impl fmt::Display, text: impl FnOnce() -> String) {
        if self.detail == Detail::None {
            return;
        }
        let line = format!("{} {who:<9} {}", Clock(at), text());
        if self.detail == Detail::Print {
            println!("{line}");
            return;
        }
        if self.lines.len() == LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().map(String::as_str)
    }
}
