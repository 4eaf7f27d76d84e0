//! Tracks which items of a job are finished, and which of them the caller has received.

use std::collections::VecDeque;

use crate::event::OutputSize;
use crate::ids::ItemIndex;

/// The items of a job from the first one that is in no reply yet. Sizes are the approximate bytes in a reply.
#[derive(Debug)]
pub(crate) struct Progress {
    items_total: u32,
    /// Index of the first item that is in no reply yet.
    next: u32,
    /// The output sizes from item `next` on; `None` while the output is missing.
    outputs: VecDeque<Option<OutputSize>>,
    /// How many outputs from the start are present and fit the replies, and their bytes.
    ready: usize,
    ready_bytes: usize,
    missing: usize,
    /// The reply bytes of the consecutive finished items since the job was delivered here, and the limit for them.
    reply_bytes: u64,
    reply_max: u64,
}

/// Consecutive finished items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FinishedItems {
    /// Index of the first.
    pub(crate) offset: u32,
    /// May be 0.
    pub(crate) items: u32,
    pub(crate) bytes: usize,
}

/// The first output that has no room in a job's replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReplyExcess {
    pub(crate) item: ItemIndex,
    /// What the replies would take with it.
    pub(crate) bytes: u64,
}

impl Progress {
    /// A job that must run its items from `next` on, with at most `reply_max` bytes of replies.
    pub(crate) fn new(items_total: u32, next: u32, reply_max: u64) -> Self {
        let items = items_total.saturating_sub(next) as usize;
        Self {
            items_total,
            next,
            outputs: vec![None; items].into(),
            ready: 0,
            ready_bytes: 0,
            missing: items,
            reply_bytes: 0,
            reply_max,
        }
    }

    pub(crate) fn items_total(&self) -> u32 {
        self.items_total
    }

    /// The first item that the caller does not have once all replies made so far are confirmed.
    pub(crate) fn items_done(&self) -> u32 {
        self.next
    }

    /// The items from there on.
    pub(crate) fn items_left(&self) -> usize {
        self.outputs.len()
    }

    /// Records the output of an item. `index`: within the whole job.
    pub(crate) fn set_output(&mut self, index: ItemIndex, size: OutputSize) {
        let at = index.0.checked_sub(self.next).map(|at| at as usize);
        if let Some(slot) = at.and_then(|at| self.outputs.get_mut(at))
            && slot.replace(size).is_none()
        {
            self.missing -= 1;
        }
        while let Some(Some(size)) = self.outputs.get(self.ready) {
            let reply_bytes = self.reply_bytes.saturating_add(size.in_reply);
            if reply_bytes > self.reply_max {
                break;
            }
            self.reply_bytes = reply_bytes;
            self.ready_bytes += size.bytes;
            self.ready += 1;
        }
    }

    /// The first output for which the replies have no room, once all items before it are finished.
    pub(crate) fn reply_excess(&self) -> Option<ReplyExcess> {
        let size = (*self.outputs.get(self.ready)?)?;
        // Cannot overflow: item indices are `u32`.
        let item = ItemIndex(self.next + u32::try_from(self.ready).unwrap_or(u32::MAX));
        Some(ReplyExcess { item, bytes: self.reply_bytes.saturating_add(size.in_reply) })
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

    /// Finished outputs after the first that is missing or has no room. They are lost if the job ends here.
    pub(crate) fn out_of_order(&self) -> usize {
        self.outputs.iter().skip(self.ready).flatten().count()
    }

    /// Removes the finished items from the start, for a reply.
    pub(crate) fn take_ready(&mut self) -> FinishedItems {
        let (offset, bytes) = (self.next, self.ready_bytes);
        self.outputs.drain(..self.ready);
        // Cannot overflow: item counts are `u32`.
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

    fn set_output(progress: &mut Progress, index: u32, bytes: usize) {
        progress.set_output(ItemIndex(index), OutputSize::inline(bytes));
    }

    #[test]
    fn outputs_leave_in_order_whatever_order_they_come_in() {
        let mut progress = Progress::new(5, 1, u64::MAX);
        set_output(&mut progress, 3, 10);
        assert_eq!((progress.ready(), progress.ready_bytes(), progress.out_of_order()), (0, 0, 1));
        set_output(&mut progress, 1, 7);
        set_output(&mut progress, 1, 100);
        assert_eq!((progress.ready(), progress.ready_bytes(), progress.is_complete()), (1, 7, false));
        assert_eq!(progress.take_ready(), FinishedItems { offset: 1, items: 1, bytes: 7 });
        assert_eq!(progress.items_done(), 2);
        set_output(&mut progress, 0, 1);
        set_output(&mut progress, 2, 2);
        set_output(&mut progress, 4, 4);
        set_output(&mut progress, 9, 9);
        assert!(progress.is_complete() && !progress.is_empty());
        assert_eq!(progress.take_ready(), FinishedItems { offset: 2, items: 3, bytes: 16 });
        assert!(progress.is_empty());
        assert_eq!((progress.items_done(), progress.items_total()), (5, 5));
    }

    #[test]
    fn outputs_are_finished_in_order_up_to_what_replies_may_take() {
        let mut progress = Progress::new(5, 0, 10);
        set_output(&mut progress, 2, 8);
        set_output(&mut progress, 1, 4);
        assert_eq!(progress.reply_excess(), None);
        set_output(&mut progress, 0, 4);
        assert_eq!((progress.ready(), progress.out_of_order()), (2, 1));
        assert_eq!(progress.reply_excess(), Some(ReplyExcess { item: ItemIndex(2), bytes: 16 }));
        // Bytes that were already taken still count towards the limit.
        assert_eq!(progress.take_ready().items, 2);
        assert_eq!(progress.reply_excess(), Some(ReplyExcess { item: ItemIndex(2), bytes: 16 }));
    }

    #[test]
    fn an_output_in_a_store_takes_what_its_reference_takes() {
        let mut progress = Progress::new(2, 0, 10);
        (0..2).for_each(|index| {
            progress.set_output(ItemIndex(index), OutputSize { bytes: 1_000, in_reply: 5 });
        });
        assert_eq!((progress.ready(), progress.ready_bytes(), progress.reply_excess()), (2, 2_000, None));
    }
}
