//! The waiting messages of a quorum queue in the order in which they leave: returned messages first, then two of high priority for each one
//! of normal priority.

use std::collections::VecDeque;

use super::super::Entry;

/// After so many messages in a row, one of normal priority goes first if it arrived earlier.
const HIGH_IN_A_ROW: u8 = 2;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Backlog {
    high: VecDeque<Entry>,
    normal: VecDeque<Entry>,
    /// Returned messages, which leave before all others.
    returned: VecDeque<Entry>,
    /// Messages taken from `high` and `normal` since it was the turn of normal priority.
    taken_in_a_row: u8,
    next_position: u64,
}

impl Backlog {
    pub fn len(&self) -> usize {
        self.high.len() + self.normal.len() + self.returned.len()
    }

    pub fn clear(&mut self) {
        self.high.clear();
        self.normal.clear();
        self.returned.clear();
        self.taken_in_a_row = 0;
    }

    /// The place of a message that comes now.
    pub fn next_position(&mut self) -> u64 {
        self.next_position += 1;
        self.next_position - 1
    }

    /// Takes in a message behind the others of its priority.
    pub fn push(&mut self, entry: Entry, is_high: bool) {
        if is_high {
            self.high.push_back(entry);
        } else {
            self.normal.push_back(entry);
        }
    }

    /// Takes a message back, to leave before those that never left.
    pub fn push_returned(&mut self, entry: Entry) {
        self.returned.push_back(entry);
    }

    /// The message that leaves next.
    pub fn head(&self) -> Option<&Entry> {
        self.returned
            .front()
            .or_else(|| if self.normal_first() { self.normal.front() } else { self.high.front() })
    }

    pub fn take(&mut self) -> Option<Entry> {
        if let Some(entry) = self.returned.pop_front() {
            return Some(entry);
        }
        let next = if self.normal_first() { self.normal.pop_front() } else { self.high.pop_front() }?;
        self.taken_in_a_row = if self.taken_in_a_row == HIGH_IN_A_ROW { 0 } else { self.taken_in_a_row + 1 };
        Some(next)
    }

    pub fn entries_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.high.iter_mut().chain(&mut self.normal).chain(&mut self.returned)
    }

    fn normal_first(&self) -> bool {
        match (self.high.front(), self.normal.front()) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(high), Some(normal)) => {
                self.taken_in_a_row == HIGH_IN_A_ROW && high.position > normal.position
            }
        }
    }
}
