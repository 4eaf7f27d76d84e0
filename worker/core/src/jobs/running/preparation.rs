//! How far the items of a running job are prepared.

#[derive(Debug)]
pub(super) struct Preparation {
    items_total: u32,
    /// Index of the first item that is not prepared; `items_total` if all are.
    next: u32,
    /// The next items are being prepared.
    is_running: bool,
}

impl Preparation {
    /// Of a job whose first `items_done` were answered by earlier attempts, and whose next `prepared` came with it.
    pub(super) fn new(items_total: u32, items_done: u32, prepared: usize) -> Self {
        Self { items_total, next: items_done.saturating_add(count(prepared)), is_running: false }
    }

    pub(super) fn has_more(&self) -> bool {
        self.next < self.items_total
    }

    pub(super) fn may_start(&self) -> bool {
        self.has_more() && !self.is_running
    }

    pub(super) fn start(&mut self) {
        self.is_running = true;
    }

    /// Records that `items` more are prepared. Returns the index of the first of them.
    pub(super) fn end(&mut self, items: usize) -> u32 {
        let first = self.next;
        self.next = first.saturating_add(count(items)).min(self.items_total);
        self.is_running = false;
        first
    }
}

/// Converts a number of items; it always fits.
fn count(items: usize) -> u32 {
    u32::try_from(items).unwrap_or(u32::MAX)
}
