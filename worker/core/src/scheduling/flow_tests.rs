//! Tests of one queue's callers: who goes before whom, and what a caller owes.

use super::*;

const QUANTUM: usize = 10;

fn caller(name: &str) -> Caller {
    Some(name.to_owned())
}

fn flow(weight: u32) -> Flow {
    Flow::new(NonZeroU32::new(weight).unwrap())
}

fn push(flow: &mut Flow, key: u64, name: &str, class: JobClass) {
    let (key, caller) = (JobKey(key), &caller(name));
    flow.push(&Placement { key, caller, class, position: Position::Behind }, QUANTUM);
}

/// A queue in which two callers have a large job each. They wait for a round, which begins now.
fn two_callers() -> Flow {
    let mut flow = flow(1);
    push(&mut flow, 1, "a", JobClass::Large);
    push(&mut flow, 2, "b", JobClass::Large);
    flow.pass_formed(QUANTUM, false);
    flow
}

#[test]
fn a_queue_is_ahead_by_more_than_a_cost_in_units_of_its_weight() {
    let mut flow = flow(4);
    flow.virtual_time = 12.0;
    assert!(!flow.is_ahead(10.0, 8) && flow.is_ahead(10.0, 7));
}

#[test]
fn four_new_callers_with_small_jobs_go_before_those_that_wait_and_no_more_between_two_passes() {
    let mut flow = flow(1);
    push(&mut flow, 1, "waits", JobClass::Large);
    for (key, name) in (2..).zip(["a", "b", "c", "d", "e", "f"]) {
        push(&mut flow, key, name, JobClass::Small);
    }
    // One with a large job is not new in this sense.
    push(&mut flow, 8, "g", JobClass::Large);
    let order: Vec<_> = flow.order.iter().flatten().map(String::as_str).collect();
    assert_eq!(order, ["a", "b", "c", "d", "waits", "e", "f", "g"]);
}

#[test]
fn a_caller_goes_on_until_its_quantum_is_used_up_or_nothing_of_it_fits() {
    let mut flow = two_callers();
    flow.took(&caller("a"), QUANTUM - 1, QUANTUM);
    assert_eq!(flow.front(), Some(&caller("a")));
    flow.took(&caller("a"), 1, QUANTUM);
    assert_eq!(flow.front(), Some(&caller("b")));
    assert!(flow.may_add());
    flow.took(&caller("b"), 0, QUANTUM);
    assert_eq!(flow.front(), Some(&caller("a")));
    assert!(flow.may_add(), "the other one may still have a job that fits");
    flow.took(&caller("a"), 0, QUANTUM);
    assert!(!flow.may_add());
}

#[test]
fn a_caller_owes_what_it_took_beyond_its_quantum_also_when_it_has_nothing_left() {
    for (cost, owes) in [(QUANTUM, false), (QUANTUM + 1, true)] {
        let mut flow = two_callers();
        flow.took(&caller("a"), cost, QUANTUM);
        assert_eq!(flow.owes(&caller("a")), owes, "{cost}");
        flow.remove(&caller("a"), JobKey(1));
        assert_eq!(flow.owes(&caller("a")), owes, "{cost}, and it is gone");
        flow.remove(&caller("b"), JobKey(2));
        assert!(!flow.owes(&caller("a")), "nobody waits");
    }
}

#[test]
fn small_and_large_jobs_of_a_caller_take_turns() {
    let mut flow = flow(1);
    push(&mut flow, 1, "a", JobClass::Large);
    push(&mut flow, 2, "a", JobClass::Small);
    push(&mut flow, 3, "a", JobClass::Large);
    let mut turns = Vec::new();
    for _ in 0..4 {
        turns.extend(flow.next());
        let queue = flow.caller_mut(&caller("a")).expect("it waits");
        let class = queue.next_class();
        assert_ne!(class, class.other());
        queue.had_turn(class, 0, false);
    }
    assert_eq!(turns, [2, 1, 2, 3].map(JobKey), "the small job keeps its place, large ones go round");
}
