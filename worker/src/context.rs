//! State that outlives a session, besides the core: models, device, executors, metrics and status.

use std::sync::Arc;

use vramq_core::action::SessionEnd;
use vramq_core::device::Memory;
use vramq_core::event::{PassBytes, Reading};
use vramq_core::ids::ExecutorIndex;
use vramq_program::Logs;
use vramq_schemas::status::WorkerState;

use crate::broker::aux_channel::AuxChannelState;
use crate::broker::consumer_timeouts::ConsumerTimeouts;
use crate::broker::silent_queues::SilentQueues;
use crate::device::Device;
use crate::executor::process::programs::Programs;
use crate::executor::{ActivePass, Executor};
use crate::identity::Identity;
use crate::limits_writer::LimitsWriter;
use crate::model::Model;
use crate::observability::metrics::Meters;
use crate::observability::spans::JobSpans;
use crate::observability::status_board::{Status, StatusBoard};
use crate::observability::status_reporter::StatusReporter;
use crate::publishers::PublisherRules;
use crate::stores::Stores;

/// How often the memory is read again if a pass began or ended meanwhile. Passes take much longer, so this rarely happens.
const READINGS_MAX: usize = 3;

/// State that outlives a session.
#[derive(Debug)]
pub struct WorkerContext {
    pub identity: Arc<Identity>,
    pub models: Vec<Arc<Model>>,
    pub publisher_rules: Arc<PublisherRules>,
    pub device: Arc<dyn Device>,
    pub executors: Vec<Box<dyn Executor>>,
    pub programs: Arc<Programs>,
    /// For each model, the executor that runs its passes.
    pub executor_of: Vec<ExecutorIndex>,
    /// Threads for decoding, tokenising and encoding.
    pub pool: rayon::ThreadPool,
    /// Stores for inputs by reference.
    pub stores: Arc<Stores>,
    pub meters: Arc<Meters>,
    pub board: Arc<StatusBoard>,
    pub reporter: Arc<StatusReporter>,
    pub logs: Logs,
    /// Where spans of jobs are sent, if at all.
    pub spans: Option<Arc<JobSpans>>,
    pub aux_state: Arc<AuxChannelState>,
    pub consumer_timeouts: ConsumerTimeouts,
    pub silent_queues: SilentQueues,
    pub limits_writer: LimitsWriter,
    /// The largest body that the broker accepts, as far as it has revealed that.
    pub body_max: usize,
}

impl WorkerContext {
    /// Reads the device for the core.
    pub fn read_device(&self) -> Reading {
        let (memory, passes) = self.read_memory();
        let active_passes = || self.executors.iter().map(|executor| executor.active_pass());
        Reading {
            memory,
            passes,
            lost: self.device.lost(),
            // With several, the pass that has been on the device for the longest time.
            on_device: active_passes().filter_map(ActivePass::now).min_by_key(|pass| pass.since),
            culprit: active_passes().find_map(ActivePass::culprit),
        }
    }

    /// The memory, and the part that passes hold. The two are read one after the other, and again if a pass began or ended in between.
    pub fn read_memory(&self) -> (Memory, PassBytes) {
        let (memory, own) = self.read_own_memory();
        // What a program that is loading will take is as good as taken by it.
        let promised = self.programs.promised().min(memory.free);
        let (free, foreign) = (memory.free - promised, memory.foreign.saturating_add(promised));
        let memory = Memory { free, foreign, ..memory };
        // The readings are from different moments. Programs cannot hold more than the device counts as others' memory.
        (memory, PassBytes { own, programs: self.programs.active_pass_bytes().min(memory.foreign) })
    }

    fn read_own_memory(&self) -> (Memory, u64) {
        let mut held = self.device.active_pass_bytes();
        for _ in 0..READINGS_MAX {
            let memory = self.device.memory();
            let now = self.device.active_pass_bytes();
            if now == held {
                return (memory, held);
            }
            held = now;
        }
        let memory = self.device.memory();
        (memory, held.min(memory.own()))
    }

    /// Counts the end of a session, and sets the metrics and status accordingly.
    pub fn session_ended(&self, end: &SessionEnd) {
        let worker = &self.meters.worker;
        worker.connected.set(0);
        worker.blocked.set(0);
        for meters in &self.meters.models {
            meters.unacked.set(0);
            meters.waiting.set(0);
            meters.consuming.set(0);
        }
        match end {
            SessionEnd::Lost(error) => {
                worker.sessions_lost.inc();
                self.board.set(Status::new(WorkerState::NoSession, format!("session lost: {error}")));
            }
            SessionEnd::Drained | SessionEnd::Killed => {
                self.board.set(Status::new(WorkerState::Gone, "ended"));
            }
        }
    }
}
