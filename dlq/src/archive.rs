//! Archives: files with one dead letter per line. A letter that was synced survives a crash.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, BufWriter, Read, Write as _};
use std::path::{Path, PathBuf};

use time::OffsetDateTime;
use time::macros::format_description;

use crate::dead_letter::DeadLetter;
use crate::error::Error;
use crate::record::{self, InvalidRecord};
use crate::text::safe;

/// The longest line that is read, and so held in memory: the largest body in base64 (RabbitMQ can be configured to accept 512 MiB), and
/// headers.
const LINE_BYTES_MAX: u64 = 700 * 1024 * 1024;

/// Of a longer line so much is read before anything else: what begins no dead letter is not read to its end, zeros excepted.
const START_BYTES: u64 = 64 * 1024;

/// A name for a new archive: the time, and a suffix for archives that begin in the same second.
pub fn file_name(suffix: &str) -> String {
    let format = format_description!("[year][month][day]T[hour][minute][second]Z");
    let now = OffsetDateTime::now_utc().format(&format).unwrap_or_default();
    format!("vramq-dropped-{now}{suffix}.jsonl")
}

/// A new file to write to.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    file: BufWriter<File>,
    /// How many were written.
    pub dead_letters: u64,
}

impl Archive {
    /// Creates the file.
    ///
    /// # Errors
    /// It exists already or cannot be created: no file is ever overwritten.
    pub fn create(path: &Path) -> Result<Self, Error> {
        let created = OpenOptions::new().write(true).create_new(true).open(path);
        let file = created
            .map_err(|error| Error::File(format!("create {}: {error}", safe(&path.to_string_lossy()))))?;
        let this = Self { path: path.to_owned(), file: BufWriter::new(file), dead_letters: 0 };
        // Sync the folder too: the file's name must survive a crash.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(|error| this.error(&error))?;
        Ok(this)
    }

    /// The file's path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a line, which is on the disk only after [`sync`](Self::sync).
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, letter: &DeadLetter) -> Result<(), Error> {
        let line = record::write(letter).map_err(|error| self.error(&error.into()))?;
        writeln!(self.file, "{line}").map_err(|error| self.error(&error))?;
        self.dead_letters += 1;
        Ok(())
    }

    /// Returns when everything written is on the disk.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn sync(&mut self) -> Result<(), Error> {
        let written = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        written.map_err(|error| self.error(&error))
    }

    /// Removes the file if it has no whole dead letter, as where the disk was full. Returns whether it did.
    pub fn remove_if_empty(mut self) -> bool {
        // Best effort: a disk that was full may still be.
        let _ = self.file.flush();
        let Self { path, file, .. } = self;
        // Without another attempt to write what is in memory.
        drop(file.into_parts());
        let mut line = Vec::new();
        let first = File::open(&path)
            .and_then(|file| BufReader::new(file).take(LINE_BYTES_MAX).read_until(b'\n', &mut line));
        first.is_ok() && !line.ends_with(b"\n") && std::fs::remove_file(&path).is_ok()
    }

    fn error(&self, error: &std::io::Error) -> Error {
        Error::writing(&self.path.to_string_lossy(), error)
    }
}

/// Reads a file or standard input.
pub struct Lines {
    name: String,
    input: BufReader<Box<dyn Read>>,
    line: u64,
    /// [`LINE_BYTES_MAX`]; less in tests.
    line_bytes_max: u64,
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("name", &self.name).field("line", &self.line).finish_non_exhaustive()
    }
}

/// The next line.
#[derive(Debug)]
pub enum Line {
    DeadLetter(Box<DeadLetter>),
    /// The incomplete last line of a file whose writer was killed, or whose machine lost power: a file system may then end the file in
    /// zeros. What was to be written there is still in the queue.
    Torn,
    End,
}

impl Lines {
    /// # Errors
    /// There is no such file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let name = safe(&path.to_string_lossy());
        let input: Box<dyn Read> = if path == Path::new("-") {
            Box::new(std::io::stdin())
        } else {
            Box::new(File::open(path).map_err(|error| Error::Usage(format!("read {name}: {error}")))?)
        };
        let input = BufReader::with_capacity(256 * 1024, input);
        Ok(Self { name, input, line: 0, line_bytes_max: LINE_BYTES_MAX })
    }

    /// Blocks while a pipe has nothing to read.
    ///
    /// # Errors
    /// A line that is not a dead letter, with its number.
    pub fn next_line(&mut self) -> Result<Line, Error> {
        loop {
            self.line += 1;
            let bytes = self.bytes()?;
            if bytes.is_empty() {
                return Ok(Line::End);
            }
            let is_whole = bytes.ends_with(b"\n");
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            let letter = std::str::from_utf8(&bytes).map_err(|error| error.to_string());
            let letter =
                letter.and_then(|line| record::read(line).map_err(|error: InvalidRecord| error.to_string()));
            return match letter {
                Ok(letter) => Ok(Line::DeadLetter(Box::new(letter))),
                Err(_) if !is_whole => Ok(Line::Torn),
                Err(problem) => Err(self.fault(&problem)),
            };
        }
    }

    /// The bytes of the next line; none at the end.
    fn bytes(&mut self) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.read_up_to(START_BYTES.min(self.line_bytes_max + 1), &mut bytes)?;
        let start = bytes.trim_ascii_start();
        if bytes.len() as u64 == START_BYTES && !bytes.ends_with(b"\n") && !start.starts_with(b"{") {
            if bytes.iter().all(|byte| *byte == 0) && self.ends_in_zeros()? {
                return Ok(bytes);
            }
            let problem =
                format!("it begins no dead letter, which is a JSON object, in its first {START_BYTES} bytes");
            return Err(self.fault(&problem));
        }
        self.read_up_to(self.line_bytes_max + 1, &mut bytes)?;
        if bytes.len() as u64 > self.line_bytes_max {
            let max = self.line_bytes_max;
            return Err(self.fault(&format!("it has more than {max} bytes; no dead letter takes as many")));
        }
        Ok(bytes)
    }

    /// Whether only zeros follow until the end, and no more of them than a line may have bytes. Reads them.
    fn ends_in_zeros(&mut self) -> Result<bool, Error> {
        let mut left = self.line_bytes_max;
        loop {
            let block = self.input.fill_buf().map_err(|error| unreadable(&self.name, &error))?;
            let bytes = block.len();
            if bytes == 0 {
                return Ok(true);
            }
            left = match left.checked_sub(bytes as u64) {
                Some(left) if block.iter().all(|byte| *byte == 0) => left,
                _ => return Ok(false),
            };
            self.input.consume(bytes);
        }
    }

    /// Reads on until the line has so many bytes, or has ended.
    fn read_up_to(&mut self, most: u64, bytes: &mut Vec<u8>) -> Result<(), Error> {
        if bytes.ends_with(b"\n") {
            return Ok(());
        }
        let more = most.saturating_sub(bytes.len() as u64);
        let read = self.input.by_ref().take(more).read_until(b'\n', bytes);
        read.map(drop).map_err(|error| unreadable(&self.name, &error))
    }

    fn fault(&self, problem: &str) -> Error {
        Error::Usage(format!("{}, line {}: {}", self.name, self.line, safe(problem)))
    }
}

fn unreadable(name: &str, error: &std::io::Error) -> Error {
    Error::Usage(format!("read {name}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letter::tests::written;
    use vramq_schemas::Reason;

    /// The letters of a file, and whether its end is torn.
    fn read(path: &Path) -> Result<(Vec<DeadLetter>, bool), Error> {
        let (mut lines, mut letters, mut is_torn) = (Lines::open(path)?, Vec::new(), false);
        loop {
            match lines.next_line()? {
                Line::DeadLetter(letter) => letters.push(*letter),
                Line::Torn => is_torn = true,
                Line::End => return Ok((letters, is_torn)),
            }
        }
    }

    #[test]
    fn complete_lines_are_read_wherever_the_file_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        let letters = ["a", "b"].map(|id| written(id, Reason::Malformed, |_| {}));
        let mut archive = Archive::create(&path).unwrap();
        letters.iter().for_each(|letter| archive.write(letter).unwrap());
        archive.sync().unwrap();
        assert_eq!(read(&path).unwrap(), (letters.to_vec(), false));
        let whole = std::fs::read(&path).unwrap();
        let second = 1 + whole.iter().position(|byte| *byte == b'\n').unwrap();
        for end in second + 1..whole.len() - 1 {
            std::fs::write(&path, &whole[..end]).unwrap();
            assert_eq!(read(&path).unwrap(), (letters[..1].to_vec(), true), "cut at {end}");
        }
        // Only the line end is missing: it is complete.
        std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(read(&path).unwrap(), (letters.to_vec(), false));
    }

    #[test]
    fn zeros_at_the_end_are_an_end_that_is_torn() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        let letter = written("a", Reason::Malformed, |_| {});
        let line = record::write(&letter).unwrap();
        // After a whole line, within one, and where only its end is missing.
        for (text, whole) in [(format!("{line}\n"), 1), (format!("{line}\n{}", &line[..20]), 1), (line, 0)] {
            for zeros in [1, 4096, START_BYTES as usize, 300_000] {
                let bytes = [text.as_bytes(), vec![0_u8; zeros].as_slice()].concat();
                std::fs::write(&path, &bytes).unwrap();
                let expected = vec![letter.clone(); whole];
                assert_eq!(
                    read(&path).unwrap(),
                    (expected, true),
                    "{zeros} zeros after {} bytes",
                    text.len()
                );
                // Zeros in the middle are a fault.
                std::fs::write(&path, [&bytes[..], text.as_bytes(), b"\n"].concat()).unwrap();
                assert!(matches!(read(&path), Err(Error::Usage(_))), "{zeros} zeros");
            }
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let refused = |input: Box<dyn Read>, line_bytes_max| {
            let input = BufReader::new(input);
            let mut lines = Lines { name: "pipe".to_owned(), input, line: 0, line_bytes_max };
            loop {
                match lines.next_line() {
                    Ok(Line::End) => return (None, lines),
                    Ok(_) => {}
                    Err(error) => return (Some(error.to_string()), lines),
                }
            }
        };
        // An object that does not end, up to the limit; and a letter that has as many bytes as the limit.
        let endless = || Box::new(b"{".chain(std::io::repeat(b'"')));
        let (error, _) = refused(endless(), 100_000);
        assert_eq!(
            error.unwrap(),
            "pipe, line 1: it has more than 100000 bytes; no dead letter takes as many"
        );
        let letter = record::write(&written("a", Reason::Malformed, |_| {})).unwrap() + "\n";
        let bytes = letter.len() as u64;
        let two = || Box::new(std::io::Cursor::new(letter.repeat(2)));
        assert_eq!(refused(two(), bytes).0, None);
        assert!(refused(two(), bytes - 1).0.unwrap().contains("line 1: it has more than"));
        // What begins no letter is refused at once: the limit is not reached.
        let (error, mut lines) =
            refused(Box::new(std::io::repeat(b'x').take(LINE_BYTES_MAX)), LINE_BYTES_MAX);
        let said = "pipe, line 1: it begins no dead letter, which is a JSON object, in its first 65536 bytes";
        assert_eq!(error.unwrap(), said);
        let left = std::io::copy(&mut lines.input, &mut std::io::sink()).unwrap();
        assert_eq!(left, LINE_BYTES_MAX - START_BYTES);
        // Zeros without end are, too.
        assert_eq!(refused(Box::new(std::io::repeat(0)), 1_000_000).0.unwrap(), said);
    }

    #[test]
    fn only_a_file_without_a_whole_dead_letter_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        for (content, is_removed) in [("", true), ("{\"vramq", true), ("{}\n", false), ("{}\n{\"vr", false)] {
            let archive = Archive::create(&path).unwrap();
            std::fs::write(&path, content).unwrap();
            assert_eq!((archive.remove_if_empty(), path.exists()), (is_removed, !is_removed), "{content}");
            let _ = std::fs::remove_file(&path);
        }
        // What is in memory is written.
        let mut archive = Archive::create(&path).unwrap();
        archive.write(&written("a", Reason::Malformed, |_| {})).unwrap();
        assert!(!archive.remove_if_empty() && read(&path).unwrap().0.len() == 1);
    }

    #[test]
    fn no_file_is_overwritten_and_a_bad_line_has_a_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        std::fs::write(&path, "\n{}\n").unwrap();
        assert!(matches!(Archive::create(&path), Err(Error::File(_))));
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("a.jsonl, line 2: missing field"), "{error}");
    }
}
