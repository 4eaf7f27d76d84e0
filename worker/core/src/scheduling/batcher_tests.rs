//! Tests of the batcher: which items share a pass, in which order, and how long jobs wait.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

fn job(key: u64, costs: &[usize]) -> Waiting {
    let items = (0..).zip(costs.iter().copied()).collect();
    Waiting {
        key: JobKey(key),
        queue: QueueIndex(0),
        caller: None,
        hint: None,
        exclusive: false,
        tried_at_ms: 0,
        isolated: false,
        items,
        more: false,
    }
}

fn of(caller: &str, job: Waiting) -> Waiting {
    Waiting { caller: Some(caller.to_owned()), ..job }
}

fn batcher(cost_max: usize) -> Batcher {
    weighted(cost_max, &[1])
}

/// For jobs of queues with these weights.
fn weighted(cost_max: usize, weights: &[u32]) -> Batcher {
    Batcher::new(PassLimits { cost_max }, weights.iter().filter_map(|weight| NonZeroU32::new(*weight)))
}

/// The next pass, led by whose turn it is.
fn next_pass(batcher: &mut Batcher, fits: impl Fn(PassShape) -> bool) -> Option<Draft> {
    let lead = batcher.leads().next()?;
    batcher.next_pass(lead, fits)
}

fn first_shape(batcher: &Batcher) -> Option<(PassShape, bool)> {
    batcher.first_shape(batcher.leads().next()?)
}

/// Job and index of each item of the next pass.
fn pass(batcher: &mut Batcher) -> Vec<(u64, u32)> {
    let draft = next_pass(batcher, |_| true).unwrap();
    draft.items.iter().map(|(job, index, _)| (job.0, *index)).collect()
}

fn jobs_of(pass: &[(u64, u32)]) -> Vec<u64> {
    let mut jobs: Vec<_> = pass.iter().map(|(job, _)| *job).collect();
    jobs.sort_unstable();
    jobs.dedup();
    jobs
}

#[test]
fn a_lone_job_goes_at_once_with_what_there_is() {
    let mut batcher = batcher(100);
    batcher.push(job(1, &[3]));
    assert_eq!(pass(&mut batcher), [(1, 0)]);
    assert!(next_pass(&mut batcher, |_| true).is_none() && !batcher.has_full_pass());
    batcher.push(job(2, &[40; 5]));
    assert_eq!(pass(&mut batcher), [(2, 0), (2, 1)]);
}

#[test]
fn jobs_share_a_pass_longest_item_first() {
    let mut batcher = batcher(20);
    batcher.push(job(1, &[4, 9]));
    batcher.push(job(2, &[6, 6]));
    assert_eq!(pass(&mut batcher), [(1, 1), (2, 0), (1, 0)]);
    assert_eq!(pass(&mut batcher), [(2, 1)]);
}

#[test]
fn a_gap_is_filled_by_another_job_and_the_one_that_did_not_fit_goes_first_next() {
    let mut batcher = batcher(10);
    batcher.push(job(1, &[7, 8]));
    batcher.push(job(2, &[3, 3]));
    assert_eq!(pass(&mut batcher), [(1, 0), (2, 0)]);
    assert_eq!(pass(&mut batcher), [(1, 1)]);
    assert_eq!(pass(&mut batcher), [(2, 1)]);
}

#[test]
fn a_caller_whose_next_item_does_not_fit_keeps_nobody_from_the_pass() {
    let mut batcher = batcher(80);
    batcher.push(of("a", job(1, &[4, 79])));
    (2..10).for_each(|key| batcher.push(of("b", job(key, &[10]))));
    let first = next_pass(&mut batcher, |_| true).unwrap();
    assert_eq!((first.items.len(), first.shape.cost), (8, 74));
    assert_eq!(pass(&mut batcher), [(1, 1)], "it goes first next");
    assert_eq!(jobs_of(&pass(&mut batcher)), [9]);
}

/// A job whose hint keeps it from a pass leads the next one. Its caller has no other claim to be the next.
#[test]
fn a_caller_whose_job_leads_the_next_pass_does_not_start_the_one_after_it() {
    let mut batcher = batcher(10);
    batcher.push(of("x", job(1, &[5, 5, 5])));
    batcher.push(of("y", job(3, &[6])));
    batcher.push(of("y", Waiting { hint: Some(1), ..job(2, &[1]) }));
    batcher.push(of("z", job(4, &[5])));
    assert_eq!(jobs_of(&pass(&mut batcher)), [1, 4]);
    assert_eq!(pass(&mut batcher), [(2, 0)]);
    assert_eq!(pass(&mut batcher), [(1, 1), (1, 2)]);
    assert_eq!(pass(&mut batcher), [(3, 0)]);
}

#[test]
fn a_hint_limits_the_whole_pass_in_either_order() {
    let mut batcher = batcher(100);
    batcher.push(Waiting { hint: Some(2), ..job(1, &[1, 1, 1]) });
    batcher.push(job(2, &[1]));
    assert_eq!(pass(&mut batcher), [(1, 0), (1, 1)]);
    assert_eq!(pass(&mut batcher), [(1, 2), (2, 0)]);

    batcher.push(job(3, &[1, 1]));
    batcher.push(Waiting { hint: Some(2), ..job(4, &[1]) });
    assert_eq!(pass(&mut batcher), [(3, 0), (3, 1)]);
    assert_eq!(pass(&mut batcher), [(4, 0)]);
}

#[test]
fn exclusive_and_isolated_jobs_are_alone_and_take_turns_with_the_others() {
    let mut batcher = batcher(100);
    batcher.push(job(1, &[1]));
    batcher.push(Waiting { exclusive: true, ..job(2, &[1]) });
    batcher.push(Waiting { isolated: true, ..job(3, &[1, 1]) });
    batcher.push(job(4, &[1]));
    assert_eq!(first_shape(&batcher).map(|(_, exclusive)| exclusive), Some(true));
    let exclusive = next_pass(&mut batcher, |_| true).unwrap();
    assert!(exclusive.exclusive && exclusive.items == [(JobKey(2), 0, 1)]);
    assert_eq!(pass(&mut batcher), [(1, 0), (4, 0)]);
    assert_eq!(pass(&mut batcher), [(3, 0), (3, 1)]);
}

#[test]
fn exclusive_jobs_go_in_the_order_of_their_first_attempts() {
    let mut batcher = batcher(1);
    for (key, tried_at_ms) in [(2, 20), (3, 10), (4, 15)] {
        batcher.push(Waiting { exclusive: true, tried_at_ms, ..job(key, &[1]) });
    }
    let order: Vec<_> = (0..3).map(|_| pass(&mut batcher)[0].0).collect();
    assert_eq!(order, [3, 4, 2]);
}

#[test]
fn a_job_that_fitted_may_share_passes_again() {
    let mut batcher = batcher(100);
    batcher.push(Waiting { exclusive: true, hint: Some(1), ..job(1, &[1, 1]) });
    batcher.relax(JobKey(1), None);
    batcher.push(job(2, &[1]));
    assert_eq!(first_shape(&batcher).map(|(_, exclusive)| exclusive), Some(false));
    assert_eq!(jobs_of(&pass(&mut batcher)), [1, 2]);
    batcher.relax(JobKey(1), Some(3));
    assert_eq!(batcher.waiting(), 0);
}

#[test]
fn a_removed_job_leaves_nothing_behind() {
    let mut batcher = batcher(10);
    batcher.push(job(1, &[6, 6]));
    batcher.push(Waiting { exclusive: true, ..job(2, &[1]) });
    batcher.push(of("a", job(3, &[1])));
    assert!(batcher.has_full_pass());
    assert_eq!(batcher.large(), [JobKey(1)]);
    [1, 2, 3, 9].into_iter().for_each(|key| batcher.remove(JobKey(key)));
    assert!(next_pass(&mut batcher, |_| true).is_none() && !batcher.has_full_pass());
    assert!(batcher.lanes.is_empty() && batcher.leaders.is_empty());
}

#[test]
fn items_given_back_go_first_and_in_order() {
    let mut batcher = batcher(3);
    batcher.push(Waiting { hint: Some(2), ..job(1, &[1, 1, 1]) });
    let draft = next_pass(&mut batcher, |_| true).unwrap();
    assert_eq!(draft.items, [(JobKey(1), 0, 1), (JobKey(1), 1, 1)]);
    batcher.push(job(2, &[1, 1]));
    // Job 9 is not among those that go on, so its item is dropped.
    let items = draft.items.into_iter().chain([(JobKey(9), 0, 1)]);
    batcher.give_back(vec![Waiting { hint: Some(2), isolated: true, ..job(1, &[]) }], items);
    assert_eq!(pass(&mut batcher), [(1, 0), (1, 1)], "isolated: alone, with its hint");
    assert_eq!(pass(&mut batcher), [(2, 0), (2, 1)]);
    assert_eq!(pass(&mut batcher), [(1, 2)]);
    assert!(next_pass(&mut batcher, |_| true).is_none());
}

/// Large jobs of one caller, half of them with a hint of one item; then a job of one text of the same or another caller.
fn passes_until_small_job(caller: &str) -> usize {
    let mut batcher = batcher(2048);
    for key in 0..8 {
        let hint = (key % 2 == 0).then_some(1);
        batcher.push(of("bulk", Waiting { hint, ..job(key, &[60; 20_000]) }));
    }
    // They have been running for a while.
    (0..50).for_each(|_| drop(pass(&mut batcher)));
    batcher.push(of(caller, job(99, &[60])));
    (1..100).find(|_| pass(&mut batcher).contains(&(99, 0))).unwrap()
}

#[test]
fn a_small_job_waits_for_two_passes_at_most_whatever_large_jobs_stand_before_it() {
    assert!(passes_until_small_job("other") <= 2);
    assert!(passes_until_small_job("bulk") <= 2);
}

#[test]
fn callers_get_equal_shares_however_many_jobs_they_have() {
    let mut batcher = batcher(800);
    (0..20).for_each(|key| batcher.push(of("many", job(key, &[10; 1000]))));
    batcher.push(of("one", job(100, &[10; 1000])));
    let mut items = HashMap::new();
    for _ in 0..20 {
        for (job, _) in pass(&mut batcher) {
            *items.entry(job == 100).or_insert(0) += 1;
        }
    }
    assert!((700..=900).contains(&items[&true]) && (700..=900).contains(&items[&false]), "{items:?}");
}

#[test]
fn small_jobs_of_a_caller_do_not_starve_its_large_one() {
    let mut batcher = batcher(80);
    batcher.push(job(0, &[1; 1000]));
    let mut large = 0;
    for round in 0..20 {
        (0..100).for_each(|n| batcher.push(job(1 + round * 100 + n, &[1])));
        large += pass(&mut batcher).iter().filter(|(job, _)| *job == 0).count();
    }
    assert!(large >= 20 * 80 / 3, "{large}");
}

#[test]
fn a_queue_of_which_one_job_is_held_at_a_time_keeps_its_share_and_gets_no_more() {
    let mut batcher = weighted(1, &[3, 1]);
    let (mut ran, mut next) = ([0, 0], 1000);
    let in_second = |key| of("b", Waiting { queue: QueueIndex(1), ..job(key, &[1]) });
    (0..400).for_each(|key| batcher.push(of("a", job(key, &[1]))));
    batcher.push(in_second(next));
    for _ in 0..400 {
        let second = pass(&mut batcher)[0].0 >= 1000;
        ran[usize::from(second)] += 1;
        if second {
            // The broker sends the next one after the ack.
            next += 1;
            batcher.push(in_second(next));
        }
    }
    assert_eq!(ran, [300, 100]);
}

#[test]
fn a_queue_without_jobs_lends_its_share_and_has_no_claim_on_it_later() {
    let mut batcher = weighted(8, &[1, 1]);
    (0..1000).for_each(|key| batcher.push(job(key, &[1])));
    (0..50).for_each(|_| assert_eq!(pass(&mut batcher).len(), 8));
    (1000..1100).for_each(|key| batcher.push(Waiting { queue: QueueIndex(1), ..job(key, &[1]) }));
    for _ in 0..10 {
        let of_second = pass(&mut batcher).into_iter().filter(|(key, _)| *key >= 1000).count();
        assert!((3..=5).contains(&of_second), "{of_second} of 8");
    }
}

proptest! {
    /// While all queues have jobs waiting, each has its share of the passes to within one item, whatever the passes' size, and every
    /// pass is full.
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
            let mut taken: Vec<_> = draft.items.iter().map(|(job, index, _)| (job.0, *index)).collect();
            taken.sort_unstable();
            for (job, index) in taken {
                prop_assert_eq!(next_index[job as usize], index);
                next_index[job as usize] += 1;
                prop_assert!(expected.remove(&(job, index)));
            }
        }
        prop_assert!(expected.is_empty() && batcher.lanes.is_empty());
        prop_assert!(!batcher.has_full_pass() || cost_max == 0);
    }

    /// Whatever else is pushed while it waits, a job of one item runs within a number of passes that depends only on who was
    /// there before: nobody starves.
    #[test]
    fn nobody_starves(
        before in prop::collection::vec((1usize..60, 0u8..5, prop::option::of(1u32..4), prop::bool::weighted(0.1)), 0..20),
        flood in prop::collection::vec((1usize..60, 0u8..200, prop::option::of(1u32..4)), 400),
        cost in 1usize..60,
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
            // Each of the items before may take a pass, half of the passes belong to jobs that lead their own, and half of each
            // other pass to callers that had nothing waiting.
            prop_assert!(passes <= 4 * (4 * before.len() + 2), "{passes} passes");
            for (cost, caller, hint) in flood.by_ref().take(4) {
                key += 1;
                batcher.push(of(&format!("flood {caller}"), Waiting { hint, ..job(key, &[cost]) }));
            }
            if pass(&mut batcher).contains(&(10_000, 0)) {
                break;
            }
        }
    }

    /// A job that runs alone (exclusive, or from the quarantine) waits for one pass of each such job before it, and as many of
    /// the others, whatever else is pushed while it waits.
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

    /// A job whose items are prepared a few at a time runs like one that has them all: each item once, in order, and it never
    /// counts as a small job while more are to come.
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
            let items = (next..).zip(costs.iter().copied()).collect();
            next += costs.len() as u32;
            batcher.extend(of("victim", Waiting { items, more: at < last, ..job(0, &[]) }));
            let small = batcher.lanes.small(QueueIndex(0), &Some("victim".to_owned()));
            prop_assert!(at == last || small == 0);
            for _ in 0..*passes {
                if let Some(draft) = next_pass(&mut batcher, |_| true) {
                    let mut own: Vec<_> = draft.items.iter().filter(|(job, ..)| job.0 == 0).collect();
                    own.sort_by_key(|(_, index, _)| *index);
                    ran.extend(own.into_iter().map(|(_, index, _)| *index));
                }
            }
        }
        while let Some(draft) = next_pass(&mut batcher, |_| true) {
            let mut own: Vec<_> = draft.items.iter().filter(|(job, ..)| job.0 == 0).collect();
            own.sort_by_key(|(_, index, _)| *index);
            ran.extend(own.into_iter().map(|(_, index, _)| *index));
        }
        prop_assert_eq!(ran, (0..next).collect::<Vec<_>>());
        prop_assert!(!batcher.has_full_pass() && batcher.lanes.is_empty() && batcher.cost == 0);
    }
}
