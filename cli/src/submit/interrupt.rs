//! Withdraws the unanswered jobs when `vramq submit` is interrupted.

use vramq_producer::Client;

use super::job::JobTemplate;
use crate::output::text::counted;
use crate::signals::Signals;

/// A signal that ends the command.
pub(super) struct Interrupt {
    code: u8,
    /// Further signals.
    signals: Signals,
    /// Jobs without an answer.
    jobs: u64,
    /// Jobs that the client had withdrawn before because they timed out.
    withdrawn_before: u64,
    no_wait: bool,
}

impl Interrupt {
    /// Says what is about to happen.
    pub(super) fn new(
        (code, name): (u8, &'static str),
        signals: Signals,
        client: &Client,
        template: &JobTemplate,
    ) -> Self {
        let (jobs, no_wait) = (template.out(), template.no_wait);
        let counted = counted(jobs, "job");
        match no_wait {
            // Replies to published jobs (`--no-wait`) go to another queue, where others may wait for them.
            true => eprintln!("{name} while {counted} were being published, which may be in the queue"),
            false => eprintln!(
                "{name}: no answer to {counted}, withdrawing them; a second signal ends this at once"
            ),
        }
        Self { code, signals, jobs, withdrawn_before: client.stats().withdrawn, no_wait }
    }

    /// Closes the client, which withdraws the jobs whose handles are dropped by now. A further signal ends the wait. Prints how many were
    /// withdrawn; returns the exit code.
    pub(super) async fn withdraw(mut self, client: &Client) -> u8 {
        tokio::select! {
            () = client.close() => {}
            _ = self.signals.next() => {}
        }
        if self.jobs == 0 || self.no_wait {
            return self.code;
        }
        let withdrawn = client.stats().withdrawn.saturating_sub(self.withdrawn_before).min(self.jobs);
        if withdrawn == self.jobs {
            eprintln!("{} withdrawn", counted(withdrawn, "job"));
        } else {
            let jobs = counted(self.jobs, "job");
            eprintln!(
                "{withdrawn} of {jobs} withdrawn; the others may run, and end as dead letters (unroutable)"
            );
        }
        self.code
    }
}
