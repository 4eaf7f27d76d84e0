//! One warm process: loaded once (`load.rs`), then pass after pass.

mod load;
mod packed;

use std::path::Path;

use futures_util::FutureExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::OwnedWriteHalf;
use tokio::time::{Duration, Instant, sleep_until, timeout};

use super::accepts::Accepts;
use super::aside::{Aside, tidy};
use super::child::Child;
use super::frame::Frame;
use super::frames::{Frames, LAST_WORD, NoFrame, name, next};
use super::oom::{MemoryVerdict, judge};
use super::pass::{Cancellation, Events, PassEnd, PassRequest, Stop};
use super::protocol::{FailureKind, FromModel, ToModel};
use super::scratch;
use super::steps::Steps;
use super::transcript::{End, Step};
pub use load::LoadError;
use packed::Packed;

/// How long an idle process may take to answer a ping: its pages may be swapped out, or the machine under load.
const PONG_LIMIT: Duration = Duration::from_secs(20);

/// The least size of a process's files that may explain a full disk, if it is unknown how much was missing.
const IN_THE_WAY_MIN: u64 = 16 << 20;

/// A loaded process.
#[derive(Debug)]
pub struct Warm {
    child: Child,
    socket: OwnedWriteHalf,
    frames: Frames,
    ready: Ready,
    /// Where its files are written.
    aside: Aside,
    pings: u64,
    /// It was killed, and does not end.
    is_stuck: bool,
    /// How long its model took to load.
    load_took: Duration,
    /// Passes that it ran.
    pub passes: u64,
    /// How much it had printed when the last of them began.
    printed_before: u64,
}

/// What a process says of itself when it is loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub weights: u64,
    pub accepts: Accepts,
    pub revision: Option<String>,
}

impl Warm {
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    pub fn keeper_pid(&self) -> i32 {
        self.child.keeper_pid()
    }

    pub fn stderr_tail(&self) -> String {
        self.child.stderr_tail()
    }

    /// The end of what it has printed since the last pass began. Earlier text may be about items of other callers, and this text
    /// goes into replies.
    async fn printed(&mut self) -> String {
        self.child.stderr_since(self.printed_before).await
    }

    /// Runs one pass. Whether the process can go on is [`is_alive`](Self::is_alive).
    pub async fn run(
        &mut self,
        number: u64,
        request: PassRequest,
        limits: &PassLimits,
        events: &Events,
        cancellation: &mut Cancellation,
    ) -> PassEnd {
        self.passes += 1;
        let (scratch, items) = (self.child.scratch().to_owned(), request.items.len());
        let packed = Packed::of(number, request, limits, &scratch, &self.aside, cancellation).await;
        let Packed { frame, files } = match packed {
            Ok(packed) => packed,
            Err(end) => return end,
        };
        self.printed_before = self.child.stderr_mark();
        let pass = Pass { number, items, scratch: &scratch, limits, events };
        let end = self.run_frame(frame, pass, cancellation).await;
        self.frames.pass_ended(number);
        files.remove().await;
        end
    }

    async fn run_frame(
        &mut self,
        mut bytes: Vec<u8>,
        pass: Pass<'_>,
        cancellation: &mut Cancellation,
    ) -> PassEnd {
        let mut steps = Steps::new(pass.number, pass.items, pass.scratch.to_owned());
        // Before the first output the limit is that of the whole pass. After each output it is that of the next one.
        let whole = Instant::now() + pass.limits.soft(pass.items);
        let (mut soft, mut limit) = (whole, pass.limits.soft(pass.items));
        let mut hard = None;
        let mut stop = None;
        let mut written = 0;
        let mut asked = false;
        loop {
            // A program reads `cancel` only after all of the pass.
            if stop.is_some() && !asked && written == bytes.len() {
                asked = true;
                self.send(ToModel::Cancel { pass: pass.number }).await;
            }
            tokio::select! {
                // Limits come first, so that they also apply to a program that never stops sending.
                biased;
                () = sleep_until(hard.unwrap_or(soft)), if hard.is_some() => return self.killed(stop, limit, pass.limits).await,
                why = cancellation.wait(), if stop.is_none() => {
                    stop = Some(why);
                    let load_took = if cancellation.is_abandoned() { Duration::ZERO } else { self.load_took };
                    hard = Some(pass.limits.end_of_cancelled(Instant::now(), soft, load_took));
                }
                () = sleep_until(soft), if stop.is_none() => {
                    stop = Some(Stop::TimedOut);
                    hard = Some(Instant::now() + pass.limits.kill);
                }
                step = steps.next(next(&mut self.frames, &mut self.child)) => match step {
                    Ok(step @ (Step::Output { .. } | Step::Ignored)) => {
                        if let Step::Output { item, output } = step {
                            pass.events.output(item, output);
                        }
                        let next = Instant::now() + pass.limits.item;
                        (soft, limit) = if next < whole { (next, pass.limits.item) } else { (whole, pass.limits.soft(pass.items)) };
                    }
                    Ok(Step::Progress { item, fraction, note }) => {
                        pass.events.progress(item, fraction, note, pass.items - steps.finished());
                    }
                    Ok(Step::End(end)) => return self.ended(end, stop, limit, pass.limits).await,
                    Err(no_frame) => return self.failed(no_frame, &pass).await,
                },
                result = self.socket.write(&bytes[written..]), if written < bytes.len() => {
                    // An error: the program closed its end. A frame, or its death, says why.
                    written += result.unwrap_or(bytes.len() - written);
                    if written == bytes.len() {
                        // The pass may be long.
                        (bytes, written) = (Vec::new(), 0);
                    }
                }
            }
        }
    }

    /// The program did not end the pass within its limit.
    async fn killed(&mut self, stop: Option<Stop>, limit: Duration, limits: &PassLimits) -> PassEnd {
        self.end_within_limits(limits).await;
        match stop {
            Some(Stop::Cancelled) => PassEnd::Cancelled { killed: true },
            _ => PassEnd::TimedOut { limit, killed: true, stderr: self.printed().await },
        }
    }

    /// Ends the process. The pass ends even if a process was killed and does not end: jobs and permit must not wait for a driver.
    /// The slot waits.
    async fn end_within_limits(&mut self, limits: &PassLimits) {
        self.is_stuck = !self.child.end_within_limits(limits.kill, &limits.model).await;
    }

    /// The model ended the pass by itself.
    async fn ended(&mut self, end: End, stop: Option<Stop>, limit: Duration, limits: &PassLimits) -> PassEnd {
        match (end, stop) {
            (End::Done { peak }, _) => PassEnd::Done { peak },
            (End::OutOfMemory { item, report }, _) => {
                let (report, stderr) = (Box::new(report), self.printed().await);
                PassEnd::OutOfMemory { item, report, stderr, by_text: false }
            }
            (End::Failed { kind: FailureKind::Cancelled, .. }, Some(Stop::Cancelled)) => {
                PassEnd::Cancelled { killed: false }
            }
            (End::Failed { kind: FailureKind::Cancelled, .. }, Some(Stop::TimedOut)) => {
                PassEnd::TimedOut { limit, killed: false, stderr: self.printed().await }
            }
            (End::Failed { kind, item, detail }, _) => {
                // The program reports that its process is unusable.
                if kind == FailureKind::Device {
                    self.end_within_limits(limits).await;
                }
                PassEnd::Failed { kind, item, detail, stderr: self.printed().await }
            }
            (End::DiskFull { detail }, _) => PassEnd::disk_full(&detail, self.child.scratch()),
        }
    }

    /// The process died, or broke the protocol.
    async fn failed(&mut self, no_frame: NoFrame, pass: &Pass<'_>) -> PassEnd {
        self.end_within_limits(pass.limits).await;
        let stderr = self.printed().await;
        match no_frame {
            // A library may have ended the process before the program could report an out-of-memory.
            NoFrame::Died(death) => match judge(death, &stderr) {
                MemoryVerdict::Device(report) => {
                    PassEnd::OutOfMemory { item: None, report, stderr, by_text: true }
                }
                MemoryVerdict::Host | MemoryVerdict::Other => PassEnd::Crashed { death, stderr },
            },
            NoFrame::Fault(fault) => PassEnd::Protocol { fault, stderr },
        }
    }

    /// Whether its successor may have the room on the disk that a pass had not, because the files in its own scratch folder take as much, or
    /// because the folder is gone, or does not answer: a disk that hangs keeps the successor from being loaded. Where it is not known how much
    /// was `asked` for, they are in the way if they take more than is free.
    pub fn is_in_the_way(&self, asked: Option<u64>) -> impl Future<Output = bool> + use<> {
        let folder = self.child.scratch().to_owned();
        async move {
            // A program may have many files.
            let looked = tidy(move || {
                let least = if asked.is_some() { 1 } else { IN_THE_WAY_MIN };
                let bytes = asked.or_else(|| scratch::free(&folder)).unwrap_or(0);
                scratch::is_to_be_replaced(&folder, bytes.max(least))
            });
            looked.await.unwrap_or(true)
        }
    }

    /// Whether it can run another pass.
    pub fn is_alive(&self) -> bool {
        self.child.death().is_none() && !self.is_stuck
    }

    /// Waits until an idle process dies, or sends a frame unasked. Cancel-safe.
    pub async fn misbehaved(&mut self) -> String {
        match next(&mut self.frames, &mut self.child).await {
            Ok(frame) => format!("{} while no pass ran", name(&frame.message)),
            Err(NoFrame::Died(death)) => format!("the program {death}"),
            Err(NoFrame::Fault(fault)) => fault,
        }
    }

    /// What an idle process has done by now that it should not: it died, or sent a frame unasked. Waits only to learn of a death that shows
    /// already.
    pub async fn misbehaved_by_now(&mut self) -> Option<String> {
        let seen = self.misbehaved().now_or_never();
        // Its keeper may not have said yet how it died.
        if seen.is_none() && (self.frames.are_over() || self.child.death().is_some()) {
            return Some(self.misbehaved().await);
        }
        seen
    }

    /// Asks an idle process whether it is there.
    ///
    /// # Errors
    /// Says what it did instead of answering.
    pub async fn ping(&mut self) -> Result<Option<u64>, String> {
        self.pings += 1;
        let number = self.pings;
        let answer = async {
            self.send(ToModel::Ping { number }).await;
            next(&mut self.frames, &mut self.child).await
        };
        match timeout(PONG_LIMIT, answer).await {
            Err(_) => Err(format!("no answer to a ping within {} s", PONG_LIMIT.as_secs())),
            Ok(Ok(Frame { message: FromModel::Pong { number: answered, reserved }, .. }))
                if answered == number =>
            {
                Ok(reserved)
            }
            Ok(Ok(frame)) => Err(format!("{} instead of the answer to a ping", name(&frame.message))),
            Ok(Err(NoFrame::Died(death))) => Err(format!("the program {death}")),
            Ok(Err(NoFrame::Fault(fault))) => Err(fault),
        }
    }

    /// Asks it to give cached memory back.
    pub async fn trim(&mut self) {
        self.send(ToModel::Trim).await;
    }

    /// Ends it: asked by a message, by SIGTERM, by SIGKILL. Returns when nothing is left of it.
    pub async fn end(&mut self, kill: Duration, model: &str) {
        if self.is_alive() {
            self.send(ToModel::Shutdown).await;
            if timeout(kill, self.child.died()).await.is_ok() {
                self.child.all_gone(model).await;
                return;
            }
        }
        self.child.end(kill, model).await;
    }

    /// Ends it without asking.
    pub async fn end_now(&mut self, kill: Duration, model: &str) {
        self.child.end(kill, model).await;
    }

    /// Sends a message that is small, or that nothing else happens beside.
    async fn send(&mut self, message: ToModel) {
        if let Ok(bytes) = Frame::from(message).encode() {
            // Does not block for long, because the socket's buffer has room for hundreds of these. `Err` means that the process is
            // gone, which its death reports.
            let _ = timeout(LAST_WORD, self.socket.write_all(&bytes)).await;
        }
    }

    async fn next(&mut self) -> Result<Frame<FromModel>, NoFrame> {
        next(&mut self.frames, &mut self.child).await
    }
}

/// How long things may take.
#[derive(Clone, Debug)]
pub struct PassLimits {
    pub model: String,
    pub item: Duration,
    pub kill: Duration,
}

impl PassLimits {
    /// The time limit of a pass whose items may run one after the other. Once outputs come one by one, each has its own limit.
    fn soft(&self, items: usize) -> Duration {
        self.item.saturating_mul(items.try_into().unwrap_or(u32::MAX))
    }

    /// When to end the process of a pass that was cancelled `now`. The next process loads the model again, so ending this one must
    /// not cost more than it saves. A cancelled pass gets no longer than another one, whose own time ends at `soft`.
    fn end_of_cancelled(&self, now: Instant, soft: Instant, load_took: Duration) -> Instant {
        (now + self.kill.max(load_took)).min(soft.max(now) + self.kill)
    }
}

/// What the loop of a pass needs besides the process.
struct Pass<'a> {
    number: u64,
    items: usize,
    scratch: &'a Path,
    limits: &'a PassLimits,
    events: &'a Events,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancelled_pass_has_the_time_of_a_load_but_no_more_than_its_own() {
        let limits = PassLimits {
            model: "m".to_owned(),
            item: Duration::from_secs(600),
            kill: Duration::from_secs(10),
        };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        // Cancelled after 50 seconds. Until when its own time lasts, how long the load took, and when its process is ended.
        for (soft, load, end) in [
            (600, 3, 60),
            (600, 120, 170),
            (100, 120, 110),
            // Its own time ends now.
            (50, 120, 60),
            (40, 120, 60),
            (40, 0, 60),
        ] {
            let ends = limits.end_of_cancelled(at(50), at(soft), Duration::from_secs(load));
            assert_eq!(ends - start, Duration::from_secs(end), "{soft} {load}");
        }
    }
}
