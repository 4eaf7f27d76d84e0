//! What a worker's events and actions look like in the trace of a history.

use std::collections::BTreeSet;

use vramq_core::action::{Action, Publication};
use vramq_core::event::Event;
use vramq_core::ids::JobKey;

use super::Shell;
use crate::simulation::env::Env;

impl Shell {
    pub(super) fn trace_event(&self, env: &mut Env, event: &Event) {
        if !env.trace.is_on() {
            return;
        }
        let text = || match event {
            Event::Delivered(delivery) => {
                let again = if delivery.redelivered { ", again" } else { "" };
                let (job, tag, source) = (self.named(delivery.job), delivery.tag, delivery.source);
                format!("<- {job} (tag {tag}{again}) {source:?}")
            }
            Event::Decoded { job, result } => {
                let what = result
                    .as_ref()
                    .map_or_else(|e| e.reason.to_string(), |d| format!("{} items", d.costs.len()));
                format!("<- {} decoded: {what}", self.named(*job))
            }
            Event::PassEnded(end) => format!("<- pass {} {:?} after {:?}", end.pass, end.result, end.took),
            Event::Moved { job, key } => format!("<- {} is for {key}", self.named(*job)),
            Event::Referring { job, .. } => format!("<- {} refers to inputs in a store", self.named(*job)),
            Event::Fetched { job, result } => format!("<- {} fetched: {result:?}", self.named(*job)),
            Event::Prepared { job, result } => {
                let what = result
                    .as_ref()
                    .map_or_else(|e| e.reason.to_string(), |costs| format!("{} items", costs.len()));
                format!("<- {} prepared: {what}", self.named(*job))
            }
            Event::RepliesTaken { job, up_to } => {
                format!("<- {}: replies taken up to item {up_to}", self.named(*job))
            }
            Event::NackSent { job, sent } => {
                format!("<- {} given back or rejected, sent {sent}", self.named(*job))
            }
            Event::Published { job, outcome } => format!("<- {} published: {outcome:?}", self.named(*job)),
            Event::Withdrawn(withdrawn) => format!("<- {} is withdrawn", withdrawn.id),
            Event::Tick(_) | Event::Idle | Event::QueuesCounted { .. } => String::new(),
            other => format!("<- {other:?}"),
        };
        let line = text();
        if !line.is_empty() {
            env.trace.line(env.now, self.who(), || line);
        }
    }

    pub(super) fn trace_action(&self, env: &mut Env, action: &Action) {
        if !env.trace.is_on() {
            return;
        }
        let line = match action {
            Action::Run(order) if order.items.is_empty() => {
                format!("-> pass {}, a health probe", order.pass)
            }
            Action::CancelPass { pass, .. } => format!("-> pass {pass} cancelled"),
            Action::Run(order) => {
                let jobs: BTreeSet<_> = order.items.iter().map(|(job, _)| *job).collect();
                let jobs: Vec<_> = jobs.into_iter().map(|job| self.named(job)).collect();
                let exclusive = if order.exclusive { ", exclusive" } else { "" };
                format!(
                    "-> pass {} of {} items of {}{exclusive}",
                    order.pass,
                    order.items.len(),
                    jobs.join(", ")
                )
            }
            Action::Publish { job, publication } => {
                format!("-> {} {}", self.named(*job), text_of(publication))
            }
            Action::Fetch { job, .. } => format!("-> {} fetch inputs", self.named(*job)),
            Action::GiveBack { job } => format!("-> {} back to its queue", self.named(*job)),
            Action::Reject { job } => format!("-> {} rejected", self.named(*job)),
            Action::Observe(_)
            | Action::Release { .. }
            | Action::Decode { .. }
            | Action::Prepare { .. }
            | Action::CountQueues { .. }
            | Action::SaveLimits
            | Action::ReadMemory
            | Action::TrimDevice => return,
            other => format!("-> {other:?}"),
        };
        env.trace.line(env.now, self.who(), || line);
    }

    /// A job by its number among those that callers published. The worker's own numbers of deliveries are in no line: a person could not
    /// follow a job by them.
    fn named(&self, job: JobKey) -> String {
        self.jobs
            .get(&job)
            .map_or_else(|| "a job that is gone".to_owned(), |stored| format!("job {}", stored.job.0))
    }
}

fn text_of(publication: &Publication) -> String {
    match publication {
        Publication::Requeue { headers, route } => format!(
            "requeued by {route:?}: hint {:?}, attempt {}, done {}, exclusive {}, crashes {}",
            headers.batch_hint, headers.attempt, headers.items_done, headers.exclusive, headers.crashes
        ),
        Publication::DeadLetter { rejection, .. } => format!("dead-lettered: {}", rejection.reason),
        Publication::Reply(run) => {
            format!("replies {}+{}{}", run.offset, run.items, if run.is_last { ", done" } else { "" })
        }
        other => format!("{other:?}"),
    }
}
