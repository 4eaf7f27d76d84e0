//! Decides from which queue the next job of a pass comes. The queues of a model share its passes by weight. Jobs come in, and the cost of
//! the items that passes took from them; the next job goes out. Within a queue, `flow.rs` decides.
//!
//! Each queue has a flow. A flow's virtual time advances by the cost that the flow takes, divided by its weight. The flow with the least
//! virtual time goes next: start-time fair queuing (Goyal, Vin, Cheng, 1996). A flow without waiting items cannot claim later what others
//! took meanwhile, and its own past cost still counts. So even a queue of which the worker holds one job at a time gets exactly its share.

use std::num::NonZeroU32;

use super::Caller;
use super::flow::{Flow, Placement};
use crate::ids::{JobKey, QueueIndex};

/// The flows of a model, one for each queue that its jobs come from.
#[derive(Debug)]
pub(super) struct FairQueue {
    flows: Vec<Flow>,
    /// The virtual time of the last flow at its last turn.
    now: f64,
}

impl FairQueue {
    /// A flow of each weight.
    pub(super) fn new(weights: impl IntoIterator<Item = NonZeroU32>) -> Self {
        Self { flows: weights.into_iter().map(Flow::new).collect(), now: 0.0 }
    }

    pub(super) fn get_mut(&mut self, queue: QueueIndex) -> Option<&mut Flow> {
        self.flows.get_mut(queue.0)
    }

    /// The flow whose turn is next, among those with waiting jobs that `may_go` accepts.
    pub(super) fn next(&self, may_go: impl Fn(QueueIndex, &Flow) -> bool) -> Option<QueueIndex> {
        let waiting = self
            .flows
            .iter()
            .enumerate()
            .filter(|(at, flow)| !flow.is_empty() && may_go(QueueIndex(*at), flow));
        waiting
            .min_by(|(_, a), (_, b)| a.virtual_time.total_cmp(&b.virtual_time))
            .map(|(at, _)| QueueIndex(at))
    }

    /// Records that a flow takes its turn.
    pub(super) fn goes(&mut self, queue: QueueIndex) {
        if let Some(flow) = self.flows.get(queue.0) {
            self.now = self.now.max(flow.virtual_time);
        }
    }

    /// The job that goes next.
    pub(super) fn next_job(&self) -> Option<JobKey> {
        self.flows.get(self.next(|_, _| true)?.0)?.next()
    }

    pub(super) fn push(&mut self, queue: QueueIndex, job: &Placement<'_>, quantum: usize) {
        let now = self.now;
        if let Some(flow) = self.flows.get_mut(queue.0) {
            flow.catch_up(now);
            flow.push(job, quantum);
        }
    }

    /// Takes a job out of its place.
    pub(super) fn remove(&mut self, queue: QueueIndex, caller: &Caller, key: JobKey) {
        if let Some(flow) = self.flows.get_mut(queue.0) {
            flow.remove(caller, key);
        }
    }

    /// Whether a caller exceeded its quanta while other callers of the queue wait; or the queue exceeded its share by more than a pass of
    /// `pass_cost` while other queues wait.
    pub(super) fn owes(&self, queue: QueueIndex, caller: &Caller, pass_cost: usize) -> bool {
        let others = self.flows.iter().enumerate().filter(|(at, flow)| *at != queue.0 && !flow.is_empty());
        let least = others.map(|(_, flow)| flow.virtual_time).min_by(f64::total_cmp);
        let is_ahead = |flow: &Flow| least.is_some_and(|least| flow.is_ahead(least, pass_cost));
        self.flows.get(queue.0).is_some_and(|flow| flow.owes(caller) || is_ahead(flow))
    }

    /// Charges a job of the queue and caller for a pass that it led.
    pub(super) fn led(&mut self, queue: QueueIndex, caller: &Caller, cost: usize, quantum: usize) {
        let waiting = self.flows.iter().filter(|flow| !flow.is_empty());
        let least = waiting.map(|flow| flow.virtual_time).min_by(f64::total_cmp);
        let now = self.now;
        let Some(flow) = self.flows.get_mut(queue.0) else { return };
        flow.catch_up(now);
        flow.led(caller, cost, quantum);
        // A flow that has nothing waiting during this pass cannot claim it later either.
        self.now = now.max(least.map_or(flow.virtual_time, |least| least.min(flow.virtual_time)));
    }

    /// A pass was formed. `is_cut`: a hint cut it short.
    pub(super) fn pass_formed(&mut self, quantum: usize, is_cut: bool) {
        self.flows.iter_mut().for_each(|flow| flow.pass_formed(quantum, is_cut));
    }

    pub(super) fn len(&self) -> usize {
        self.flows.len()
    }
}

#[cfg(test)]
impl FairQueue {
    pub(super) fn is_empty(&self) -> bool {
        !self.flows.iter().any(Flow::has_callers)
    }

    /// Small jobs that a caller has waiting in a flow.
    pub(super) fn small(&self, queue: QueueIndex, caller: &Caller) -> usize {
        self.flows[queue.0].small(caller)
    }
}

#[cfg(test)]
mod tests {
    use super::super::batcher::QUANTA_PER_PASS;
    use super::super::flow::{DEBT_QUANTA_MAX, JobClass, Position};
    use super::*;

    const FIRST: QueueIndex = QueueIndex(0);
    const SECOND: QueueIndex = QueueIndex(1);

    fn flows() -> FairQueue {
        FairQueue::new([NonZeroU32::MIN; 2])
    }

    fn push(flows: &mut FairQueue, queue: QueueIndex, key: u64) {
        push_of(flows, queue, key, &None);
    }

    fn push_of(flows: &mut FairQueue, queue: QueueIndex, key: u64, caller: &Caller) {
        let placement =
            Placement { key: JobKey(key), caller, class: JobClass::Small, position: Position::Behind };
        flows.push(queue, &placement, 1);
    }

    #[test]
    fn a_caller_that_had_nothing_waiting_goes_before_those_that_wait_but_half_a_pass_of_them_at_most() {
        let mut flows = flows();
        let caller = |at: u64| Some(format!("caller {at}"));
        push_of(&mut flows, FIRST, 0, &caller(0));
        flows.pass_formed(1, false);
        let fresh = QUANTA_PER_PASS as u64 / 2;
        for at in 1..=fresh + 1 {
            push_of(&mut flows, FIRST, at, &caller(at));
        }
        let mut order = Vec::new();
        while let Some(job) = flows.next_job() {
            order.push(job.0);
            flows.remove(FIRST, &caller(job.0), job);
        }
        let expected: Vec<u64> = (1..=fresh).chain([0, fresh + 1]).collect();
        assert_eq!(order, expected);
    }

    #[test]
    fn a_flow_without_jobs_does_not_make_up_for_a_pass_of_another_queue() {
        let mut flows = flows();
        flows.led(FIRST, &None, 1000, 100);
        push(&mut flows, SECOND, 1);
        push(&mut flows, FIRST, 2);
        assert_eq!(flows.flows[0].virtual_time, flows.flows[1].virtual_time);
    }

    #[test]
    fn an_item_of_any_size_delays_its_queue_by_at_most_the_debt_of_a_caller() {
        let mut flows = flows();
        push(&mut flows, FIRST, 1);
        push(&mut flows, SECOND, 2);
        flows.led(FIRST, &None, 1_000_000, 10);
        assert_eq!(flows.flows[0].virtual_time, 10.0 * DEBT_QUANTA_MAX as f64);
    }

    #[test]
    fn a_pass_of_its_own_is_charged_to_a_flow_that_had_nothing_waiting() {
        let mut flows = flows();
        push(&mut flows, FIRST, 1);
        flows.flows[0].virtual_time = 500.0;
        flows.goes(FIRST);
        flows.led(SECOND, &None, 100, 10);
        assert_eq!(
            (flows.flows[1].virtual_time, flows.now),
            (600.0, 500.0),
            "others wait, and now is theirs"
        );
    }
}
