//! Deaths and failures on demand, for tests and drills: what happens if the worker dies exactly here? Off unless
//! `worker.drill` asks for one (`VRAMQ__WORKER__DRILL`).
//!
//! `POINT=ACTION`, then, if wanted, `skip=N` (the first N times nothing happens), `times=N` (it happens N times; `crash`
//! needs only one), `job=ID` (only for that job) and `while=FILE` (a hang ends when there is no such file).

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How often a hang looks whether its file is still there.
const LOOK: Duration = Duration::from_millis(10);

/// Places in the life of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Delivered: in the event loop.
    Received,
    /// About to be read, on a thread of the pool.
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
    /// The thread that got there goes no further.
    Hang,
}

const POINTS: [(&str, Point); 13] = [
    ("received", Point::Received),
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
    hang_while: Option<PathBuf>,
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
                "`{text}` is no drill: POINT=ACTION[,skip=N][,times=N][,job=ID][,while=FILE], with a POINT of {points} and \
                 an ACTION of {actions}; `fail` only at `pass`, `hang` also at `received` and `decode`"
            )
        };
        let mut pairs = text.split(',').map(|pair| pair.split_once('=').ok_or_else(expected));
        let (point, action) = pairs.next().ok_or_else(expected)??;
        let find = POINTS.iter().find(|(name, _)| *name == point);
        let (_, point) = *find.ok_or_else(expected)?;
        let (_, action) = *ACTIONS.iter().find(|(name, _)| *name == action).ok_or_else(expected)?;
        let possible = match action {
            Action::Crash => true,
            Action::Fail => point == Point::Pass,
            Action::Hang => matches!(point, Point::Received | Point::Decode | Point::Pass),
        };
        if !possible {
            return Err(expected());
        }
        let mut drill = Self { point, action, skip: 0, times: u64::MAX, job: None, hang_while: None };
        for pair in pairs {
            match pair? {
                ("skip", n) => drill.skip = n.parse().map_err(|_| expected())?,
                ("times", n) => drill.times = n.parse().map_err(|_| expected())?,
                ("job", id) => drill.job = Some(id.to_owned()),
                ("while", file) if action == Action::Hang => drill.hang_while = Some(file.into()),
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

/// Says that a job is at a point; dies or hangs there if that is what is asked for. Of a pass it gives what to do, which is
/// for the device's thread.
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
    match drill.action {
        action if point == Point::Pass => return Some(action),
        Action::Crash => std::process::abort(),
        Action::Hang => hang(),
        Action::Fail => {}
    }
    None
}

/// For ever, or as long as the drill's file is there.
fn hang() {
    let file = DRILL.get().and_then(|(drill, _)| drill.hang_while.as_deref());
    while file.is_none_or(|file| file.exists()) {
        std::thread::sleep(LOOK);
    }
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
        Some(Action::Hang) => {
            hang();
            Ok(())
        }
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
        let drill: Drill = "received=hang,while=/tmp/a b".parse().unwrap();
        assert_eq!((drill.point, drill.hang_while), (Point::Received, Some("/tmp/a b".into())));
        for text in [
            "",
            "pass",
            "pass=explode",
            "nowhere=crash",
            "ran=hang",
            "decode=fail",
            "pass=fail,skip=x",
            "pass=fail,x=1",
            "pass=crash,while=x",
        ] {
            assert!(text.parse::<Drill>().unwrap_err().contains("POINT=ACTION"), "{text}");
        }
    }
}
