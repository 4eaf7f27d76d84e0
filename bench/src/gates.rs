//! How many times as fast as others the encoder has to be on a CPU with AMX, and whether it was.

use std::fmt;

use crate::engines::{OURS, OURS_BF16, OURS_F32, REFERENCE};

/// A ratio of two rates.
#[derive(Clone, Copy, Debug)]
struct Gate {
    ours: &'static str,
    times: f64,
    theirs: &'static str,
}

const fn gate(ours: &'static str, times: f64, theirs: &'static str) -> Gate {
    Gate { ours, times, theirs }
}

/// Set where split bf16 was tried in a copy of the encoder: somewhat less than what was measured there.
const GATES: [Gate; 6] = [
    gate(OURS, 2.2, OURS_F32),
    gate(OURS, 3.5, REFERENCE),
    gate(OURS, 1.1, "openvino-bf16"),
    gate(OURS_BF16, 3.8, OURS_F32),
    gate(OURS_BF16, 1.8, "openvino-bf16"),
    gate(OURS_BF16, 2.1, "sentence-transformers-bf16"),
];

/// What became of a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    Reached(f64),
    Missed(f64),
    /// The machine has no AMX, or this engine was left out.
    NotRun(&'static str),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reached(times) => write!(f, "reached, {times:.2} times"),
            Self::Missed(times) => write!(f, "missed, {times:.2} times"),
            Self::NotRun(why) => write!(f, "not run: no {why}"),
        }
    }
}

/// A line for each gate. `rate` gives an engine's sentences per second, if it ran.
pub fn lines(has_amx: bool, rate: impl Fn(&str) -> Option<f64>) -> Vec<String> {
    let line = |gate: &Gate| {
        let Gate { ours, times, theirs } = gate;
        format!("  gate of AMX, {ours} {times} times {theirs}: {}", verdict(gate, has_amx, &rate))
    };
    GATES.iter().map(line).collect()
}

fn verdict(gate: &Gate, has_amx: bool, rate: impl Fn(&str) -> Option<f64>) -> Verdict {
    if !has_amx {
        return Verdict::NotRun("AMX");
    }
    let Some(ours) = rate(gate.ours) else { return Verdict::NotRun(gate.ours) };
    let Some(theirs) = rate(gate.theirs) else { return Verdict::NotRun(gate.theirs) };
    let times = ours / theirs;
    if times >= gate.times { Verdict::Reached(times) } else { Verdict::Missed(times) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_is_reached_missed_or_not_run() {
        let gate = gate(OURS, 2.0, REFERENCE);
        let ours_is = |times: f64| move |engine: &str| Some(if engine == OURS { times } else { 1.0 });
        assert_eq!(verdict(&gate, true, ours_is(2.0)), Verdict::Reached(2.0));
        assert_eq!(verdict(&gate, true, ours_is(1.5)), Verdict::Missed(1.5));
        assert_eq!(verdict(&gate, false, ours_is(2.0)), Verdict::NotRun("AMX"));
        let without_peer = |engine: &str| (engine == OURS).then_some(1.0);
        assert_eq!(verdict(&gate, true, without_peer), Verdict::NotRun(REFERENCE));
        assert_eq!(
            lines(false, without_peer)[0],
            "  gate of AMX, vramq 2.2 times vramq-f32: not run: no AMX"
        );
    }
}
