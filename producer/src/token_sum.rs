//! The tokens of a job, from parts that may overlap. Pure.

use std::collections::HashMap;

/// What the parts of a job say of its tokens. A union-find whose links carry weights.
///
/// A part says how many tokens lie between two boundaries, the items before which it begins and ends. So each part links two boundaries,
/// and the job's tokens are known when links lead from its first boundary to its last, whatever else overlaps. The parts of an attempt
/// follow one another, and begin where earlier parts ended: the links of parts that workers send always do.
#[derive(Debug, Default)]
pub(crate) struct TokenSum {
    /// A forest of the boundaries in links: for each but the roots its parent, and the tokens from there to it. At most one entry for each
    /// item of the job.
    parents: HashMap<u32, (u32, i128)>,
}

impl TokenSum {
    /// Notes the tokens of the items from `start` to before `end`. What repeats or contradicts earlier parts changes nothing.
    pub(crate) fn add(&mut self, start: u32, end: u32, tokens: u64) {
        let (start_root, to_start) = self.root(start);
        let (end_root, to_end) = self.root(end);
        if start_root != end_root {
            self.parents.insert(end_root, (start_root, to_start + i128::from(tokens) - to_end));
        }
    }

    /// The tokens of the first `items`; `None` if the parts do not say it.
    pub(crate) fn of_first(&mut self, items: u32) -> Option<u64> {
        let (first, last) = (self.root(0), self.root(items));
        (first.0 == last.0).then_some(last.1 - first.1)?.try_into().ok()
    }

    /// The root of a boundary's tree, and the tokens from there to the boundary.
    fn root(&mut self, boundary: u32) -> (u32, i128) {
        let (mut root, mut tokens) = (boundary, 0);
        while let Some((parent, from_parent)) = self.parents.get(&root) {
            (root, tokens) = (*parent, tokens + from_parent);
        }
        // Path compression: parts in the worst order would otherwise make one chain of all boundaries.
        let (mut at, mut left) = (boundary, tokens);
        while let Some(entry) = self.parents.get_mut(&at) {
            let (parent, from_parent) = std::mem::replace(entry, (root, left));
            (at, left) = (parent, left - from_parent);
        }
        (root, tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Item `n` has `n + 1` tokens.
    fn sum(parts: &[(u32, u32)], items: u32) -> Option<u64> {
        let mut sum = TokenSum::default();
        for (start, end) in parts {
            sum.add(*start, *end, (*start..*end).map(|item| u64::from(item) + 1).sum());
        }
        sum.of_first(items)
    }

    #[test]
    fn overlapping_parts_count_once() {
        for parts in [
            &[(0, 5)][..],
            &[(3, 5), (3, 5), (1, 2), (0, 3)],
            // The first worker was lost after its second part; the job had gone on behind the first one.
            &[(0, 2), (2, 4), (2, 3), (3, 5)],
            // Nobody knew of the first worker's parts.
            &[(0, 3), (0, 2), (2, 5)],
            &[(2, 5), (1, 5), (0, 1)],
        ] {
            assert_eq!(sum(parts, 5), Some(15), "{parts:?}");
        }
    }

    #[test]
    fn what_the_parts_do_not_say_is_unknown() {
        for parts in [&[][..], &[(0, 3)], &[(0, 3), (2, 5)], &[(1, 5)]] {
            assert_eq!(sum(parts, 5), None, "{parts:?}");
        }
    }

    /// Parts of one item each, the last first, link each boundary to the one before. Who asks from the deepest one does not leave the way as
    /// long for who asks from the next: 65,536 items would take 2 billion steps.
    #[test]
    fn a_long_way_is_walked_once() {
        let mut sum = TokenSum::default();
        let items = 65_536;
        for item in (0..items).rev() {
            sum.add(item, item + 1, 1);
        }
        assert_eq!(sum.of_first(items), Some(u64::from(items)));
        let all_at_the_root = (1..=items).all(|at| sum.parents[&at] == (0, i128::from(at)));
        assert!(all_at_the_root);
    }

    #[test]
    fn contradictions_and_absurd_numbers_change_nothing_else() {
        let mut sum = TokenSum::default();
        sum.add(0, 2, 7);
        sum.add(0, 2, u64::MAX);
        sum.add(2, 2, u64::MAX);
        assert_eq!(sum.of_first(2), Some(7));
        let mut sum = TokenSum::default();
        sum.add(0, 1, u64::MAX);
        sum.add(1, 2, u64::MAX);
        assert_eq!(sum.of_first(2), None);
        let mut sum = TokenSum::default();
        sum.add(0, 3, 1);
        sum.add(1, 3, 2);
        assert_eq!((sum.of_first(1), sum.of_first(3)), (None, Some(1)));
    }
}
