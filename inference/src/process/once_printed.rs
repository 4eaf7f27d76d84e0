//! What a one-shot program prints to standard output: its output; or, if it writes a file, text that may say why it failed.

use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::stderr::{TAIL_BYTES, printable};

/// The most that a program may print as its output. Each running program's text is held in memory; larger output needs a file.
pub(super) const OUTPUT_BYTES_MAX: usize = 64 << 20;

/// How much of the end of other text goes before standard error, where most programs say why they fail. Dead letters cut what is before
/// their last 2 KiB.
const BESIDE_FILE_MAX: usize = 1024;

/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;

/// What a program has printed.
#[derive(Debug)]
pub(super) struct Printed<R> {
    from: R,
    /// The program writes a file, so what it prints is no output.
    has_file: bool,
    bytes: Vec<u8>,
}

/// The output has more than [`OUTPUT_BYTES_MAX`].
#[derive(Debug)]
pub(super) struct TooMuch;

impl<R: AsyncRead + Unpin> Printed<R> {
    pub(super) fn new(from: R, has_file: bool) -> Self {
        Self { from, has_file, bytes: Vec::new() }
    }

    /// Reads until no process holds the other end any more. What was read stays if this is dropped.
    pub(super) async fn read(&mut self) -> Result<(), TooMuch> {
        let mut buffer = vec![0; READ_BYTES];
        while let Ok(length @ 1..) = self.from.read(&mut buffer).await {
            self.bytes.extend_from_slice(&buffer[..length]);
            if self.has_file {
                self.bytes.drain(..self.bytes.len().saturating_sub(TAIL_BYTES));
            } else if self.bytes.len() > OUTPUT_BYTES_MAX {
                return Err(TooMuch);
            }
        }
        Ok(())
    }

    pub(super) fn into_output(self) -> Vec<u8> {
        self.bytes
    }

    /// The last of the text; nothing if it is the output.
    pub(super) fn text(&self) -> String {
        if self.has_file { printable(&self.bytes) } else { String::new() }
    }

    /// The last of the text, followed by standard error.
    pub(super) fn before(&self, stderr: String) -> String {
        let text = self.text();
        let text = text.trim_end();
        if text.is_empty() {
            return stderr;
        }
        let from = text.ceil_char_boundary(text.len().saturating_sub(BESIDE_FILE_MAX));
        let stderr = if stderr.is_empty() { stderr } else { format!("standard error:\n{stderr}") };
        format!("standard output:\n{}\n{stderr}", &text[from..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn printed(bytes: &[u8], has_file: bool) -> Printed<&[u8]> {
        let mut printed = Printed::new(bytes, has_file);
        printed.read().await.unwrap();
        printed
    }

    #[tokio::test]
    async fn the_end_of_text_beside_a_file_comes_before_standard_error() {
        let text = "\u{e4}".repeat(TAIL_BYTES) + "end\n";
        let long = printed(text.as_bytes(), true).await;
        assert!(long.text().ends_with("\u{e4}end\n") && long.text().len() <= TAIL_BYTES + 4);
        let before = long.before("why\n".to_owned());
        assert!(before.starts_with("standard output:\n\u{e4}"), "{before}");
        assert!(before.ends_with("\u{e4}end\nstandard error:\nwhy\n"), "{before}");
        assert!(before.len() <= BESIDE_FILE_MAX + 50);
        assert!(long.before(String::new()).ends_with("\u{e4}end\n"));
        assert_eq!(printed(b"\n", true).await.before("why\n".to_owned()), "why\n");
    }

    #[tokio::test]
    async fn an_output_is_no_text_about_a_failure() {
        let output = printed(&[b'x'; 3 * READ_BYTES], false).await;
        assert_eq!((output.text().as_str(), output.before("why".to_owned()).as_str()), ("", "why"));
        assert_eq!(output.into_output().len(), 3 * READ_BYTES);
        let mut endless = Printed::new(tokio::io::repeat(b'x'), false);
        assert!(endless.read().await.is_err());
    }
}
