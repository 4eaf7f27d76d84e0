//! How far a transfer came.

use std::collections::HashSet;

use crate::dead_letter::Fingerprint;
use crate::text::counted;

/// The result of a transfer from one queue.
#[derive(Debug, Default)]
pub struct TransferReport {
    /// Stored at the destination, and acknowledged in the queue.
    pub done: Vec<Fingerprint>,
    /// It was not checked whether the broker has taken all acknowledgements: the last of `done` may still be in the queue.
    pub acks_unsure: bool,
    /// Published, but the broker did not answer: they may be stored at the destination, and are still in the queue.
    pub unknown: Vec<Fingerprint>,
    /// Still in the queue, with the reason.
    pub kept: Vec<(Fingerprint, String)>,
    /// Selected, but no longer in the queue.
    pub gone: usize,
    /// Why the end of an action that ended early is not in the action log.
    pub(super) unlogged: Option<String>,
    /// Results that their reply queue has.
    pub(super) delivered: HashSet<Fingerprint>,
    /// Undelivered and delivered results, still in the queue, of jobs that wait until all their results are delivered. Even delivered ones
    /// stay until then: if one were removed and this process were killed, a later retry would run the job again.
    pub(super) needed: HashSet<Fingerprint>,
    /// Results in `needed` that were delivered but went back to the queue at the end of a reading.
    pub(super) back: HashSet<Fingerprint>,
}

impl TransferReport {
    /// Results that their reply queue has, and that are still in the dead queue because their job is. If the action ended early, another one
    /// delivers them again.
    pub fn delivered_and_there(&self) -> Vec<Fingerprint> {
        let kept = self.kept.iter().map(|(fingerprint, _)| fingerprint);
        let named: HashSet<_> = self.done.iter().chain(kept).collect();
        self.delivered.iter().filter(|fingerprint| !named.contains(fingerprint)).copied().collect()
    }

    /// How far an action on `selected` letters came that ended early, in sentences without a full stop. `done` names the action for people:
    /// "retried". `look` says how they see what is in the queue.
    pub fn early_end(&self, done: &str, selected: usize, look: &str) -> Vec<String> {
        self.early_end_with(self.delivered_and_there().len(), done, selected, look)
    }

    fn early_end_with(&self, delivered: usize, done: &str, selected: usize, look: &str) -> Vec<String> {
        let (moved, unknown) = (self.done.len(), self.unknown.len());
        let mut lines = vec![format!("{moved} of {} {done}", counted(selected as u64, "dead letter"))];
        if unknown > 0 {
            lines.push(format!(
                "{unknown} published without an answer of the broker: they may be {done}, and are still in the queue"
            ));
        }
        if delivered > 0 {
            lines.push(format!("{delivered} delivered, and still in the queue because their job stays"));
        }
        if selected > moved + unknown + delivered + self.gone {
            lines.push("the others are still in the queue".to_owned());
        }
        if self.acks_unsure && moved > 0 {
            lines.push(format!(
                "the last of those {done} may still be in the queue as well: {look} before you repeat this"
            ));
        }
        if let Some(why) = &self.unlogged {
            lines.push(format!("the action log does not say so: {why}"));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;

    use super::*;
    use crate::dead_letter::DeadLetter;

    #[test]
    fn what_is_not_known_is_not_counted_as_done() {
        let letter = DeadLetter::new("vramq.dead.m", BasicProperties::default(), Vec::new());
        let fingerprints = |count| vec![letter.fingerprint(); count];
        let said = |done, unknown, delivered, selected, acks_unsure| {
            let (done, unknown) = (fingerprints(done), fingerprints(unknown));
            let report = TransferReport { done, unknown, acks_unsure, ..TransferReport::default() };
            report.early_end_with(delivered, "retried", selected, "look")
        };
        assert_eq!(said(2, 0, 0, 2, false), ["2 of 2 dead letters retried"]);
        assert_eq!(
            said(1, 0, 0, 2, false),
            ["1 of 2 dead letters retried", "the others are still in the queue"]
        );
        assert_eq!(
            said(1, 3, 0, 5, true),
            [
                "1 of 5 dead letters retried",
                "3 published without an answer of the broker: they may be retried, and are still in the queue",
                "the others are still in the queue",
                "the last of those retried may still be in the queue as well: look before you repeat this",
            ]
        );
        assert_eq!(
            said(0, 0, 2, 3, true),
            [
                "0 of 3 dead letters retried",
                "2 delivered, and still in the queue because their job stays",
                "the others are still in the queue",
            ]
        );
    }

    /// The queue was read to its end, and its end cannot be logged.
    #[test]
    fn what_is_gone_is_not_said_to_be_in_the_queue() {
        let of = |gone| TransferReport { gone, ..TransferReport::default() };
        assert_eq!(of(2).early_end_with(0, "retried", 2, "look"), ["0 of 2 dead letters retried"]);
        let stays = ["0 of 3 dead letters retried", "the others are still in the queue"];
        assert_eq!(of(2).early_end_with(0, "retried", 3, "look"), stays);
        let unlogged = TransferReport { unlogged: Some("disk full".to_owned()), ..of(2) };
        assert_eq!(
            unlogged.early_end_with(0, "retried", 2, "look"),
            ["0 of 2 dead letters retried", "the action log does not say so: disk full"]
        );
    }
}
