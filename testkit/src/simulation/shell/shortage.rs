//! Checks that passes stay within the memory that was free after one of them ran out of it, until the worker reads the memory again.

use vramq_core::action::PassOrder;
use vramq_core::device::Memory;
use vramq_core::event::PassBytes;

use super::Shell;
use super::start::RESERVE;
use crate::simulation::env::Env;

impl Shell {
    /// The device's memory, and the part that this worker's passes hold.
    pub(super) fn read_memory(&self, env: &Env) -> (Memory, PassBytes) {
        let device = &env.devices[self.device];
        let passes = PassBytes { own: device.active_bytes(self.life), programs: 0 };
        (device.memory(self.life), passes)
    }

    /// A pass of jobs ran out of memory. Several may, before the next second.
    pub(super) fn note_shortage(&mut self, env: &Env) {
        let (memory, passes) = self.read_memory(env);
        let left = (memory.free + passes.own).saturating_sub(RESERVE);
        self.short_of = Some(self.short_of.map_or(left, |before| before.min(left)));
    }

    /// The memory is read, as every second.
    pub(super) fn shortage_ends(&mut self) {
        self.short_of = None;
    }

    /// Checks that a pass fits what was left, beside the passes in flight. A single item that does not fit runs all the same: it had the
    /// whole device, or has waited long enough.
    pub(super) fn check_shortage(&self, env: &mut Env, order: &PassOrder) {
        let Some(left) = self.short_of.filter(|_| order.items.len() > 1) else { return };
        let bytes = (self.models[order.model.0].pass_bytes)(order.shape);
        let in_flight = self.bytes_in_flight();
        if in_flight + bytes > left {
            let who = self.life.worker;
            env.ledger.fail("after an out-of-memory passes stay within what is free", || {
                format!("worker-{who}: {bytes} bytes beside {in_flight}, and {left} were left")
            });
        }
    }
}
