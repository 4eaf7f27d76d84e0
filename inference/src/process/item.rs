//! One input of a pass, and how it travels to the model.

use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use vramq_schemas::Input;

use super::frame::BLOBS_BYTES_MAX;
use super::media;
use super::protocol::{ItemHeader, ItemKind};

/// Larger items use a file, because a frame is copied several times.
const INLINE_BYTES_MAX: usize = 4 << 20;

/// One input.
pub use crate::engine::ProgramInput as Item;

impl Item {
    /// Bytes with their media type, if their first bytes show it.
    pub fn bytes(bytes: Vec<u8>) -> Self {
        Self::Bytes { media_type: media::media_type(&bytes).map(str::to_owned), bytes }
    }

    pub fn kind(&self) -> ItemKind {
        match self {
            Self::Text(_) => ItemKind::Text,
            Self::Bytes { .. } => ItemKind::Bytes,
            Self::Json(_) => ItemKind::Json,
            Self::Uri(_) => ItemKind::Uri,
        }
    }

    /// Bytes of its payload.
    pub fn size(&self) -> u64 {
        let size = match self {
            Self::Text(text) | Self::Uri(text) => text.len(),
            Self::Bytes { bytes, .. } => bytes.len(),
            Self::Json(value) => value.as_str().len(),
        };
        size as u64
    }

    /// The payload as the protocol has it.
    pub fn payload(&self) -> Vec<u8> {
        match self {
            Self::Text(text) | Self::Uri(text) => text.clone().into_bytes(),
            Self::Bytes { bytes, .. } => bytes.clone(),
            Self::Json(value) => value.as_str().into(),
        }
    }
}

impl From<Input> for Item {
    fn from(input: Input) -> Self {
        match input {
            Input::Text(text) => Self::Text(text),
            Input::Bytes(bytes) => Self::bytes(bytes),
            Input::Uri(uri) => Self::Uri(uri),
            Input::Json(value) => Self::Json(value),
        }
    }
}

/// Headers and payloads of a pass's items. Those that are too large for its frame are written to files in the scratch folder; the
/// program, or the end of the pass, removes them.
///
/// # Errors
/// A file cannot be written: the disk is full.
pub fn pack(pass: u64, items: &[Item], scratch: &Path) -> io::Result<(Vec<ItemHeader>, Vec<Vec<u8>>)> {
    let mut inline = 0;
    let mut packed = (Vec::with_capacity(items.len()), Vec::with_capacity(items.len()));
    for (index, item) in items.iter().enumerate() {
        let payload = item.payload();
        let media_type = match item {
            Item::Bytes { media_type, .. } => media_type.clone(),
            _ => None,
        };
        let mut header = ItemHeader { kind: item.kind(), media_type, file: None };
        if payload.len() > INLINE_BYTES_MAX || inline + payload.len() > BLOBS_BYTES_MAX {
            let name = file_name(pass, index);
            write_new(&scratch.join(&name), &payload)?;
            header.file = Some(name);
            packed.1.push(Vec::new());
        } else {
            inline += payload.len();
            packed.1.push(payload);
        }
        packed.0.push(header);
    }
    Ok(packed)
}

/// Removes the files that [`pack`] made.
pub fn unpack(pass: u64, items: usize, scratch: &Path) {
    for index in 0..items {
        // Most items had none.
        let _ = std::fs::remove_file(scratch.join(file_name(pass, index)));
    }
}

fn file_name(pass: u64, index: usize) -> String {
    format!("input-{pass}-{index}")
}

/// Programs may write to this folder, so a link that one put there must not be followed.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::io::Write as _;
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(path)?.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_items_go_by_a_file() {
        let scratch = tempfile::tempdir().unwrap();
        let small = Item::Text("small".to_owned());
        let large =
            Item::Bytes { media_type: Some("image/png".to_owned()), bytes: vec![7; INLINE_BYTES_MAX + 1] };
        let (headers, blobs) = pack(3, &[small, large], scratch.path()).unwrap();
        assert_eq!(headers[0].file, None);
        assert_eq!(blobs[0], b"small");
        assert_eq!(headers[1].file.as_deref(), Some("input-3-1"));
        assert_eq!(headers[1].media_type.as_deref(), Some("image/png"));
        assert!(blobs[1].is_empty());
        let file = scratch.path().join("input-3-1");
        assert_eq!(std::fs::metadata(&file).unwrap().len() as usize, INLINE_BYTES_MAX + 1);
        unpack(3, 2, scratch.path());
        assert!(!file.exists());
    }

    #[test]
    fn a_link_in_the_scratch_folder_leads_nowhere() {
        let scratch = tempfile::tempdir().unwrap();
        let victim = scratch.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, scratch.path().join("input-1-0")).unwrap();
        let large = Item::Bytes { media_type: None, bytes: vec![7; INLINE_BYTES_MAX + 1] };
        assert!(pack(1, &[large], scratch.path()).is_err());
        assert_eq!(std::fs::read_to_string(victim).unwrap(), "precious");
    }

    #[test]
    fn many_middling_items_fill_a_frame_and_no_more() {
        let scratch = tempfile::tempdir().unwrap();
        let items = vec![Item::Bytes { media_type: None, bytes: vec![0; INLINE_BYTES_MAX] }; 17];
        let (headers, blobs) = pack(1, &items, scratch.path()).unwrap();
        assert_eq!(blobs.iter().map(Vec::len).sum::<usize>(), BLOBS_BYTES_MAX);
        assert_eq!(headers.iter().filter(|header| header.file.is_some()).count(), 1);
    }
}
