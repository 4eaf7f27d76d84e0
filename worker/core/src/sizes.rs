//! How much the core keeps, and what bounds it. Each state knows its own bound; the simulation checks all of them every second.

/// A collection of the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub what: &'static str,
    pub entries: usize,
    pub most: usize,
}

impl Size {
    pub(crate) fn of(what: &'static str, entries: usize, most: usize) -> Self {
        Self { what, entries, most }
    }
}
