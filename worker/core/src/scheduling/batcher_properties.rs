//! Property tests of the batcher: shares, order and bounded waits, whatever jobs come.

use std::collections::HashSet;

use proptest::prelude::*;

use super::super::test_jobs::{job, of};
use super::tests::{batcher, first_shape, next_pass, pass, weighted};
use super::*;

proptest! {
    /// While all queues have jobs waiting, each gets its share of the passes to within one item, and every pass is full. This holds for any
    /// pass size.
    #[test]
    fn queues_have_their_shares_within_one_job(
        weights in prop::collection::vec(1u32..10, 1..6),
        cost_max in 1usize..40,
        callers in 1u64..4,
        passes in 1usize..60,
    ) {
        let mut batcher = weighted(cost_max, &weights);
        let (mut key, mut ran, mut queue_of) = (0, vec![0; weights.len()], HashMap::new());
        let mut waiting = vec![0; weights.len()];
        for _ in 0..passes {
            for (queue, held) in waiting.iter_mut().enumerate() {
                // More than a pass takes.
                for _ in *held..=cost_max {
                    key += 1;
                    queue_of.insert(key, queue);
                    let caller = (key % callers).to_string();
                    batcher.push(of(&caller, Waiting { queue: QueueIndex(queue), ..job(key, &[1]) }));
                }
                *held = cost_max + 1;
            }
            let items = pass(&mut batcher);
            prop_assert_eq!(items.len(), cost_max);
            for (key, _) in items {
                ran[queue_of[&key]] += 1;
                waiting[queue_of[&key]] -= 1;
            }
            let by_weight = |at: usize| f64::from(ran[at]) / f64::from(weights[at]);
            for a in 0..weights.len() {
                for b in 0..weights.len() {
                    let one_each = 1.0 / f64::from(weights[a]) + 1.0 / f64::from(weights[b]);
                    prop_assert!((by_weight(a) - by_weight(b)).abs() <= one_each + 1e-9, "{ran:?} by {weights:?}");
                }
            }
        }
    }

    #[test]
    fn every_item_goes_once_within_the_limits_and_in_its_jobs_order(
        jobs in prop::collection::vec((prop::collection::vec(1usize..40, 1..30), prop::option::of(1u32..9), 0u8..4, prop::bool::weighted(0.1)), 1..30),
        cost_max in 1usize..100,
        memory in 1usize..100,
    ) {
        let mut batcher = batcher(cost_max);
        let mut expected = HashSet::new();
        for (key, (costs, hint, caller, exclusive)) in jobs.iter().enumerate() {
            let key = key as u64;
            expected.extend((0..costs.len()).map(|i| (key, i as u32)));
            let waiting = Waiting { hint: *hint, exclusive: *exclusive, ..job(key, costs) };
            batcher.push(if *caller == 0 { waiting } else { of(&caller.to_string(), waiting) });
        }
        let mut next_index = vec![0; jobs.len()];
        let lead = |batcher: &Batcher| batcher.leads().next().and_then(|lead| batcher.first(lead));
        while let Some(first) = lead(&batcher) {
            let (shape, exclusive) = first_shape(&batcher).unwrap();
            let draft = next_pass(&mut batcher, |shape| shape.cost <= memory).unwrap();
            let hints = draft.items.iter().filter_map(|(job, ..)| jobs[job.0 as usize].1).min();
            prop_assert!(draft.items.iter().any(|(job, ..)| *job == first));
            prop_assert!(draft.items.len() == 1 || draft.shape.cost <= cost_max.min(memory));
            prop_assert!(draft.shape.cost >= shape.cost && draft.exclusive == exclusive);
            prop_assert!(hints.is_none_or(|hint| draft.items.len() <= hint as usize));
            prop_assert_eq!(draft.shape, draft.items.iter().map(|(_, _, cost)| *cost).collect::<PassShape>());
            prop_assert!(!exclusive || draft.items.iter().all(|(job, ..)| *job == first));
            let mut taken: Vec<_> = draft.items.iter().map(|(job, index, _)| (job.0, index.0)).collect();
            taken.sort_unstable();
            for (job, index) in taken {
                prop_assert_eq!(next_index[job as usize], index);
                next_index[job as usize] += 1;
                prop_assert!(expected.remove(&(job, index)));
            }
        }
        prop_assert!(expected.is_empty() && batcher.shared.is_empty());
        prop_assert!(!batcher.has_full_pass() || cost_max == 0);
    }

    /// A job of one item runs within a number of passes that depends only on the jobs before it. Jobs that are pushed later cannot starve
    /// it.
    #[test]
    fn nobody_starves(
        before in prop::collection::vec((1usize..60, 0u8..5, prop::option::of(1u32..4), prop::bool::weighted(0.1)), 0..20),
        flood in prop::collection::vec((1usize..60, 0u8..200, prop::option::of(1u32..4)), 400),
        cost in 1usize..150,
    ) {
        let mut batcher = batcher(100);
        let mut key = 0;
        for (cost, caller, hint, exclusive) in &before {
            key += 1;
            batcher.push(of(&caller.to_string(), Waiting { hint: *hint, exclusive: *exclusive, ..job(key, &[*cost; 4]) }));
        }
        batcher.push(of("victim", job(10_000, &[cost])));
        let mut flood = flood.into_iter();
        for passes in 1.. {
            // The bound: each item before may take a pass. Half of the passes belong to leaders. Half of each other pass belongs to new
            // callers, whose hints may cut four passes in a row short.
            prop_assert!(passes <= 8 * (4 * before.len() + 4), "{passes} passes");
            for (cost, caller, hint) in flood.by_ref().take(4) {
                key += 1;
                batcher.push(of(&format!("flood {caller}"), Waiting { hint, ..job(key, &[cost]) }));
            }
            if pass(&mut batcher).contains(&(10_000, 0)) {
                break;
            }
        }
    }

    /// A job that runs alone (exclusive or isolated) waits for one pass of each such job before it, and for as many shared passes. Jobs
    /// that are pushed later do not count.
    #[test]
    fn a_job_that_runs_alone_waits_only_for_the_jobs_before_it(
        before in prop::collection::vec((1usize..60, 0u8..5, prop::option::of(1u32..4), prop::bool::weighted(0.5)), 0..20),
        flood in prop::collection::vec((1usize..60, 0u8..200, prop::option::of(1u32..4), prop::bool::weighted(0.3)), 400),
        exclusive: bool,
    ) {
        let mut batcher = batcher(100);
        for (key, (cost, caller, hint, exclusive)) in (0..).zip(&before) {
            let waiting = Waiting { hint: *hint, exclusive: *exclusive, ..job(key, &[*cost; 4]) };
            batcher.push(of(&caller.to_string(), waiting));
        }
        batcher.push(of("victim", Waiting { exclusive, isolated: !exclusive, ..job(10_000, &[1]) }));
        let mut flood = (1000..).zip(flood);
        for passes in 1.. {
            prop_assert!(passes <= 2 * (before.len() + 1), "{passes} passes");
            for (key, (cost, caller, hint, exclusive)) in flood.by_ref().take(4) {
                let waiting = Waiting { hint, exclusive, ..job(key, &[cost]) };
                batcher.push(of(&format!("flood {caller}"), waiting));
            }
            if pass(&mut batcher).contains(&(10_000, 0)) {
                break;
            }
        }
    }

    /// A job whose items are prepared in pieces runs like a job with all items: each item once, in order. It never counts as small while
    /// more items are to come.
    #[test]
    fn a_job_that_is_extended_runs_whole_and_in_order(
        pieces in prop::collection::vec((prop::collection::vec(1usize..40, 1..10), 0usize..3), 1..10),
        others in prop::collection::vec(1usize..40, 0..30),
    ) {
        let mut batcher = batcher(100);
        for (key, cost) in (1..).zip(&others) {
            batcher.push(of("other", job(key, &[*cost])));
        }
        let (mut next, mut ran) = (0, Vec::new());
        let last = pieces.len() - 1;
        for (at, (costs, passes)) in pieces.iter().enumerate() {
            let items = (next..).map(ItemIndex).zip(costs.iter().copied()).collect();
            next += costs.len() as u32;
            batcher.extend(of("victim", Waiting { items, more: at < last, ..job(0, &[]) }));
            let small = batcher.shared.small(QueueIndex(0), &Some("victim".to_owned()));
            prop_assert!(at == last || small == 0);
            for _ in 0..*passes {
                if let Some(draft) = next_pass(&mut batcher, |_| true) {
                    let mut own: Vec<_> = draft.items.iter().filter(|(job, ..)| job.0 == 0).collect();
                    own.sort_by_key(|(_, index, _)| *index);
                    ran.extend(own.into_iter().map(|(_, index, _)| index.0));
                }
            }
        }
        while let Some(draft) = next_pass(&mut batcher, |_| true) {
            let mut own: Vec<_> = draft.items.iter().filter(|(job, ..)| job.0 == 0).collect();
            own.sort_by_key(|(_, index, _)| *index);
            ran.extend(own.into_iter().map(|(_, index, _)| index.0));
        }
        prop_assert_eq!(ran, (0..next).collect::<Vec<_>>());
        prop_assert!(!batcher.has_full_pass() && batcher.shared.is_empty() && batcher.cost == 0);
    }
}
