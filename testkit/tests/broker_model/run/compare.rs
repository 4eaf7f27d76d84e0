//! Whether the model explains what a broker did: its frames, and the counts of its queues.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use vramq_testkit::simulation::broker::{Command, Frame, Name};

use super::{Open, Run};
use crate::accept::{self, Explored, State, Times};
use crate::client::Seen;
use crate::pool::{Pooled, TooOpen};
use crate::words;

/// How long a broker may take for what the model predicts.
pub const PATIENCE: Duration = Duration::from_secs(15);
/// How long to wait for a matching count before asking again. A state that waits for something else might otherwise explain an answer that
/// came too early.
const COUNT_PATIENCE: Duration = Duration::from_secs(1);
/// Between two looks at a queue's counts.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

impl Run<'_> {
    /// Waits until some state explains all frames and expects no more.
    pub(super) fn settle(&mut self) -> Result<()> {
        self.settle_within(PATIENCE)
    }

    fn settle_within(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            while let Ok(seen) = self.pool.frames.try_recv() {
                self.see(seen)?;
            }
            let states = std::mem::take(&mut self.states);
            let before = states.first().cloned();
            let mut explored = self.explore(states);
            if explored.is_cut_off {
                bail!(TooOpen);
            }
            if !explored.rest.is_empty() {
                self.states = explored.rest;
                // The broker may be slower than its counts.
                self.states.append(&mut explored.waiting);
                return Ok(());
            }
            if explored.waiting.is_empty() {
                let expected: Vec<String> = explored
                    .refuted
                    .iter()
                    .map(|(model, real)| format!("{}\n  broker: {}", words::frame(model), words::frame(real)))
                    .collect();
                let left = before.map(|state| self.unexplained(&state)).unwrap_or_default();
                bail!(
                    "the model does not explain what the broker did.\n  model:  {}\n{left}",
                    expected.join("\n  model:  ")
                );
            }
            self.states = explored.waiting;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.pool.frames.recv_timeout(left) {
                Ok(seen) => self.see(seen)?,
                Err(_) => {
                    let state = &self.states[0];
                    bail!(
                        "the broker does not do what the model expects: {:?}",
                        state.broker.steps(self.must)
                    )
                }
            }
        }
    }

    fn unexplained(&self, state: &State) -> String {
        let mut text = String::new();
        for (id, frames) in &self.seen {
            let explained = state.explained.get(id).copied().unwrap_or(0);
            for frame in frames.iter().skip(explained) {
                let _ = writeln!(text, "  came on {}: {}", id.0, words::frame(frame));
            }
        }
        text
    }

    fn explore(&mut self, states: Vec<State>) -> Explored {
        // Two milliseconds, because the clocks of broker and model may be in different ticks.
        let may = self.now() + 2;
        let times = Times { sent: self.sent, may, must: self.must, matter: self.expires };
        let explored = accept::explore(states, &self.seen, times);
        self.ran.states += explored.looked_at;
        explored
    }

    fn see(&mut self, (client, number, frame): Seen) -> Result<()> {
        let is_ours = |pooled: &Pooled| pooled.number == client;
        let is_closed = matches!(frame, Frame::ConnectionClosed { .. });
        ensure!(
            !is_closed || !self.pool.clients.iter().flatten().any(is_ours),
            "the broker closed a connection: {frame:?}"
        );
        // Frames of lost connections still arrive, and are ignored.
        let Some(id) = self.ids.get(&(client, number)) else { return Ok(()) };
        let frames = self.seen.entry(*id).or_default();
        // Brokers continue to deliver until the client confirms that its channel is closed; clients ignore these deliveries.
        if matches!(frames.last(), Some(Frame::Closed { .. })) {
            return Ok(());
        }
        if let Some(open) = self.channels.iter().flatten().find(|open| open.id == *id) {
            if matches!(frame, Frame::Closed { .. }) {
                self.pool.client(open.client)?.client.agree_to_close(number)?;
            }
            self.ran.frames += 1;
            self.log.push(format!("  {:>5} ms  {} -> {}", self.now(), id.0, words::frame(&frame)));
            self.seen.entry(*id).or_default().push(frame);
        }
        Ok(())
    }

    /// Asks for the counts of all queues on a channel until some state has the same. What the channel did before has
    /// then reached the queues.
    pub(super) fn compare_counts(&mut self, open: Open) -> Result<()> {
        for queue in self.queues.clone() {
            if self.broker().queue(&queue).is_none() {
                continue;
            }
            self.compare_count(open, &queue)?;
        }
        Ok(())
    }

    fn compare_count(&mut self, open: Open, queue: &Name) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let logged = self.log.len();
        loop {
            let before = self.states.clone();
            let seen = self.seen.get(&open.id).map_or(0, Vec::len);
            self.send(open, &Command::Count { queue: queue.clone() })?;
            let is_answer = |frame: &Frame| matches!(frame, Frame::DeclareOk { .. });
            let mut settled = self.settle_within(COUNT_PATIENCE);
            while settled.is_err()
                && Instant::now() < deadline
                && !self.states.is_empty()
                && !self.seen.get(&open.id).is_some_and(|frames| frames.iter().skip(seen).any(is_answer))
            {
                settled = self.settle_within(COUNT_PATIENCE);
            }
            let error = match settled {
                Ok(()) => {
                    self.log.truncate(logged);
                    return Ok(());
                }
                Err(error) if error.is::<TooOpen>() => return Err(error),
                Err(error) => error,
            };
            // The answer may have come too early. Removes it and asks once more.
            let frames = self.seen.entry(open.id).or_default();
            let last = frames.iter().rposition(is_answer);
            match last {
                Some(at) if at >= seen && Instant::now() < deadline => frames.remove(at),
                _ => return Err(error).with_context(|| format!("the counts of {queue} differ")),
            };
            self.log.truncate(logged);
            self.states = before;
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}
