//! Some of the programs on a device, and what they hold together: one reading of the device asks for several such groups.

use super::device_view::DeviceView;
use super::entries::{Entries, Program};
use crate::process_tree::ProcessTree;

/// Some of the programs, as the account has them when a reading of the device begins.
pub(super) struct ProgramGroup {
    pub(super) keepers: Vec<i32>,
    /// What they were last seen to hold, and the part of it that is an estimate.
    pub(super) noted: u64,
    estimated: u64,
}

impl ProgramGroup {
    pub(super) fn of(entries: &Entries, is_counted: impl Fn(&Program) -> bool) -> Self {
        let estimated = entries.noted(|program| program.is_estimated && is_counted(program));
        Self { keepers: entries.keepers(&is_counted), noted: entries.noted(&is_counted), estimated }
    }

    /// What they hold, as the device reports it; `None` if it does not. A program's memory is estimated where other processes hold it, so what
    /// its own processes hold does not contain it.
    pub(super) fn told(&self, view: &dyn DeviceView, tree: &ProcessTree) -> Option<u64> {
        let told = view.held_by(&tree.under(&self.keepers))?;
        Some(told.saturating_add(self.estimated))
    }
}
