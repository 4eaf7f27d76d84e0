//! Tests of the batcher: which items share a pass, in which order, and how long jobs wait.

use super::super::test_jobs::{job, of};
use super::*;

pub(super) fn batcher(cost_max: usize) -> Batcher {
    weighted(cost_max, &[1])
}

/// `weights`: of the queues that jobs come from.
pub(super) fn weighted(cost_max: usize, weights: &[u32]) -> Batcher {
    Batcher::new(PassLimits { cost_max }, weights.iter().filter_map(|weight| NonZeroU32::new(*weight)))
}

/// The next pass, led by whose turn it is.
pub(super) fn next_pass(batcher: &mut Batcher, fits: impl Fn(PassShape) -> bool) -> Option<Draft> {
    let lead = batcher.leads().next()?;
    batcher.next_pass(lead, fits)
}

pub(super) fn first_shape(batcher: &Batcher) -> Option<(PassShape, bool)> {
    batcher.first_shape(batcher.leads().next()?)
}

/// Job and index of each item of the next pass.
pub(super) fn pass(batcher: &mut Batcher) -> Vec<(u64, u32)> {
    let draft = next_pass(batcher, |_| true).unwrap();
    draft.items.iter().map(|(job, index, _)| (job.0, index.0)).collect()
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

/// A job whose hint keeps it out of a pass leads the next one. The pass after that starts with the caller that has had the least.
#[test]
fn a_caller_whose_job_leads_a_pass_keeps_its_place_among_the_others() {
    let mut batcher = batcher(10);
    batcher.push(of("x", job(1, &[5, 5, 5])));
    batcher.push(of("y", job(3, &[6])));
    batcher.push(of("y", Waiting { hint: Some(1), ..job(2, &[1]) }));
    batcher.push(of("z", job(4, &[5])));
    assert_eq!(jobs_of(&pass(&mut batcher)), [1, 4]);
    assert_eq!(pass(&mut batcher), [(2, 0)]);
    assert_eq!(pass(&mut batcher), [(3, 0)]);
    assert_eq!(pass(&mut batcher), [(1, 1), (1, 2)]);
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
    assert!(exclusive.exclusive && exclusive.items == [(JobKey(2), ItemIndex(0), 1)]);
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
    batcher.relax(JobKey(1), None, false);
    batcher.push(job(2, &[1]));
    assert_eq!(first_shape(&batcher).map(|(_, exclusive)| exclusive), Some(false));
    assert_eq!(jobs_of(&pass(&mut batcher)), [1, 2]);
    batcher.relax(JobKey(1), Some(3), false);
    assert_eq!(batcher.waiting(), 0);
}

#[test]
fn a_job_that_may_share_passes_already_keeps_its_place_when_it_fits() {
    let mut batcher = batcher(1);
    batcher.push(job(1, &[1]));
    batcher.push(job(2, &[1]));
    batcher.relax(JobKey(2), None, false);
    assert_eq!([pass(&mut batcher), pass(&mut batcher)], [[(1, 0)], [(2, 0)]]);
}

#[test]
fn an_isolated_job_stays_before_an_exclusive_one_that_was_tried_earlier() {
    let mut batcher = batcher(10);
    batcher.push(Waiting { isolated: true, tried_at_ms: 9, ..job(1, &[1]) });
    batcher.push(Waiting { exclusive: true, tried_at_ms: 5, ..job(2, &[1]) });
    batcher.push(Waiting { exclusive: true, tried_at_ms: 5, ..job(3, &[1]) });
    assert_eq!([(); 3].map(|()| pass(&mut batcher)), [[(1, 0)], [(2, 0)], [(3, 0)]]);
}

#[test]
fn a_model_has_a_full_pass_only_while_its_jobs_cost_that_much() {
    let mut batcher = batcher(10);
    batcher.push(job(1, &[10]));
    batcher.push(job(2, &[20]));
    assert_eq!(batcher.large(), [JobKey(2)], "it is larger than a pass");
    batcher.remove(JobKey(2));
    assert!(batcher.has_full_pass());
    batcher.push(job(3, &[9]));
    batcher.remove(JobKey(1));
    assert!(!batcher.has_full_pass());
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
    assert!(batcher.shared.is_empty() && batcher.leaders.is_empty());
}

#[test]
fn items_given_back_go_first_and_in_order() {
    let mut batcher = batcher(3);
    batcher.push(Waiting { hint: Some(2), ..job(1, &[1, 1, 1]) });
    let draft = next_pass(&mut batcher, |_| true).unwrap();
    assert_eq!(draft.items, [(JobKey(1), ItemIndex(0), 1), (JobKey(1), ItemIndex(1), 1)]);
    batcher.push(job(2, &[1, 1]));
    // Job 9 is not among the jobs that continue, so its item is dropped.
    let items = draft.items.into_iter().chain([(JobKey(9), ItemIndex(0), 1)]);
    batcher.put_back(vec![Waiting { hint: Some(2), isolated: true, ..job(1, &[]) }], items);
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
    // These jobs have been running for a while.
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

/// All publishers that the broker does not verify count as one caller.
#[test]
fn all_unnamed_callers_together_get_the_share_of_one_named_caller() {
    let mut batcher = batcher(800);
    (0..20).for_each(|key| batcher.push(job(key, &[10; 1000])));
    batcher.push(of("one", job(100, &[10; 1000])));
    batcher.push(of("other", job(101, &[10; 1000])));
    let mut items = [0; 3];
    for (job, _) in (0..30).flat_map(|_| pass(&mut batcher)) {
        items[job.saturating_sub(99) as usize] += 1;
    }
    assert!(items.iter().all(|items| (700..=900).contains(items)), "{items:?}");
}

/// A caller sends its next job after the last reply. A job's single item costs half a pass, a whole pass, or several.
#[test]
fn a_caller_whose_jobs_come_one_by_one_gets_its_share_and_no_more_however_large_their_items_are() {
    for (cost, others) in [(40, 4), (60, 1), (60, 4), (80, 1), (80, 9), (320, 1), (320, 9)] {
        let mut batcher = batcher(80);
        for other in 0..others {
            (0..300).for_each(|key| batcher.push(of(&other.to_string(), job(other * 1000 + key, &[10; 10]))));
        }
        let (mut ran, mut next) = ([0, 0], 1_000_000);
        batcher.push(of("one by one", job(next, &[cost])));
        for _ in 0..100 * others.min(8) {
            let draft = next_pass(&mut batcher, |_| true).unwrap();
            for (job, _, cost) in &draft.items {
                ran[usize::from(job.0 == next)] += *cost;
            }
            if draft.items.iter().any(|(job, ..)| job.0 == next) {
                next += 1;
                batcher.push(of("one by one", job(next, &[cost])));
            }
        }
        let share = ran[1] as f64 / (ran[0] + ran[1]) as f64 * (others + 1) as f64;
        assert!(
            (0.9..1.1).contains(&share),
            "{share} of its share, with {others} others and items of {cost}"
        );
    }
}

/// A job with a hint leads a pass of its own and fills it.
#[test]
fn a_hint_gives_a_caller_no_more_than_its_share() {
    for others in [1, 4, 9] {
        let mut batcher = batcher(80);
        let hinted = |key| of("hinted", Waiting { hint: Some(4), ..job(key, &[20; 4]) });
        (0..600).for_each(|key| batcher.push(hinted(key)));
        for other in 1..=others {
            (0..300).for_each(|key| batcher.push(of(&other.to_string(), job(other * 1000 + key, &[10; 10]))));
        }
        let mut ran = [0, 0];
        for _ in 0..300 {
            let draft = next_pass(&mut batcher, |_| true).unwrap();
            draft.items.iter().for_each(|(job, _, cost)| ran[usize::from(job.0 < 1000)] += *cost);
        }
        let share = ran[1] as f64 / (ran[0] + ran[1]) as f64 * (others + 1) as f64;
        assert!((0.9..1.1).contains(&share), "{share} of its share, with {others} others");
    }
}

/// Counts the passes until a job of one item runs, while callers of small jobs arrive before each pass: new callers each time, or two that
/// alternate.
fn passes_beside_small_jobs(cost: usize, hint: Option<u32>, callers: u64) -> Option<usize> {
    let mut batcher = batcher(80);
    batcher.push(of("first", job(0, &[10; 8])));
    batcher.push(of("victim", job(1, &[cost])));
    (1..100).find(|passes| {
        for key in [100 + 2 * *passes as u64, 101 + 2 * *passes as u64] {
            batcher.push(of(&(key % callers).to_string(), Waiting { hint, ..job(key, &[10]) }));
        }
        pass(&mut batcher).contains(&(1, 0))
    })
}

#[test]
fn an_item_that_fits_no_pass_of_others_is_not_kept_waiting_by_small_jobs_that_go_first() {
    for (cost, callers) in [(60, 1_000), (80, 1_000), (80, 2), (320, 1_000), (320, 2)] {
        let passes = passes_beside_small_jobs(cost, None, callers);
        assert!(passes.is_some_and(|passes| passes <= 6), "{passes:?} with an item of {cost} and {callers}");
    }
}

#[test]
fn small_jobs_that_let_nobody_share_their_passes_keep_nobody_waiting() {
    for (cost, callers) in [(10, 1_000), (10, 2), (80, 1_000), (80, 2)] {
        let passes = passes_beside_small_jobs(cost, Some(1), callers);
        assert!(passes.is_some_and(|passes| passes <= 12), "{passes:?} with an item of {cost} and {callers}");
    }
}

/// A job whose hint is smaller than the current pass leads a pass of its own, and the current pass continues without it.
#[test]
fn a_hint_of_one_job_does_not_end_the_pass_of_others() {
    let mut batcher = batcher(80);
    batcher.push(of("a", job(1, &[10; 8])));
    batcher.push(of("b", Waiting { hint: Some(1), ..job(2, &[20]) }));
    assert_eq!(pass(&mut batcher).len(), 8);
    assert_eq!(pass(&mut batcher), [(2, 0)]);
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

/// A job with a hint leads every second pass only while that is its queue's share.
#[test]
fn a_hint_gives_a_queue_no_more_than_its_share() {
    for (weights, hint) in [([1, 6], 1), ([1, 6], 4), ([1, 2], 1), ([1, 2], 4), ([1, 1], 4)] {
        let mut batcher = weighted(80, &weights);
        let cost = 80 / hint as usize;
        let hinted = |key| Waiting { hint: Some(hint), ..job(key, &vec![cost; 100]) };
        (0..10).for_each(|key| batcher.push(of("hinted", hinted(key))));
        let small = |key| Waiting { queue: QueueIndex(1), ..job(key, &[10; 10]) };
        (1000..2000).for_each(|key| batcher.push(of("other", small(key))));
        let mut ran = [0, 0];
        for _ in 0..200 {
            let draft = next_pass(&mut batcher, |_| true).unwrap();
            draft.items.iter().for_each(|(job, _, cost)| ran[usize::from(job.0 >= 1000)] += *cost);
        }
        let share = f64::from(weights[0]) / f64::from(weights[0] + weights[1]);
        let had = ran[0] as f64 / (ran[0] + ran[1]) as f64;
        assert!(
            (share * 0.9..share * 1.1).contains(&had),
            "{had} of the cost, with {weights:?} and a hint of {hint}"
        );
    }
}

#[test]
fn a_queue_without_jobs_lends_its_share_and_does_not_make_up_for_it_later() {
    let mut batcher = weighted(8, &[1, 1]);
    (0..1000).for_each(|key| batcher.push(job(key, &[1])));
    (0..50).for_each(|_| assert_eq!(pass(&mut batcher).len(), 8));
    (1000..1100).for_each(|key| batcher.push(Waiting { queue: QueueIndex(1), ..job(key, &[1]) }));
    for _ in 0..10 {
        let of_second = pass(&mut batcher).into_iter().filter(|(key, _)| *key >= 1000).count();
        assert!((3..=5).contains(&of_second), "{of_second} of 8");
    }
}
