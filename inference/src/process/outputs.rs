//! Checks the outputs that a program sends, and turns them into typed outputs.

use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use half::f16;
use vramq_schemas::{Dtype, Embedding, Output, Values};

use super::large_integers::first_beyond_64_bits;
use super::protocol::{OutputHeader, OutputKind};

/// The largest output that comes by a file: a minute of video, and little enough to hold in memory while it is published.
pub const FILE_BYTES_MAX: u64 = 512 << 20;

/// The most bytes of a pass's outputs together: two of the largest. They are held in memory until the pass ends, as those of other
/// passes are.
const PASS_BYTES_MAX: u64 = 2 * FILE_BYTES_MAX;

/// The longest media type, with its parameters. The SDK has the same limit.
const MEDIA_TYPE_BYTES_MAX: usize = 1024;

/// The longest JSON output: parsed it can take a hundred times as much.
const JSON_BYTES_MAX: usize = 8 << 20;

/// Digits of a number that an error shows.
const NUMBER_SHOWN: usize = 40;

/// The outputs of one pass, which have a limit together.
#[derive(Clone, Debug)]
pub struct PassOutputs {
    /// Bytes that are left for those to come.
    left: u64,
}

impl Default for PassOutputs {
    fn default() -> Self {
        Self { left: PASS_BYTES_MAX }
    }
}

impl PassOutputs {
    /// Makes the next output from its header and payload. Reads and removes the file, if the payload is in one.
    ///
    /// # Errors
    /// The fault, in words for the author of the model.
    pub fn read(
        &mut self,
        header: &OutputHeader,
        mut blobs: Vec<Vec<u8>>,
        scratch: &Path,
    ) -> Result<Output, String> {
        let payload = match (&header.file, blobs.len()) {
            (Some(name), 0) => read_file(name, scratch, self.left.min(FILE_BYTES_MAX))
                .map_err(|what| self.with_limit(what))?,
            (None, 1) => blobs.remove(0),
            (_, count) => return Err(format!("an output with {count} blobs; it has one, or a file")),
        };
        let bytes = payload.len() as u64;
        if bytes > self.left {
            return Err(self.with_limit(format!("an output of {bytes} bytes")));
        }
        self.left -= bytes;
        typed(header, payload)
    }

    /// Adds the limit of the pass to `what`, if that is the smaller limit.
    fn with_limit(&self, what: String) -> String {
        let left = self.left;
        if left >= FILE_BYTES_MAX {
            return what;
        }
        format!(
            "{what}; of the {PASS_BYTES_MAX} bytes that the outputs of a pass may have together, {left} are left"
        )
    }
}

fn typed(header: &OutputHeader, payload: Vec<u8>) -> Result<Output, String> {
    match header.kind {
        OutputKind::Embedding => embedding(header.dtype.unwrap_or(Dtype::F32), &payload),
        OutputKind::Json if payload.len() > JSON_BYTES_MAX => Err(format!(
            "JSON of {} bytes; the limit is {JSON_BYTES_MAX}, larger results go as bytes",
            payload.len()
        )),
        OutputKind::Json => json(&payload),
        OutputKind::Bytes => {
            let media_type =
                header.media_type.clone().unwrap_or_else(|| "application/octet-stream".to_owned());
            if media_type.len() > MEDIA_TYPE_BYTES_MAX {
                let size = media_type.len();
                return Err(format!("a media type of {size} bytes; the limit is {MEDIA_TYPE_BYTES_MAX}"));
            }
            // It becomes a header of HTTP where the output is stored or downloaded.
            if let Some(odd) = media_type.chars().find(|char| !matches!(char, ' '..='~')) {
                return Err(format!("a media type with {odd:?}; only printable ASCII is allowed"));
            }
            Ok(Output::Bytes { media_type, bytes: payload })
        }
        OutputKind::Uri => String::from_utf8(payload)
            .map(Output::Uri)
            .map_err(|_| "a reference that is not UTF-8 text".to_owned()),
    }
}

fn json(payload: &[u8]) -> Result<Output, String> {
    let value =
        serde_json::from_slice(payload).map_err(|error| format!("an output that is not JSON: {error}"))?;
    // What was parsed is UTF-8.
    match str::from_utf8(payload).ok().and_then(first_beyond_64_bits) {
        Some(number) => {
            let shown = &number[..number.len().min(NUMBER_SHOWN)];
            Err(format!("an output with an integer beyond 64 bits, {shown}: send it as text"))
        }
        None => Ok(Output::Json(value)),
    }
}

fn embedding(dtype: Dtype, bytes: &[u8]) -> Result<Output, String> {
    let size = match dtype {
        Dtype::F32 => 4,
        Dtype::F16 => 2,
    };
    if bytes.is_empty() || !bytes.len().is_multiple_of(size) {
        return Err(format!("an embedding of {} bytes; each element has {size}", bytes.len()));
    }
    let values = match dtype {
        // Chunks of exactly four and two bytes.
        Dtype::F32 => {
            Values::F32(bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
        }
        Dtype::F16 => Values::F16(bytes.chunks_exact(2).map(|c| f16::from_le_bytes([c[0], c[1]])).collect()),
    };
    match values.first_not_finite() {
        Some(element) => Err(format!("element {element} of the embedding is not finite")),
        None => Ok(Output::Embedding(Embedding { values, base64: false })),
    }
}

/// A file of so many bytes at most.
fn read_file(name: &str, scratch: &Path, most: u64) -> Result<Vec<u8>, String> {
    if name.is_empty() || name.contains(['/', '\0']) || matches!(name, "." | "..") {
        return Err(format!("{name:?} is not the name of a file in the scratch folder"));
    }
    let path = scratch.join(name);
    let failed = |error| format!("read the file {name:?}: {error}");
    // No link out of the folder is followed, and a pipe is not waited for.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(&path)
        .map_err(failed)?;
    let bytes = read_regular(&file, most).map_err(|error| format!("the file {name:?}: {error}"));
    let _ = std::fs::remove_file(path);
    bytes
}

fn read_regular(file: &File, most: u64) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| error.to_string();
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err("is not a regular file".to_owned());
    }
    let mut bytes = Vec::new();
    // A file that is too large is not read. Of one that still grows, one byte too many is read.
    if metadata.len() <= most {
        file.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    }
    if metadata.len().max(bytes.len() as u64) > most {
        return Err(format!("is larger than {most} bytes"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: OutputKind, dtype: Option<Dtype>) -> OutputHeader {
        OutputHeader { kind, dtype, media_type: None, file: None }
    }

    fn of(kind: OutputKind, dtype: Option<Dtype>, payload: &[u8]) -> Result<Output, String> {
        PassOutputs::default().read(&header(kind, dtype), vec![payload.to_vec()], Path::new("/nowhere"))
    }

    #[test]
    fn each_kind_is_read() {
        let vector = |values| Output::Embedding(Embedding { values, base64: false });
        let f32s = [1.5f32, -2.0].map(f32::to_le_bytes).concat();
        assert_eq!(of(OutputKind::Embedding, None, &f32s), Ok(vector(Values::F32(vec![1.5, -2.0]))));
        let f16s = f16::from_f32(1.5).to_le_bytes();
        assert_eq!(
            of(OutputKind::Embedding, Some(Dtype::F16), &f16s),
            Ok(vector(Values::F16(vec![f16::from_f32(1.5)])))
        );
        assert_eq!(of(OutputKind::Json, None, b"[1]"), Ok(Output::Json(serde_json::json!([1]))));
        assert_eq!(of(OutputKind::Uri, None, b"s3://b/k"), Ok(Output::Uri("s3://b/k".to_owned())));
        let bytes = Output::Bytes { media_type: "application/octet-stream".to_owned(), bytes: b"x".to_vec() };
        assert_eq!(of(OutputKind::Bytes, None, b"x"), Ok(bytes));
    }

    #[test]
    fn an_invalid_output_is_reported_with_its_fault() {
        let nan = f32::NAN.to_le_bytes();
        for (kind, dtype, payload, what) in [
            (OutputKind::Embedding, None, &b"abc"[..], "3 bytes"),
            (OutputKind::Embedding, None, b"", "0 bytes"),
            (OutputKind::Embedding, None, &nan, "element 0 of the embedding is not finite"),
            (OutputKind::Json, None, b"{", "not JSON"),
            (
                OutputKind::Json,
                None,
                b"[12345678901234567890123]",
                "beyond 64 bits, 12345678901234567890123:",
            ),
            (OutputKind::Uri, None, b"\xff", "not UTF-8"),
        ] {
            let error = of(kind, dtype, payload).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
        let media_type = Some("x".repeat(MEDIA_TYPE_BYTES_MAX + 1));
        let long = OutputHeader { media_type, ..header(OutputKind::Bytes, None) };
        let error = PassOutputs::default().read(&long, vec![Vec::new()], Path::new("/nowhere")).unwrap_err();
        assert_eq!(error, "a media type of 1025 bytes; the limit is 1024");
        for odd in ["text/plain\r\nX-Evil: 1", "text/ä", "a\0"] {
            let odd = OutputHeader { media_type: Some(odd.to_owned()), ..header(OutputKind::Bytes, None) };
            let error =
                PassOutputs::default().read(&odd, vec![Vec::new()], Path::new("/nowhere")).unwrap_err();
            assert!(error.contains("only printable ASCII is allowed"), "{error}");
        }
        let header = header(OutputKind::Json, None);
        let none = PassOutputs::default().read(&header, Vec::new(), Path::new("/nowhere"));
        assert!(none.unwrap_err().contains("0 blobs"));
    }

    #[test]
    fn the_outputs_of_a_pass_have_a_limit_together() {
        let scratch = tempfile::tempdir().unwrap();
        let mut outputs = PassOutputs { left: 10 };
        let mut read = |payload: Option<&str>| {
            let file = payload.is_none().then(|| "result".to_owned());
            let header = OutputHeader { file, ..header(OutputKind::Bytes, None) };
            let blobs = payload.map(|payload| payload.as_bytes().to_vec());
            outputs.read(&header, blobs.into_iter().collect(), scratch.path())
        };
        read(Some("seven..")).unwrap();
        let error = read(Some("four")).unwrap_err();
        assert_eq!(
            error,
            "an output of 4 bytes; of the 1073741824 bytes that the outputs of a pass may have together, 3 are left"
        );
        std::fs::write(scratch.path().join("result"), "four").unwrap();
        let error = read(None).unwrap_err();
        assert!(error.contains("is larger than 3 bytes; of the 1073741824"), "{error}");
        std::fs::write(scratch.path().join("result"), "333").unwrap();
        read(None).unwrap();
        assert!(read(Some("")).is_ok() && read(Some("1")).is_err());
    }

    #[test]
    fn files_come_from_the_scratch_folder_alone() {
        let scratch = tempfile::tempdir().unwrap();
        let outside = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(scratch.path().join("good"), "7").unwrap();
        std::os::unix::fs::symlink(outside.path(), scratch.path().join("link")).unwrap();
        std::fs::create_dir(scratch.path().join("folder")).unwrap();
        let pipe = std::ffi::CString::new(scratch.path().join("pipe").to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string that lives through the call.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        let read_name = |name: &str| {
            let header = OutputHeader { file: Some(name.to_owned()), ..header(OutputKind::Json, None) };
            PassOutputs::default().read(&header, Vec::new(), scratch.path())
        };
        assert_eq!(read_name("good"), Ok(Output::Json(serde_json::json!(7))));
        assert!(!scratch.path().join("good").exists());
        // A hole, which takes no room on the disk.
        File::create(scratch.path().join("large")).unwrap().set_len(FILE_BYTES_MAX + 1).unwrap();
        assert!(read_name("large").unwrap_err().contains("is larger than"));
        assert!(!scratch.path().join("large").exists());
        let absolute = outside.path().to_str().unwrap();
        for name in ["link", "folder", "pipe", "..", ".", "", "../x", absolute, "missing"] {
            assert!(read_name(name).is_err(), "{name}");
        }
        assert!(outside.path().exists());
    }
}
