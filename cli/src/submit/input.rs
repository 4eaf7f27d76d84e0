//! Reads texts or JSON values from arguments, standard input and files, as they are needed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal as _, Read as _};
use std::path::Path;

use serde_json::Value;
use vramq_schemas::{BODY_BYTES_MAX, Input, JsonText};

use crate::exit;

/// The longest line, in bytes. A job with this line and the lines before it fits a body, even if JSON takes six bytes for each byte.
const LINE_BYTES_MAX: usize = BODY_BYTES_MAX / 16;

/// One item.
#[derive(Debug, PartialEq)]
pub(super) struct Item {
    pub(super) input: Input,
    /// The id in the input; copied to the output.
    pub(super) id: Option<Value>,
}

impl Item {
    fn of_text(text: String) -> Self {
        Self { input: Input::Text(text), id: None }
    }

    fn of_json(text: &str) -> Result<Self, String> {
        let value = JsonText::parse(text).map_err(|error| not_json(&error))?;
        Ok(Self { input: Input::Json(value), id: None })
    }

    /// The text, or the JSON value's.
    pub(super) fn text(&self) -> &str {
        match &self.input {
            Input::Text(text) => text,
            Input::Json(value) => value.as_str(),
            // The command reads neither.
            Input::Bytes(_) | Input::Uri(_) => "",
        }
    }
}

/// Why the input cannot be read, and where.
#[derive(Debug, thiserror::Error)]
pub(super) enum InputError {
    #[error("read {name}: {error}")]
    Io { name: String, error: io::Error },
    #[error("argument {argument}: {problem}")]
    Argument { argument: usize, problem: String },
    #[error("{name}, line {line}: {problem}")]
    Line { name: String, line: usize, problem: String },
    /// The thread that reads has ended before the input has.
    #[error("reading the input ended early, by a fault of this program: please report it")]
    EndedEarly,
}

impl InputError {
    /// The exit code of the command.
    pub(super) fn code(&self) -> u8 {
        match self {
            Self::Io { .. } | Self::Argument { .. } | Self::Line { .. } => exit::USAGE,
            Self::EndedEarly => exit::FAILED,
        }
    }
}

/// What the input has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Texts; in a .jsonl file an object's text is in this field.
    Texts { field: String },
    /// JSON values, one in each argument or line.
    Json,
}

/// Where items come from.
pub(super) enum Source {
    Arguments { left: std::iter::Enumerate<std::vec::IntoIter<String>>, is_json: bool },
    Lines(Lines),
}

pub(super) struct Lines {
    name: String,
    reader: Box<dyn BufRead + Send>,
    line: usize,
    content: LineContent,
}

/// What a line is.
enum LineContent {
    Text,
    Json,
    /// A JSON string, or an object with the text in this field.
    TextOrObject {
        field: String,
    },
}

impl Source {
    /// Opens the input that the arguments name. `None`: they name none, and standard input is a terminal.
    pub(super) fn open(
        texts: Vec<String>,
        file: Option<&Path>,
        kind: Kind,
    ) -> Result<Option<Self>, InputError> {
        let is_json = kind == Kind::Json;
        let lines = if is_json { LineContent::Json } else { LineContent::Text };
        let stdin_named = texts.iter().map(String::as_str).eq(["-"]) || file == Some(Path::new("-"));
        if let (Some(path), false) = (file, stdin_named) {
            let name = path.display().to_string();
            let opened = File::open(path).and_then(|file| match file.metadata()?.is_dir() {
                true => Err(io::Error::other("it is a folder")),
                false => Ok(file),
            });
            let file = opened.map_err(|error| InputError::Io { name: name.clone(), error })?;
            let is_jsonl = path
                .extension()
                .is_some_and(|e| e.eq_ignore_ascii_case("jsonl") || e.eq_ignore_ascii_case("ndjson"));
            let content = match kind {
                Kind::Texts { field } if is_jsonl => LineContent::TextOrObject { field },
                Kind::Texts { .. } | Kind::Json => lines,
            };
            return Ok(Some(Self::lines(name, Box::new(BufReader::new(file)), content)));
        }
        if !texts.is_empty() && !stdin_named {
            return Ok(Some(Self::Arguments { left: texts.into_iter().enumerate(), is_json }));
        }
        if !stdin_named && io::stdin().is_terminal() {
            return Ok(None);
        }
        let reader = Box::new(BufReader::new(io::stdin()));
        Ok(Some(Self::lines("standard input".to_owned(), reader, lines)))
    }

    fn lines(name: String, reader: Box<dyn BufRead + Send>, content: LineContent) -> Self {
        Self::Lines(Lines { name, reader, line: 0, content })
    }

    /// The number of items, if it is cheap to find out.
    pub(super) fn total(&self, file: Option<&Path>) -> Option<u64> {
        match self {
            Self::Arguments { left, .. } => Some(left.len() as u64),
            Self::Lines(_) => file.and_then(count_lines),
        }
    }
}

impl Iterator for Source {
    type Item = Result<Item, InputError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Arguments { left, is_json } => left.next().map(|(at, text)| {
                if !*is_json {
                    return Ok(Item::of_text(text));
                }
                Item::of_json(&text).map_err(|problem| InputError::Argument { argument: at + 1, problem })
            }),
            Self::Lines(lines) => lines.next().transpose(),
        }
    }
}

impl Lines {
    fn next(&mut self) -> Result<Option<Item>, InputError> {
        loop {
            let mut line = Vec::new();
            let limit = LINE_BYTES_MAX as u64 + 2;
            let read = (&mut self.reader).take(limit).read_until(b'\n', &mut line);
            let read = read.map_err(|error| InputError::Io { name: self.name.clone(), error })?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            if line.last() == Some(&b'\n') {
                line.pop();
                if line.last() == Some(&b'\r') {
                    line.pop();
                }
            }
            if line.len() > LINE_BYTES_MAX {
                return Err(self.fault(format!(
                    "longer than {LINE_BYTES_MAX} bytes, the most for a line: split it, or submit it by a client library, which takes jobs of \
                     {BODY_BYTES_MAX} bytes, or references to stored bytes"
                )));
            }
            let text = String::from_utf8(line).map_err(|_| self.fault("not UTF-8".to_owned()))?;
            let item = match &self.content {
                LineContent::Text => return Ok(Some(Item::of_text(text))),
                _ if text.trim().is_empty() => continue,
                LineContent::Json => Item::of_json(&text),
                LineContent::TextOrObject { field } => item(&text, field),
            };
            return item.map(Some).map_err(|problem| self.fault(problem));
        }
    }

    fn fault(&self, problem: String) -> InputError {
        InputError::Line { name: self.name.clone(), line: self.line, problem }
    }
}

/// A line of JSON: a text, or an object with the text in `field`.
fn item(line: &str, field: &str) -> Result<Item, String> {
    match serde_json::from_str(line).map_err(|error| not_json(&error))? {
        Value::String(text) => Ok(Item::of_text(text)),
        Value::Object(mut object) => match object.remove(field) {
            Some(Value::String(text)) => Ok(Item { input: Input::Text(text), id: object.remove("id") }),
            Some(_) => Err(format!("its `{field}` is not a text")),
            None => Err(format!("it has no `{field}`; `--field` names another")),
        },
        _ => Err("neither a text nor an object".to_owned()),
    }
}

/// Cuts the parser's position off its message: it would always say line 1, and the message already names the line of the input.
fn not_json(error: &impl ToString) -> String {
    format!("not JSON: {}", error.to_string().replace(" at line 1 column ", " at column "))
}

/// Lines of a regular file; some GB/s, so it costs little beside the work.
fn count_lines(path: &Path) -> Option<u64> {
    let file = File::open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut reader = BufReader::with_capacity(256 * 1024, file);
    let (mut lines, mut last) = (0, b'\n');
    loop {
        let bytes = reader.fill_buf().ok()?;
        let Some(end) = bytes.last() else {
            return Some(lines + u64::from(last != b'\n'));
        };
        last = *end;
        lines += bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
        let read = bytes.len();
        reader.consume(read);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], field: Option<&str>) -> Result<Vec<Item>, InputError> {
        let content = match field {
            Some(field) => LineContent::TextOrObject { field: field.to_owned() },
            None => LineContent::Text,
        };
        read_as(bytes, content)
    }

    fn read_as(bytes: &[u8], content: LineContent) -> Result<Vec<Item>, InputError> {
        Source::lines("x".to_owned(), Box::new(io::Cursor::new(bytes.to_vec())), content).collect()
    }

    fn texts(bytes: &[u8], field: Option<&str>) -> Vec<String> {
        read(bytes, field).unwrap().into_iter().map(|item| item.text().to_owned()).collect()
    }

    #[test]
    fn a_line_is_a_text() {
        assert_eq!(texts(b"a\nb\r\n\n c \nd", None), ["a", "b", "", " c ", "d"]);
        assert_eq!(texts(b"", None), Vec::<String>::new());
        assert_eq!(texts(b"\n", None), [""]);
    }

    #[test]
    fn lines_of_json() {
        let items = read(
            br#""a"
{"text": "b", "id": 7, "more": []}

{"id": {"x": "y"}, "text": ""}"#,
            Some("text"),
        )
        .unwrap();
        let item = |text: &str, id: Option<Value>| Item { input: Input::Text(text.to_owned()), id };
        assert_eq!(
            items,
            [item("a", None), item("b", Some(7.into())), item("", Some(serde_json::json!({"x": "y"}))),]
        );
        assert_eq!(texts(br#"{"body": "c"}"#, Some("body")), ["c"]);
    }

    #[test]
    fn json_values_from_lines_and_arguments() {
        let items = read_as(b"{\"a\": [1]}\n\n 2 \r\nnull", LineContent::Json).unwrap();
        let inputs: Vec<_> = items.into_iter().map(|item| item.input).collect();
        let json = |text: &str| Input::Json(JsonText::parse(text).unwrap());
        assert_eq!(inputs, [json("{\"a\": [1]}"), json("2"), json("null")]);
        let fault = read_as(b"1\n{", LineContent::Json).unwrap_err().to_string();
        assert!(fault.contains("line 2: not JSON"), "{fault}");
        let arguments = ["[]", "no"].map(str::to_owned).to_vec();
        let source = Source::open(arguments, None, Kind::Json).unwrap().unwrap();
        let fault = source.collect::<Result<Vec<_>, _>>().unwrap_err().to_string();
        assert!(fault.contains("argument 2: not JSON"), "{fault}");
    }

    #[test]
    fn faults_name_their_line() {
        for (bytes, field, line) in [
            (&b"a\n\xff\n"[..], None, "line 2: not UTF-8"),
            (b"\"a\"\n{", Some("text"), "line 2: not JSON"),
            (b"\"a\"\n{x", Some("text"), "key must be a string at column 2"),
            (b"{\"x\": 1}", Some("text"), "line 1: it has no `text`"),
            (b"{\"text\": 1}", Some("text"), "line 1: its `text` is not a text"),
            (b"[]", Some("text"), "line 1: neither a text nor an object"),
        ] {
            let fault = read(bytes, field).unwrap_err().to_string();
            assert!(fault.contains(line), "{fault}");
        }
        let long = "x".repeat(LINE_BYTES_MAX + 1);
        assert!(read(long.as_bytes(), None).is_err());
        assert_eq!(texts(&long.as_bytes()[1..], None).len(), 1);
    }
}
