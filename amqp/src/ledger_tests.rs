//! Tests of when a confirm is overdue, and of what stands before it on the connection.

use super::*;

const SECONDS_MAX: u32 = 3;

/// A large message, and the seconds that it takes at 64 KiB/s.
const LARGE: usize = 16 << 20;
const LARGE_S: u32 = 256;

fn ledger(now: Instant) -> Ledger {
    beside_others(&Transfer::default(), now)
}

/// The ledger of another channel of the same connection.
fn beside_others(transfer: &Transfer, now: Instant) -> Ledger {
    Ledger::new(0, MatchBy::PublishSeq, Some(SECONDS_MAX), transfer.clone(), now)
}

fn register(ledger: &mut Ledger, now: Instant) -> u64 {
    ledger.register(None, 0, now)
}

fn confirm(ledger: &mut Ledger, sequence: u64, at: Instant) {
    let place = ledger.note(sequence, &Confirmation::Ack(None), at);
    ledger.no_gap_before(place);
}

#[test]
fn the_slowest_confirm_does_not_count_the_time_for_which_the_broker_blocked() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let mut ledger = ledger(start);
    let before = register(&mut ledger, at(100));
    ledger.clock.stop(at(120));
    // Neither does a second word on it.
    ledger.clock.stop(at(130));
    let during = register(&mut ledger, at(5_000));
    ledger.clock.start(at(60_120));
    confirm(&mut ledger, before, at(60_140));
    assert_eq!(ledger.slowest, Duration::from_millis(40));
    confirm(&mut ledger, during, at(60_150));
    assert_eq!(ledger.slowest, Duration::from_millis(38), "30 ms, and what is left of the 40");
    let after = register(&mut ledger, at(60_200));
    confirm(&mut ledger, after, at(60_300));
    assert_eq!(ledger.slowest, Duration::from_millis(100));
}

fn is_due(ledger: &mut Ledger, sequence: u64) -> bool {
    ledger.wait(sequence, &mut None, Waker::noop()).is_ready()
}

fn ticks(ledger: &mut Ledger, seconds: u32) {
    (0..seconds).for_each(|_| ledger.tick());
}

#[test]
fn a_confirm_is_due_when_its_time_is_over_and_the_broker_did_not_block() {
    let now = Instant::now();
    let mut ledger = ledger(now);
    let silent = register(&mut ledger, now);
    ticks(&mut ledger, SECONDS_MAX);
    assert!(!is_due(&mut ledger, silent));
    ledger.stop_clock(now);
    ticks(&mut ledger, 100);
    assert!(!is_due(&mut ledger, silent));
    ledger.start_clock(now);
    ledger.tick();
    assert!(is_due(&mut ledger, silent));
}

#[test]
fn without_a_deadline_no_confirm_is_due() {
    let now = Instant::now();
    let mut ledger = Ledger::new(0, MatchBy::MessageId, None, Transfer::default(), now);
    let silent = register(&mut ledger, now);
    ticks(&mut ledger, 100_000);
    assert!(!is_due(&mut ledger, silent));
}

#[test]
fn a_broker_that_confirms_one_after_the_other_has_time_for_each() {
    let now = Instant::now();
    let mut ledger = ledger(now);
    let publishes: Vec<_> = (0..5).map(|_| register(&mut ledger, now)).collect();
    for sequence in publishes {
        ticks(&mut ledger, SECONDS_MAX);
        assert!(!is_due(&mut ledger, sequence));
        confirm(&mut ledger, sequence, now);
    }
}

#[test]
fn a_silent_queue_is_noticed_while_others_confirm() {
    let now = Instant::now();
    let mut ledger = ledger(now);
    let silent = register(&mut ledger, now);
    for second in 0..SECONDS_MAX + 2 {
        assert!(!is_due(&mut ledger, silent), "{second}");
        let other = register(&mut ledger, now);
        confirm(&mut ledger, other, now);
        ledger.tick();
    }
    assert!(is_due(&mut ledger, silent));
    // Its confirm is nobody's any more, and the next publish is judged.
    let other = register(&mut ledger, now);
    confirm(&mut ledger, other, now);
    assert_eq!(ledger.judge(other).ok(), Some(PublishOutcome::Confirmed));
}

#[test]
fn a_silent_channel_gives_up_its_oldest_publish_and_then_all() {
    let now = Instant::now();
    let mut ledger = ledger(now);
    let [first, second, third] = [(); 3].map(|()| register(&mut ledger, now));
    ticks(&mut ledger, SECONDS_MAX + 1);
    assert!(is_due(&mut ledger, first));
    ticks(&mut ledger, SECONDS_MAX);
    assert!(!is_due(&mut ledger, second) && !is_due(&mut ledger, third));
    ledger.tick();
    for sequence in [second, third] {
        let end = ledger.wait(sequence, &mut None, Waker::noop());
        let Poll::Ready(UnknownOutcome::Silent(time)) = end else { panic!("{end:?}") };
        assert_eq!(time, ConfirmTime { confirm_s: 2 * SECONDS_MAX, transfer_s: 0 });
    }
}

#[test]
fn large_messages_have_the_time_that_a_slow_network_takes() {
    let now = Instant::now();
    let mut ledger = ledger(now);
    let large = ledger.register(None, LARGE, now);
    let next = register(&mut ledger, now);
    ticks(&mut ledger, SECONDS_MAX + LARGE_S);
    assert!(!is_due(&mut ledger, large));
    confirm(&mut ledger, large, now);
    // What has arrived takes no more time.
    ticks(&mut ledger, SECONDS_MAX);
    assert!(!is_due(&mut ledger, next));
    ledger.tick();
    assert!(is_due(&mut ledger, next));
    // The broker reads in order: the large message has arrived before the one that is confirmed.
    let large = ledger.register(None, LARGE, now);
    let behind = register(&mut ledger, now);
    confirm(&mut ledger, behind, now);
    ticks(&mut ledger, SECONDS_MAX + 2);
    assert!(is_due(&mut ledger, large), "its queue is silent");
}

#[test]
fn a_publish_has_the_time_for_what_other_channels_published_before() {
    let (now, transfer) = (Instant::now(), Transfer::default());
    let (mut ledger, mut other) = (beside_others(&transfer, now), beside_others(&transfer, now));
    let large = [(); 2].map(|()| other.register(None, LARGE, now));
    let small = register(&mut ledger, now);
    assert_eq!(ledger.on_its_way().up_to_last_bytes, 2 * (LARGE as u64 + 1) + 1);
    for sequence in large {
        // Each takes its whole time, and the broker some of its own.
        ticks(&mut ledger, LARGE_S + SECONDS_MAX);
        assert!(!is_due(&mut ledger, small));
        confirm(&mut other, sequence, now);
    }
    let last = OnItsWay { up_to_last_bytes: 1, all_bytes: 1, is_last_passed: false };
    assert_eq!(ledger.on_its_way(), last);
    ticks(&mut ledger, 1 + SECONDS_MAX);
    assert!(!is_due(&mut ledger, small), "the time starts when what was before it has arrived");
    ledger.tick();
    assert!(is_due(&mut ledger, small));
}

/// Its channel is closed, or its queue silent: it delays nobody after a later confirm, and before no longer than it takes itself.
#[test]
fn a_large_message_that_is_never_confirmed_delays_others_once() {
    let (now, transfer) = (Instant::now(), Transfer::default());
    let mut closed = beside_others(&transfer, now);
    closed.register(None, LARGE, now);
    drop(closed);

    let mut ledger = beside_others(&transfer, now);
    let [first, second] = [(); 2].map(|()| register(&mut ledger, now));
    ticks(&mut ledger, SECONDS_MAX + LARGE_S);
    assert!(!is_due(&mut ledger, first));
    ledger.tick();
    let end = ledger.wait(first, &mut None, Waker::noop());
    let Poll::Ready(UnknownOutcome::NoConfirm(time)) = end else { panic!("{end:?}") };
    assert_eq!(time, ConfirmTime { confirm_s: SECONDS_MAX, transfer_s: LARGE_S });
    // The large message has had its time.
    ticks(&mut ledger, SECONDS_MAX + 1);
    let end = ledger.wait(second, &mut None, Waker::noop());
    let Poll::Ready(UnknownOutcome::Silent(time)) = end else { panic!("{end:?}") };
    assert_eq!(time, ConfirmTime { confirm_s: 2 * SECONDS_MAX, transfer_s: LARGE_S });

    let mut ledger = beside_others(&transfer, now);
    let third = register(&mut ledger, now);
    assert!(ledger.on_its_way().up_to_last_bytes > LARGE as u64);
    confirm(&mut ledger, third, now);
    let fourth = register(&mut ledger, now);
    assert_eq!(ledger.on_its_way().up_to_last_bytes, 1);
    ticks(&mut ledger, SECONDS_MAX + 1);
    assert!(is_due(&mut ledger, fourth));
}

/// Two queues fell silent, and then a large message is on its way.
#[test]
fn the_channel_is_silent_only_after_the_time_for_what_was_published_last() {
    let now = Instant::now();
    let mut ledger = ledger(now);
    let [first, second] = [(); 2].map(|()| register(&mut ledger, now));
    let large = ledger.register(None, LARGE, now);
    ticks(&mut ledger, SECONDS_MAX + 1);
    assert!(is_due(&mut ledger, first));
    ticks(&mut ledger, SECONDS_MAX + LARGE_S);
    assert!(
        !is_due(&mut ledger, second) && !is_due(&mut ledger, large),
        "the large message may be on its way"
    );
    ledger.tick();
    assert!(is_due(&mut ledger, second) && is_due(&mut ledger, large));
}

#[test]
fn a_later_message_of_another_channel_that_is_confirmed_shows_that_the_broker_passed_the_last_one() {
    let (now, transfer) = (Instant::now(), Transfer::default());
    let (mut ledger, mut other) = (beside_others(&transfer, now), beside_others(&transfer, now));
    let earlier = register(&mut other, now);
    register(&mut ledger, now);
    let later = register(&mut other, now);
    confirm(&mut other, earlier, now);
    assert!(!ledger.on_its_way().is_last_passed);
    confirm(&mut other, later, now);
    assert!(ledger.on_its_way().is_last_passed);
}

#[test]
fn publishes_that_nobody_waits_for_are_bounded() {
    let now = Instant::now();
    let mut ledger = ledger(now);
    let publishes: Vec<_> = (0..LATE_MAX).map(|_| register(&mut ledger, now)).collect();
    let other = register(&mut ledger, now);
    confirm(&mut ledger, other, now);
    ticks(&mut ledger, SECONDS_MAX + 2);
    let ends = publishes.into_iter().map(|sequence| ledger.wait(sequence, &mut None, Waker::noop()));
    let silent = ends.filter(|end| matches!(end, Poll::Ready(UnknownOutcome::SilentQueues(_))));
    assert_eq!(silent.count(), 1);
}
