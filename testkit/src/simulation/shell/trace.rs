//! What a worker's events and actions look like in the trace of a history.

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
        let number = |job: &JobKey| self.jobs.get(job).map_or(usize::MAX, |stored| stored.job.0);
        let text = || match event {
            Event::Delivered(delivery) => {
                let again = if delivery.redelivered { ", again" } else { "" };
                format!(
                    "<- job {} ({}, tag {}{again}) {:?}",
                    number(&delivery.job),
                    delivery.job,
                    delivery.tag,
                    delivery.source
                )
            }
            Event::Decoded { job, result } => {
                let what = result
                    .as_ref()
                    .map_or_else(|e| e.reason.to_string(), |d| format!("{} items", d.costs.len()));
                format!("<- job {} decoded: {what}", number(job))
            }
            Event::PassEnded(end) => format!("<- pass {} {:?} after {:?}", end.pass, end.result, end.took),
            Event::Published { job, outcome } => format!("<- job {} published: {outcome:?}", number(job)),
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
        let number = |job: &JobKey| self.jobs.get(job).map_or(usize::MAX, |stored| stored.job.0);
        let line = match action {
            Action::Run(order) => {
                let mut jobs: Vec<_> = order.items.iter().map(|(job, _)| number(job)).collect();
                jobs.sort_unstable();
                jobs.dedup();
                format!(
                    "-> pass {} of {} items of jobs {jobs:?}{}",
                    order.pass,
                    order.items.len(),
                    if order.exclusive { ", exclusive" } else { "" }
                )
            }
            Action::Publish { job, publication } => match publication {
                Publication::Requeue { headers, route } => format!(
                    "-> job {} requeued by {route:?}: hint {:?}, attempt {}, done {}, exclusive {}, crashes {}",
                    number(job),
                    headers.batch_hint,
                    headers.attempt,
                    headers.items_done,
                    headers.exclusive,
                    headers.crashes
                ),
                Publication::DeadLetter { rejection, .. } => {
                    format!("-> job {} dead-lettered: {}", number(job), rejection.reason)
                }
                Publication::Reply(run) => format!(
                    "-> job {} replies {}+{}{}",
                    number(job),
                    run.offset,
                    run.items,
                    if run.is_last { ", done" } else { "" }
                ),
                other => format!("-> job {} {other:?}", number(job)),
            },
            Action::Observe(_)
            | Action::Release { .. }
            | Action::Decode { .. }
            | Action::Prepare { .. }
            | Action::CountQueues { .. }
            | Action::SaveLimits
            | Action::TrimDevice => return,
            other => format!("-> {other:?}"),
        };
        env.trace.line(env.now, self.who(), || line);
    }
}
