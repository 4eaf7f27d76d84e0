//! Tracks which items of a job are finished, and which of them the caller has received.

use std::collections::VecDeque;

/// The items of a job from the first one that no reply was made of. All sizes are about the bytes in a reply.
#[derive(Debug)]
pub(crate) struct Progress {
    items_total: u32,
    /// Index of the first item that no reply was made of.
    next: u32,
    /// From item `next` on: the bytes of its output, if it has one.
    outputs: VecDeque<Option<usize>>,
    /// How many from the start of `outputs` are there, and their bytes.
    ready: usize,
    ready_bytes: usize,
    missing: usize,
    /// The bytes of all outputs that were taken here, those of replies too.
    bytes_taken: u64,
}

/// Finished items from the start, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FinishedItems {
    /// Index of the first.
    pub(crate) offset: u32,
    /// May be 0.
    pub(crate) items: u32,
    pub(crate) bytes: usize,
}

impl Progress {
    /// A job whose items from the index `next` on are still to run.
    pub(crate) fn new(items_total: u32, next: u32) -> Self {
        let items = items_total.saturating_sub(next) as usize;
        Self {
            items_total,
            next,
            outputs: vec![None; items].into(),
            ready: 0,
            ready_bytes: 0,
            missing: items,
            bytes_taken: 0,
        }
    }

    pub(crate) fn items_total(&self) -> u32 {
        self.items_total
    }

    /// The first item that is not answered once all replies that were made are confirmed.
    pub(crate) fn items_done(&self) -> u32 {
        self.next
    }

    /// Items from there on.
    pub(crate) fn items_left(&self) -> usize {
        self.outputs.len()
    }

    /// The output of an item is there; by the item's index within the whole job.
    pub(crate) fn set_output(&mut self, index: u32, bytes: usize) {
        let at = index.checked_sub(self.next).map(|at| at as usize);
        if let Some(slot) = at.and_then(|at| self.outputs.get_mut(at))
            && slot.replace(bytes).is_none()
        {
            self.missing -= 1;
            self.bytes_taken += bytes as u64;
        }
        while let Some(Some(bytes)) = self.outputs.get(self.ready) {
            self.ready_bytes += bytes;
            self.ready += 1;
        }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// How many items from the start are finished.
    pub(crate) fn ready(&self) -> usize {
        self.ready
    }

    /// The bytes of their outputs.
    pub(crate) fn ready_bytes(&self) -> usize {
        self.ready_bytes
    }

    /// The bytes of all outputs since the job was read here.
    pub(crate) fn bytes_taken(&self) -> u64 {
        self.bytes_taken
    }

    /// Outputs behind the first missing one: they are lost if the job goes elsewhere.
    pub(crate) fn out_of_order(&self) -> usize {
        self.outputs.iter().skip(self.ready).flatten().count()
    }

    /// Takes the finished items from the start away, to make a reply of them.
    pub(crate) fn take_ready(&mut self) -> FinishedItems {
        let (offset, bytes) = (self.next, self.ready_bytes);
        self.outputs.drain(..self.ready);
        // Bounded by the items of a job, which fit.
        let items = u32::try_from(self.ready).unwrap_or(u32::MAX);
        self.next += items;
        (self.ready, self.ready_bytes) = (0, 0);
        FinishedItems { offset, items, bytes }
    }

    /// Nothing is left that a reply could be made of.
    pub(crate) fn is_empty(&self) -> bool {
        self.outputs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_leave_in_order_whatever_order_they_come_in() {
        let mut progress = Progress::new(5, 1);
        progress.set_output(3, 10);
        assert_eq!((progress.ready(), progress.ready_bytes(), progress.out_of_order()), (0, 0, 1));
        progress.set_output(1, 7);
        progress.set_output(1, 100);
        assert_eq!((progress.ready(), progress.ready_bytes(), progress.is_complete()), (1, 7, false));
        assert_eq!(progress.take_ready(), FinishedItems { offset: 1, items: 1, bytes: 7 });
        assert_eq!(progress.items_done(), 2);
        progress.set_output(0, 1);
        progress.set_output(2, 2);
        progress.set_output(4, 4);
        progress.set_output(9, 9);
        assert!(progress.is_complete() && !progress.is_empty());
        assert_eq!(progress.take_ready(), FinishedItems { offset: 2, items: 3, bytes: 16 });
        assert!(progress.is_empty());
        assert_eq!(progress.bytes_taken(), 10 + 7 + 2 + 4);
        assert_eq!((progress.items_done(), progress.items_total()), (5, 5));
    }
}
