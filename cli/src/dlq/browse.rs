//! Reads dead letters for `vramq status --watch`, which lists and explains them.

use std::collections::BTreeSet;
use std::time::Duration;

use vramq_amqp::Address;
use vramq_dlq::Access;
use vramq_dlq::dead_letter::{DeadLetter, Summary};
use vramq_dlq::explain::explain;
use vramq_dlq::preview::preview;
use vramq_dlq::scan::scan_first;

use super::list::letter_table;
use super::show::laid_out;
use crate::broker::connection_name;
use crate::output::text::safe;

/// The most letters that are kept, of all models together. A person does not go through more; `vramq dlq list` lists all.
const LETTERS_MAX: usize = 500;

/// The longest wait for another operator to release the lock of a queue. A person looks at the screen meanwhile.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(10);

/// A dead letter without its body.
#[derive(Debug)]
pub(crate) struct Letter {
    pub(crate) summary: Summary,
    /// What explains it, with control characters escaped. Headings are not indented.
    pub(crate) dossier: Vec<String>,
}

/// Dead letters of some models.
#[derive(Debug, Default)]
pub(crate) struct Letters {
    /// Model by model, oldest first, at most [`LETTERS_MAX`].
    pub(crate) kept: Vec<Letter>,
    /// The number of further letters.
    pub(crate) more: u64,
    /// Why queues could not be read. Safe to print.
    pub(crate) faults: Vec<String>,
}

impl Letters {
    /// None, because they could not be read. The reason must be safe to print.
    pub(crate) fn unread(why: String) -> Self {
        Self { faults: vec![why], ..Self::default() }
    }

    /// A head, then a row for each letter that is kept.
    pub(crate) fn table(&self, now_ms: u64) -> Vec<String> {
        let rows: Vec<_> = self.kept.iter().map(|letter| letter.summary.clone()).collect();
        let models: BTreeSet<_> = rows.iter().map(|row| row.group.model.as_str()).collect();
        letter_table(&rows, models.len() > 1, now_ms).lines().map(str::to_owned).collect()
    }

    fn add(&mut self, letter: &DeadLetter) {
        self.kept.push(Letter { summary: letter.summary(), dossier: dossier(letter) });
    }

    /// How many letters of the next model are kept: an equal part of the room that is left, shared with the models after it.
    fn share(&self, models_left: usize) -> usize {
        LETTERS_MAX.saturating_sub(self.kept.len()) / models_left.max(1)
    }
}

/// Reads the oldest dead letters of these models, and changes none. A queue that cannot be read is a fault; the others are read.
pub(crate) async fn read(address: Address, models: Vec<String>) -> Letters {
    let connection_name = connection_name("status");
    // Nothing may write to the terminal that shows the letters.
    let access = Access { address, connection_name, lock_wait_max: LOCK_WAIT_MAX, on_lock_wait: |_| {} };
    let mut letters = Letters::default();
    for (at, model) in models.iter().enumerate() {
        let (share, kept_before) = (letters.share(models.len() - at), letters.kept.len());
        let read = scan_first(&access, model, share as u64, |letter| {
            letters.add(&letter);
            Ok(())
        });
        match read.await {
            Ok(count) => letters.more += count.saturating_sub((letters.kept.len() - kept_before) as u64),
            Err(error) => letters.faults.push(format!("{}: {error}", safe(model))),
        }
    }
    letters
}

fn dossier(letter: &DeadLetter) -> Vec<String> {
    let mut sections = explain(letter);
    sections.push(("Body", preview(letter)));
    laid_out(letter, sections)
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;

    use super::*;

    #[test]
    fn letters_are_kept_without_their_bodies() {
        let body = vec![b'x'; 100_000];
        let letter = DeadLetter::new("vramq.dead.minilm", BasicProperties::default(), body);
        let mut letters = Letters::default();
        for _ in 0..3 {
            letters.add(&letter);
        }
        let table = letters.table(0);
        assert_eq!((letters.kept.len(), table.len()), (3, 4));
        assert!(table[0].starts_with("FINGERPRINT  ID"), "{}", table[0]);
        let dossier = &letters.kept[0].dossier;
        assert!(
            dossier.contains(&"What to do".to_owned()) && dossier.contains(&"Body".to_owned()),
            "{dossier:?}"
        );
        assert!(dossier.concat().len() < 10_000, "{dossier:?}");
    }

    #[test]
    fn each_model_has_a_share_of_the_letters() {
        let letter = DeadLetter::new("vramq.dead.minilm", BasicProperties::default(), Vec::new());
        let mut letters = Letters::default();
        // Room that a model does not use goes to the models after it.
        for (models_left, share, there) in
            [(4, 125, 50), (3, 150, 1_000), (2, 150, 0), (1, 300, 300), (1, 0, 9)]
        {
            assert_eq!(letters.share(models_left), share, "{models_left} models left");
            for _ in 0..share.min(there) {
                letters.add(&letter);
            }
        }
        assert_eq!(letters.kept.len(), LETTERS_MAX);
    }
}
