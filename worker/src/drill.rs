//! Deaths and failures on demand, for tests and drills: what happens if the worker dies exactly here? Off unless
//! `worker.drill` asks for one (`VRAMQ__WORKER__DRILL`).
//!
//! `POINT=ACTION`, then, if wanted, `skip=N` (the first N times nothing happens), `times=N` (it happens N times; `crash`
//! needs only one) and `job=ID` (only for that job).

use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Places in the life of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Delivered, not yet read.
    Decode,
    /// On the device.
    Pass,
    /// All outputs are there, nothing is sent.
    Ran,
    /// Given to the broker, without a confirm.
    SentPart,
    SentReply,
    SentJob,
    SentLetter,
    /// Confirmed, and nothing after it done.
    ConfirmedPart,
    ConfirmedReply,
    ConfirmedJob,
    ConfirmedLetter,
    /// The job is acknowledged.
    Acked,
}

/// What happens there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The process dies at once.
    Crash,
    /// The pass fails, as if the engine had.
    Fail,
    /// The pass never ends.
    Hang,
}

const POINTS: [(&str, Point); 12] = [
    ("decode", Point::Decode),
    ("pass", Point::Pass),
    ("ran", Point::Ran),
    ("sent-part", Point::SentPart),
    ("sent-reply", Point::SentReply),
    ("sent-job", Point::SentJob),
    ("sent-letter", Point::SentLetter),
    ("confirmed-part", Point::ConfirmedPart),
    ("confirmed-reply", Point::ConfirmedReply),
    ("confirmed-job", Point::ConfirmedJob),
    ("confirmed-letter", Point::ConfirmedLetter),
    ("acked", Point::Acked),
];

const ACTIONS: [(&str, Action); 3] =
    [("crash", Action::Crash), ("fail", Action::Fail), ("hang", Action::Hang)];

/// What is to happen where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drill {
    point: Point,
    action: Action,
    skip: u64,
    times: u64,
    job: Option<String>,
}

/// Set once, at start.
static DRILL: OnceLock<(Drill, AtomicU64)> = OnceLock::new();

impl FromStr for Drill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = |names: &[&str]| names.join(", ");
        let expected = || {
            let points = named(&POINTS.map(|(name, _)| name));
            let actions = named(&ACTIONS.map(|(name, _)| name));
            format!(
                "`{text}` is no drill: POINT=ACTION[,skip=N][,times=N][,job=ID], with a POINT of {points} and an ACTION \
                 of {actions}; `fail` and `hang` only at `pass`"
            )
        };
        let mut pairs = text.split(',').map(|pair| pair.split_once('=').ok_or_else(expected));
        let (point, action) = pairs.next().ok_or_else(expected)??;
        let find = POINTS.iter().find(|(name, _)| *name == point);
        let (_, point) = *find.ok_or_else(expected)?;
        let (_, action) = *ACTIONS.iter().find(|(name, _)| *name == action).ok_or_else(expected)?;
        if action != Action::Crash && point != Point::Pass {
            return Err(expected());
        }
        let mut drill = Self { point, action, skip: 0, times: u64::MAX, job: None };
        for pair in pairs {
            match pair? {
                ("skip", n) => drill.skip = n.parse().map_err(|_| expected())?,
                ("times", n) => drill.times = n.parse().map_err(|_| expected())?,
                ("job", id) => drill.job = Some(id.to_owned()),
                _ => return Err(expected()),
            }
        }
        Ok(drill)
    }
}

impl Drill {
    /// Takes effect from here on. Only the first one does.
    pub fn start(self) {
        tracing::warn!(drill = ?self, "a drill is on, as the configuration asks");
        let _ = DRILL.set((self, AtomicU64::new(0)));
    }

    fn covers(&self, nth: u64) -> bool {
        (self.skip..self.skip.saturating_add(self.times)).contains(&nth)
    }
}

/// Says that a job is at a point; dies if that is what is asked for. Gives what else is.
pub fn reach<'a>(point: Point, jobs: impl IntoIterator<Item = Option<&'a str>>) -> Option<Action> {
    let (drill, reached) = DRILL.get()?;
    if drill.point != point
        || !drill.job.as_deref().is_none_or(|id| jobs.into_iter().any(|job| job == Some(id)))
    {
        return None;
    }
    if !drill.covers(reached.fetch_add(1, Ordering::Relaxed)) {
        return None;
    }
    if drill.action == Action::Crash && point != Point::Pass {
        std::process::abort();
    }
    Some(drill.action)
}

/// Does on the device's thread what [`reach`] gave for a pass.
///
/// # Errors
/// The pass is to fail.
pub fn act(action: Option<Action>) -> Result<(), String> {
    match action {
        None => Ok(()),
        Some(Action::Fail) => Err("made to fail by a drill".to_owned()),
        Some(Action::Crash) => std::process::abort(),
        Some(Action::Hang) => loop {
            std::thread::park();
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drills_are_read_and_everything_else_is_refused() {
        let drill: Drill = "confirmed-part=crash,skip=2,times=3,job=a".parse().unwrap();
        assert_eq!((drill.point, drill.action), (Point::ConfirmedPart, Action::Crash));
        assert_eq!(drill.job.as_deref(), Some("a"));
        assert_eq!((0..8).filter(|nth| drill.covers(*nth)).collect::<Vec<_>>(), [2, 3, 4]);
        let drill: Drill = "pass=fail".parse().unwrap();
        assert!(drill.covers(0) && drill.covers(u64::MAX - 1));
        for text in
            ["", "pass", "pass=explode", "nowhere=crash", "ran=hang", "pass=fail,skip=x", "pass=fail,x=1"]
        {
            assert!(text.parse::<Drill>().unwrap_err().contains("POINT=ACTION"), "{text}");
        }
    }
}
