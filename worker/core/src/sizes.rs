//! How many entries the collections of the core hold, and the bound of each. Each state knows its own bounds; the simulation checks all of
//! them every second.

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
