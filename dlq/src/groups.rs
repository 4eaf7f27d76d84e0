//! Counts dead letters by reason, model and worker version. Pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::dead_letter::{Group, Summary};

/// The counts of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub dead_letters: u64,
    /// Of these, jobs that were retried before and failed again.
    pub retried: u64,
    /// Of these, results that could not be delivered.
    pub results: u64,
    /// When the oldest one was dead-lettered, as Unix time in milliseconds. `None` if no time is known.
    pub oldest_ms: Option<u64>,
    /// The same of the newest one.
    pub newest_ms: Option<u64>,
}

/// The counts of all groups.
#[derive(Clone, Debug, Default)]
pub struct Groups(BTreeMap<Group, Count>);

impl Groups {
    /// Counts a dead letter in its group.
    pub fn add(&mut self, letter: &Summary) {
        let count = self.0.entry(letter.group.clone()).or_default();
        count.dead_letters += 1;
        count.retried += u64::from(letter.retries > 0);
        count.results += u64::from(letter.results.is_some());
        if let Some(at) = letter.dead_at_ms {
            count.oldest_ms = Some(count.oldest_ms.map_or(at, |oldest| oldest.min(at)));
            count.newest_ms = Some(count.newest_ms.map_or(at, |newest| newest.max(at)));
        }
    }

    /// How many there are in all groups.
    pub fn dead_letters(&self) -> u64 {
        self.0.values().map(|count| count.dead_letters).sum()
    }

    /// How many models have letters here.
    pub fn models(&self) -> usize {
        self.0.keys().map(|group| group.model.as_str()).collect::<BTreeSet<_>>().len()
    }

    /// The largest first.
    pub fn sorted(&self) -> Vec<(&Group, &Count)> {
        let mut groups: Vec<_> = self.0.iter().collect();
        groups.sort_by_key(|(_, count)| std::cmp::Reverse(count.dead_letters));
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letter::tests::written;
    use lapin::types::AMQPValue;
    use vramq_schemas::Reason;
    use vramq_schemas::headers::RETRIES;

    #[test]
    fn the_largest_group_comes_first() {
        let mut groups = Groups::default();
        let mut add = |reason, dead_at_ms, retries| {
            let letter = written("a", reason, |headers| {
                headers.insert(RETRIES.into(), AMQPValue::LongLongInt(retries));
            });
            groups.add(&Summary { dead_at_ms, ..letter.summary() });
        };
        add(Reason::Expired, None, 0);
        add(Reason::Malformed, Some(5), 0);
        add(Reason::Malformed, Some(3), 2);
        add(Reason::Malformed, None, 0);
        let shown: Vec<_> =
            groups.sorted().into_iter().map(|(group, count)| (group.to_string(), *count)).collect();
        let malformed =
            Count { dead_letters: 3, retried: 1, results: 0, oldest_ms: Some(3), newest_ms: Some(5) };
        let expired = Count { dead_letters: 1, ..Count::default() };
        assert_eq!(
            shown,
            [("malformed/minilm/0.1.0".to_owned(), malformed), ("expired/minilm/0.1.0".to_owned(), expired)]
        );
        assert_eq!(groups.dead_letters(), 4);
    }
}
