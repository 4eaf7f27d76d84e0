//! Finds the states of the model that explain what a broker has done so far. The broker may choose among several; one of the model's states
//! must match its choice.

use std::collections::{BTreeMap, HashSet};

use vramq_testkit::simulation::broker::{Broker, ChannelId, Emitted, Frame, Millis, Step};

/// With more states than this, a script is too ambiguous to be checked.
const STATES_MAX: usize = 40_000;

/// How much later than its publish a message's time to live may begin.
const CLOCK_SLACK: Millis = 100;

/// The frames that came on each channel, in order.
pub type Seen = BTreeMap<ChannelId, Vec<Frame>>;

/// A state that the broker may be in, and how many of the frames it has explained.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub broker: Broker,
    pub explained: BTreeMap<ChannelId, usize>,
}

/// Longer than a script runs. What expires later does not expire.
const FAR: Millis = 5 * 60 * 1_000;

/// Times of an exploration: of the last command; of what may have expired by now; of what must have.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    pub sent: Millis,
    pub may: Millis,
    pub must: Millis,
    /// Whether anything in the script expires while it runs.
    pub matter: bool,
}

impl Times {
    /// The times at which a step may have happened, as far as expirations depend on them. Times to live begin as early as possible.
    fn of(self, step: &Step) -> Vec<Millis> {
        match step {
            _ if !self.matter => vec![self.sent],
            Step::Expire(_) => vec![self.may],
            Step::Receive(_) | Step::Apply { .. } | Step::ApplyAck { .. } => {
                vec![self.sent.saturating_sub(CLOCK_SLACK), self.may]
            }
            _ => vec![self.sent],
        }
    }
}

#[derive(Debug, Default)]
pub struct Explored {
    /// States that explain all frames and expect no more.
    pub rest: Vec<State>,
    /// States that expect more frames.
    pub waiting: Vec<State>,
    /// States that were looked at.
    pub looked_at: usize,
    /// Whether the search was cut off because of too many states.
    pub is_cut_off: bool,
    /// Pairs of an expected frame and a different frame that came.
    pub refuted: Vec<(Frame, Frame)>,
}

/// How a step's frames compare with the frames that came.
enum Fit {
    Explains(BTreeMap<ChannelId, usize>),
    NotYet,
    Contradicts(Box<(Frame, Frame)>),
}

pub fn explore(states: Vec<State>, seen: &Seen, times: Times) -> Explored {
    let mut explored = Explored::default();
    let mut known: HashSet<State> = HashSet::new();
    let mut open = states;
    while let Some(state) = open.pop() {
        if known.contains(&state) {
            continue;
        }
        if known.len() >= STATES_MAX {
            explored.is_cut_off = true;
            break;
        }
        let all_explained = seen.iter().all(|(id, frames)| state.explained(*id) == frames.len());
        if all_explained && state.broker.steps(times.must).is_empty() {
            explored.rest.push(state.clone());
        }
        if advance(&state, seen, times, &mut open, &mut explored) {
            explored.waiting.push(state.clone());
        }
        known.insert(state);
    }
    explored.looked_at = known.len();
    explored
}

/// Adds the states after each possible step. Returns whether some step waits for frames that have not come.
fn advance(state: &State, seen: &Seen, times: Times, open: &mut Vec<State>, explored: &mut Explored) -> bool {
    let steps = state.broker.steps(times.may);
    let mut waits = false;
    let mut after = Vec::new();
    for step in &steps {
        if let Step::Confirm { channel, numbers } = step {
            match confirm(state, *channel, numbers, seen) {
                Some(Fit::NotYet) => waits = true,
                Some(Fit::Explains(explained)) => {
                    // Nothing else that can happen depends on whether this happened before.
                    let numbers = confirmed(state, *channel, numbers, seen);
                    let mut broker = state.broker.clone();
                    broker.perform(&Step::Confirm { channel: *channel, numbers }, times.sent);
                    open.push(State { broker, explained });
                    return false;
                }
                _ => {}
            }
            continue;
        }
        let mut next = Vec::new();
        for at in times.of(step) {
            let mut broker = state.broker.clone();
            let emitted = broker.perform(step, at);
            broker.round_expirations(times.sent.saturating_sub(CLOCK_SLACK), times.may + FAR);
            match fit(state, &emitted, seen) {
                Fit::Explains(explained) => next.push(State { broker, explained }),
                Fit::NotYet => waits = true,
                Fit::Contradicts(frames) => explored.refuted.push(*frames),
            }
        }
        if !next.is_empty() && commutes(step, &steps, &state.broker) {
            open.append(&mut next);
            return waits;
        }
        after.append(&mut next);
    }
    open.extend(after);
    waits
}

/// Whether this step commutes with everything else that can happen.
fn commutes(step: &Step, steps: &[Step], broker: &Broker) -> bool {
    let receives = |of: &dyn Fn(ChannelId) -> bool| {
        steps.iter().any(|other| matches!(other, Step::Receive(channel) if of(*channel)))
    };
    match step {
        // Its frame was the next one that came; numbers and settling are the channel's own.
        Step::Forward { channel, .. } => !receives(&|other| other == *channel),
        Step::Apply { channel, queue } => {
            let touches = |other: &Step| match other {
                Step::Apply { channel: from, queue: to } => from != channel && to == queue,
                Step::ApplyAck { queue: to, .. } | Step::ApplyDead { queue: to, .. } => to == queue,
                Step::Expire(of) | Step::DeadLetter(of) => of == queue,
                _ => false,
            };
            let others = steps.iter().any(touches) || !broker.is_only_sender(*channel, queue);
            // An ack that is read first may overtake it.
            !others && !broker.is_sent_an_ack(*channel) && !receives(&|other| other != *channel)
        }
        Step::Receive(channel) if broker.only_hands_on(*channel) => true,
        Step::Receive(channel) => {
            let others = steps.iter().any(|other| match other {
                Step::Forward { channel: to, .. } => to == channel,
                // A queue's answer may come before the channel's next command, and change what it does.
                Step::Apply { .. }
                | Step::ApplyAck { .. }
                | Step::ApplyDead { .. }
                | Step::Expire(_)
                | Step::DeadLetter(_) => true,
                _ => false,
            });
            !others && !receives(&|other| other != *channel)
        }
        _ => false,
    }
}

impl State {
    fn explained(&self, channel: ChannelId) -> usize {
        self.explained.get(&channel).copied().unwrap_or(0)
    }

    fn next<'a>(&self, channel: ChannelId, seen: &'a Seen) -> Option<&'a Frame> {
        seen.get(&channel).and_then(|frames| frames.get(self.explained(channel)))
    }
}

fn fit(state: &State, emitted: &[Emitted], seen: &Seen) -> Fit {
    let mut explained = state.explained.clone();
    for emitted in emitted {
        let Some(channel) = emitted.channel else { continue };
        let at = explained.entry(channel).or_default();
        match seen.get(&channel).and_then(|frames| frames.get(*at)) {
            None => return Fit::NotYet,
            Some(frame) if *frame == emitted.frame => *at += 1,
            Some(frame) => return Fit::Contradicts(Box::new((emitted.frame.clone(), frame.clone()))),
        }
    }
    Fit::Explains(explained)
}

/// The publishes that the next frame of a channel confirms or refuses.
fn confirmed(state: &State, channel: ChannelId, numbers: &[u64], seen: &Seen) -> Vec<u64> {
    match state.next(channel, seen) {
        Some(Frame::Ack { tag, multiple } | Frame::Nack { tag, multiple }) => {
            numbers.iter().copied().filter(|number| number == tag || (*multiple && number < tag)).collect()
        }
        _ => Vec::new(),
    }
}

/// The broker may combine confirms into frames as it likes, but their content must match.
fn confirm(state: &State, channel: ChannelId, numbers: &[u64], seen: &Seen) -> Option<Fit> {
    let Some(frame) = state.next(channel, seen) else { return Some(Fit::NotYet) };
    let (tag, multiple, accepts) = match frame {
        Frame::Ack { tag, multiple } => (*tag, *multiple, true),
        Frame::Nack { tag, multiple } => (*tag, *multiple, false),
        _ => return None,
    };
    let numbers = confirmed(state, channel, numbers, seen);
    let open = state.broker.unanswered(channel).iter().any(|number| *number <= tag);
    if !numbers.contains(&tag) || (multiple && open) {
        return None;
    }
    let frames = state.broker.clone().perform(&Step::Confirm { channel, numbers }, 0);
    let agrees = |emitted: &Emitted| match emitted.frame {
        Frame::Ack { .. } => accepts,
        Frame::Nack { .. } => !accepts,
        _ => false,
    };
    frames.iter().all(agrees).then(|| {
        let mut explained = state.explained.clone();
        *explained.entry(channel).or_default() += 1;
        Fit::Explains(explained)
    })
}
