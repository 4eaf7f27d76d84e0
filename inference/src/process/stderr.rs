//! Reads what a program prints: each line goes to the log, and the last lines are kept for dead letters.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::unix::pipe;
use tokio::task::coop::consume_budget;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Duration, Instant};

/// How much of the end of a program's output is kept: enough for a long traceback. Dead letters take less of it.
pub const TAIL_BYTES: usize = 8 * 1024;

/// The longest line in the log; what is longer is cut.
const LINE_BYTES_MAX: usize = 2 * 1024;

/// Lines per second that go to the log. If a program prints more, the others are left out; the last lines are kept in any case.
const LINES_PER_SECOND_MAX: u32 = 50;

/// Reads all that a program prints, so that the program never has to wait.
#[derive(Debug)]
pub struct Stderr {
    pipe: Arc<pipe::Receiver>,
    tail: Arc<Mutex<Tail>>,
    reader: JoinHandle<()>,
}

/// The last bytes that were printed, and how many there were in all.
#[derive(Debug, Default)]
struct Tail {
    last: VecDeque<u8>,
    all: u64,
}

impl Tail {
    fn add(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(TAIL_BYTES)..];
        let excess = (self.last.len() + kept.len()).saturating_sub(TAIL_BYTES);
        self.last.drain(..excess);
        self.last.extend(kept);
        self.all += bytes.len() as u64;
    }

    fn since(&self, mark: u64) -> Vec<u8> {
        let count = usize::try_from(self.all.saturating_sub(mark)).unwrap_or(usize::MAX);
        self.last.iter().copied().skip(self.last.len().saturating_sub(count)).collect()
    }
}

impl Stderr {
    /// Must be called within a runtime.
    pub fn read(from: pipe::Receiver, model: String) -> Self {
        let (pipe, tail) = (Arc::new(from), Arc::default());
        let reader = tokio::spawn(read_all(Arc::clone(&pipe), Arc::clone(&tail), model));
        Self { pipe, tail, reader }
    }

    /// The last that was printed, as text without control characters.
    pub fn tail(&self) -> String {
        self.tail_since(0)
    }

    /// How many bytes were printed until now, including those not read yet: a mark for [`tail_since`](Self::tail_since).
    pub fn mark(&self) -> u64 {
        // The lock keeps the reader out, so that no byte is counted twice or left out.
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        // `Err` means that the pipe does not tell; pipes of Linux do.
        tail.all + rustix::io::ioctl_fionread(&*self.pipe).unwrap_or(0)
    }

    /// The last that was printed after a mark.
    pub fn tail_since(&self, mark: u64) -> String {
        let bytes = self.tail.lock().unwrap_or_else(PoisonError::into_inner).since(mark);
        // Skips the rest of a character that the start of the tail has cut.
        let start = bytes.iter().position(|byte| byte & 0xC0 != 0x80).unwrap_or(0);
        printable(&bytes[start..])
    }

    /// Waits until all that was printed until now is read, for `limit` at most. A program may print before it sends a frame, and
    /// that text may be read after the frame.
    pub async fn caught_up(&mut self, limit: Duration) {
        let mark = self.mark();
        let caught_up = async {
            while self.tail.lock().unwrap_or_else(PoisonError::into_inner).all < mark {
                yield_now().await;
            }
        };
        let _ = tokio::time::timeout(limit, caught_up).await;
    }

    /// Waits until all is read, for so long at most.
    pub async fn drained(&mut self, limit: Duration) {
        let _ = tokio::time::timeout(limit, &mut self.reader).await;
    }
}

impl Drop for Stderr {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

async fn read_all(from: Arc<pipe::Receiver>, tail: Arc<Mutex<Tail>>, model: String) {
    let mut buffer = vec![0; 16 * 1024];
    let mut log = Log { model, line: Vec::new(), second: Instant::now(), lines: 0, unlogged: 0 };
    while from.readable().await.is_ok() {
        match read_some(&from, &tail, &mut buffer) {
            Ok(0) => break,
            Ok(length) => log.take(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => break,
        }
        // Lets other tasks run if a program never stops printing.
        consume_budget().await;
    }
    log.end_line();
    log.tell_unlogged();
}

/// Moves what is in the pipe to the tail, under the lock, so that [`Stderr::mark`] sees it in one of them.
fn read_some(from: &pipe::Receiver, tail: &Mutex<Tail>, buffer: &mut [u8]) -> io::Result<usize> {
    let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
    let length = from.try_read(buffer)?;
    tail.add(&buffer[..length]);
    Ok(length)
}

/// Makes lines of what comes in pieces.
struct Log {
    model: String,
    line: Vec<u8>,
    second: Instant,
    /// Lines logged in this second.
    lines: u32,
    /// Lines left out and not told of.
    unlogged: u64,
}

impl Log {
    fn take(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            let room = LINE_BYTES_MAX - self.line.len();
            self.line.extend(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") || piece.ends_with(b"\r") {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        let text = printable(&self.line);
        self.line.clear();
        let text = text.trim_end();
        if text.is_empty() {
            return;
        }
        if self.second.elapsed() >= Duration::from_secs(1) {
            self.tell_unlogged();
            (self.second, self.lines) = (Instant::now(), 0);
        }
        self.lines += 1;
        if self.lines > LINES_PER_SECOND_MAX {
            self.unlogged += 1;
        } else {
            tracing::info!(model = self.model, line = text, "model output");
        }
    }

    /// Says how many lines were left out since this was last said, if any.
    fn tell_unlogged(&mut self) {
        let lines = std::mem::take(&mut self.unlogged);
        if lines > 0 {
            tracing::info!(model = self.model, lines, "left out lines that the model printed");
        }
    }
}

/// Text that is safe on a terminal: tabs and line ends stay, other control characters go.
pub fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::fd::OwnedFd;

    async fn tail_of(write: impl FnOnce(&mut io::PipeWriter) + Send + 'static) -> String {
        let (reader, mut writer) = io::pipe().unwrap();
        let receiver = pipe::Receiver::from_owned_fd(OwnedFd::from(reader)).unwrap();
        let mut stderr = Stderr::read(receiver, "m".to_owned());
        std::thread::spawn(move || write(&mut writer));
        stderr.drained(Duration::from_secs(60)).await;
        stderr.tail()
    }

    #[tokio::test]
    async fn megabytes_leave_a_bounded_tail() {
        let tail = tail_of(|pipe| {
            for number in 0..400_000 {
                writeln!(pipe, "line {number}").unwrap();
            }
        })
        .await;
        assert!(tail.len() <= TAIL_BYTES);
        assert!(tail.ends_with("line 399998\nline 399999\n"));
    }

    /// A program prints most when it fails, and nothing after that.
    #[test]
    fn the_log_says_how_many_of_the_last_lines_were_left_out() {
        let written = tempfile::NamedTempFile::new().unwrap();
        let to = tracing_subscriber::fmt().with_ansi(false).with_writer(written.reopen().unwrap()).finish();
        // No second ends within the test.
        let second = Instant::now() + Duration::from_secs(3600);
        let mut log = Log { model: "m".to_owned(), line: Vec::new(), second, lines: 0, unlogged: 0 };
        tracing::subscriber::with_default(to, || {
            (0..LINES_PER_SECOND_MAX + 7).for_each(|_| log.take(b"a line\n"));
            log.tell_unlogged();
            log.tell_unlogged();
        });
        let written = std::fs::read_to_string(written.path()).unwrap();
        assert_eq!(written.matches("a line").count(), LINES_PER_SECOND_MAX as usize, "{written}");
        assert_eq!(written.matches("left out lines").count(), 1, "{written}");
        assert!(written.trim_end().ends_with("lines=7"), "{written}");
    }

    #[tokio::test]
    async fn the_log_misses_no_line_of_a_program_that_has_ended() {
        let (reader, mut writer) = io::pipe().unwrap();
        let lines = LINES_PER_SECOND_MAX as usize + 7;
        writer.write_all("a line\n".repeat(lines).as_bytes()).unwrap();
        drop(writer);
        let written = tempfile::NamedTempFile::new().unwrap();
        let to = tracing_subscriber::fmt().with_ansi(false).with_writer(written.reopen().unwrap()).finish();
        let _logging = tracing::subscriber::set_default(to);
        let receiver = Arc::new(pipe::Receiver::from_owned_fd(OwnedFd::from(reader)).unwrap());
        read_all(receiver, Arc::default(), "m".to_owned()).await;
        let written = std::fs::read_to_string(written.path()).unwrap();
        let told = written.split("lines=").skip(1);
        let left_out: usize =
            told.filter_map(|rest| rest.split_whitespace().next()?.parse::<usize>().ok()).sum();
        // A second may end within the test, and then more lines are logged.
        assert_eq!(written.matches("a line").count() + left_out, lines, "{written}");
    }

    #[tokio::test]
    async fn one_endless_line_is_cut_and_control_characters_go() {
        let tail = tail_of(|pipe| {
            pipe.write_all(&vec![b'x'; 3 << 20]).unwrap();
            pipe.write_all("\x1b[31m\u{e4}\u{7}\tend\n".as_bytes()).unwrap();
        })
        .await;
        assert!(tail.len() <= TAIL_BYTES);
        assert!(tail.ends_with("x[31m\u{e4}\tend\n"), "{}", &tail[tail.len() - 20..]);
    }

    #[tokio::test]
    async fn output_after_a_mark_is_distinguished() {
        let (reader, mut writer) = io::pipe().unwrap();
        let receiver = pipe::Receiver::from_owned_fd(OwnedFd::from(reader)).unwrap();
        let mut stderr = Stderr::read(receiver, "m".to_owned());
        writer.write_all(b"before\n").unwrap();
        // The task that reads has not run yet: the test has one thread.
        let mark = stderr.mark();
        assert_eq!((mark, stderr.tail().as_str()), (7, ""));
        stderr.caught_up(Duration::from_secs(60)).await;
        assert_eq!(stderr.tail(), "before\n");
        assert_eq!((stderr.mark(), stderr.tail_since(mark).as_str()), (7, ""));
        writer.write_all(b"after\n").unwrap();
        drop(writer);
        stderr.drained(Duration::from_secs(60)).await;
        assert_eq!(
            (stderr.tail_since(mark).as_str(), stderr.tail().as_str()),
            ("after\n", "before\nafter\n")
        );
        // More than is kept.
        let long = tail_of(|pipe| pipe.write_all(&vec![b'x'; 3 * TAIL_BYTES]).unwrap()).await;
        assert_eq!(long.len(), TAIL_BYTES);
    }

    #[tokio::test]
    async fn a_character_that_is_cut_at_the_start_is_left_out() {
        let tail = tail_of(|pipe| pipe.write_all("\u{e4}".repeat(TAIL_BYTES).as_bytes()).unwrap()).await;
        assert!(tail.chars().all(|c| c == '\u{e4}'));
    }
}
