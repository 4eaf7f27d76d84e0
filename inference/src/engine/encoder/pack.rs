//! Packs items into one sequence without padding, and deals them to the threads of a pass.

use super::config::Dims;

/// Sequences that follow each other in the packed order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shard {
    /// Its first sequence, in packed order.
    pub first: usize,
    pub sequences: usize,
    /// Its first token, in the packed sequence.
    pub first_token: usize,
    pub tokens: usize,
}

/// The order in which a pass takes its items, and who takes them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Packing {
    /// Which item is the k-th sequence.
    pub order: Vec<u32>,
    pub shards: Shards,
}

/// How the threads of a pass divide its sequences.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Shards {
    /// All threads work on these together, in step.
    Shared(Shard),
    /// Each thread works on its own, without the others. None if the pass has no sequences.
    PerThread(Vec<Shard>),
}

impl Shards {
    /// All of them, in packed order.
    pub fn as_slice(&self) -> &[Shard] {
        match self {
            Self::Shared(shard) => std::slice::from_ref(shard),
            Self::PerThread(shards) => shards,
        }
    }
}

/// How much more than its fair share of work a thread may get. Beyond this the threads share each step instead, which was measured
/// to cost about as much in waiting.
const IMBALANCE_MAX: f64 = 1.05;

impl Packing {
    /// Divides sequences of these lengths among `threads`: the longest first, each to the thread with the least work (Graham 1969,
    /// at most 4/3 of the best). If a thread gets more than `IMBALANCE_MAX` allows, as with a single long text, there is one shard
    /// for all.
    pub fn new(lengths: &[usize], dims: &Dims, threads: usize) -> Self {
        // Proportional to the floating-point operations of a sequence.
        let work = |tokens: usize| (tokens * (2 * dims.hidden + dims.feed_forward + tokens)) as f64;
        let mut longest_first: Vec<u32> = (0..lengths.len() as u32).collect();
        longest_first.sort_unstable_by_key(|at| (std::cmp::Reverse(lengths[*at as usize]), *at));
        let mut loads = vec![0.0; threads];
        let mut owners = vec![0; lengths.len()];
        for at in longest_first {
            let tokens = lengths[at as usize];
            let least = (0..threads).min_by(|a, b| f64::total_cmp(&loads[*a], &loads[*b]));
            let owner = least.unwrap_or_default();
            loads[owner] += work(tokens);
            owners[at as usize] = owner;
        }
        let fair = loads.iter().sum::<f64>() / threads as f64;
        if threads == 1 || loads.iter().any(|load| *load > fair * IMBALANCE_MAX) {
            owners.fill(0);
        }
        Self::dealt(lengths, &owners)
    }

    fn dealt(lengths: &[usize], owners: &[usize]) -> Self {
        let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
        order.sort_unstable_by_key(|at| (owners[*at as usize], *at));
        let mut shards: Vec<Shard> = Vec::new();
        let mut first_token = 0;
        let mut last_owner = None;
        for (first, at) in order.iter().enumerate() {
            let at = *at as usize;
            if last_owner.replace(owners[at]) != Some(owners[at]) {
                shards.push(Shard { first, first_token, ..Shard::default() });
            }
            if let Some(shard) = shards.last_mut() {
                shard.sequences += 1;
                shard.tokens += lengths[at];
            }
            first_token += lengths[at];
        }
        let shards = match shards[..] {
            [shard] => Shards::Shared(shard),
            _ => Shards::PerThread(shards),
        };
        Self { order, shards }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DIMS: Dims = Dims {
        layers: 1,
        hidden: 32,
        heads: 4,
        kv_heads: 4,
        head: 8,
        feed_forward: 64,
        is_gated: false,
        vocabulary: 10,
        positions: 512,
        token_types: 2,
        is_sparse: false,
    };

    #[test]
    fn a_lone_text_is_shared_by_all_threads() {
        let packing = Packing::new(&[300], &DIMS, 2);
        assert!(matches!(packing.shards, Shards::Shared(Shard { tokens: 300, .. })), "{packing:?}");
    }

    #[test]
    fn equal_texts_go_to_threads_of_their_own() {
        let packing = Packing::new(&[10; 8], &DIMS, 4);
        let Shards::PerThread(shards) = packing.shards else { panic!("{packing:?}") };
        assert_eq!(shards.len(), 4);
        assert!(shards.iter().all(|shard| shard.sequences == 2 && shard.tokens == 20));
    }

    proptest! {
        #[test]
        fn every_item_is_packed_once_and_shards_adjoin(
            lengths in prop::collection::vec(0_usize..600, 1..60),
            threads in 1_usize..9,
        ) {
            let packing = Packing::new(&lengths, &DIMS, threads);
            let mut seen = packing.order.clone();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..lengths.len() as u32).collect::<Vec<_>>());
            let shards = packing.shards.as_slice();
            prop_assert!(shards.len() == 1 || shards.len() == threads);
            let (mut first, mut first_token) = (0, 0);
            for shard in shards {
                prop_assert_eq!((shard.first, shard.first_token), (first, first_token));
                let own = &packing.order[first..first + shard.sequences];
                prop_assert_eq!(shard.tokens, own.iter().map(|at| lengths[*at as usize]).sum::<usize>());
                first += shard.sequences;
                first_token += shard.tokens;
            }
            prop_assert_eq!(first, lengths.len());
        }
    }
}
