//! Frames: a u32 length (little endian), a JSON header of that length, and the raw blobs that the header's `blobs` lists.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::protocol::PASS_ITEMS_MAX;

/// The longest JSON header. The largest is that of `run`: 4,096 items at some 100 bytes, and parameters of 64 KiB.
pub const HEADER_BYTES_MAX: usize = 1 << 20;

/// The most bytes of all blobs of a frame: four times the largest job body, and little enough to hold a few in memory. What is
/// larger goes by a file in the scratch folder.
pub const BLOBS_BYTES_MAX: usize = 64 << 20;

/// A message and its payloads.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame<M> {
    pub message: M,
    pub blobs: Vec<Vec<u8>>,
}

impl<M> From<M> for Frame<M> {
    fn from(message: M) -> Self {
        Self { message, blobs: Vec::new() }
    }
}

/// Why bytes are no frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("the connection ended")]
    Ended,
    #[error("the connection ended in the middle of a frame")]
    Torn,
    #[error("a header of {0} bytes; the limit is {HEADER_BYTES_MAX}")]
    HeaderSize(usize),
    #[error("{0} blobs; the limit is {PASS_ITEMS_MAX}")]
    BlobCount(usize),
    #[error("blobs of {0} bytes together; the limit is {BLOBS_BYTES_MAX}, larger values go by a file")]
    BlobSize(u64),
    #[error("a header that is not a known message: {0}")]
    Header(#[from] serde_json::Error),
    #[error(transparent)]
    Io(std::io::Error),
}

#[derive(Serialize, Deserialize)]
struct Header<M> {
    #[serde(flatten)]
    message: M,
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    blobs: Vec<u32>,
}

impl<M: Serialize> Frame<M> {
    /// The frame's bytes.
    ///
    /// # Errors
    /// It is larger than the limits allow.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let total = self.blobs.iter().map(|blob| blob.len() as u64).sum();
        if self.blobs.len() > PASS_ITEMS_MAX {
            return Err(FrameError::BlobCount(self.blobs.len()));
        }
        if total > BLOBS_BYTES_MAX as u64 {
            return Err(FrameError::BlobSize(total));
        }
        // Each fits a u32: their sum is below the limit.
        let blobs = self.blobs.iter().map(|blob| blob.len() as u32).collect();
        let header = serde_json::to_vec(&Header { message: &self.message, blobs })?;
        if header.len() > HEADER_BYTES_MAX {
            return Err(FrameError::HeaderSize(header.len()));
        }
        let mut bytes = Vec::with_capacity(4 + header.len() + total as usize);
        bytes.extend((header.len() as u32).to_le_bytes());
        bytes.extend(header);
        self.blobs.iter().for_each(|blob| bytes.extend(blob));
        Ok(bytes)
    }
}

impl<M: DeserializeOwned> Frame<M> {
    /// Reads one frame. Not cancel-safe: a cancelled read loses what it has read.
    ///
    /// # Errors
    /// See [`FrameError`]. Nothing can be read from the connection after any of them.
    pub async fn read(from: &mut (impl AsyncRead + Unpin)) -> Result<Self, FrameError> {
        let mut length = [0; 4];
        match from.read(&mut length[..1]).await.map_err(FrameError::Io)? {
            0 => return Err(FrameError::Ended),
            _ => read_exact(from, &mut length[1..]).await?,
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > HEADER_BYTES_MAX {
            return Err(FrameError::HeaderSize(length));
        }
        let mut header = vec![0; length];
        read_exact(from, &mut header).await?;
        let Header { message, blobs: lengths } = serde_json::from_slice(&header)?;
        if lengths.len() > PASS_ITEMS_MAX {
            return Err(FrameError::BlobCount(lengths.len()));
        }
        let total = lengths.iter().map(|length| u64::from(*length)).sum();
        if total > BLOBS_BYTES_MAX as u64 {
            return Err(FrameError::BlobSize(total));
        }
        let mut blobs = Vec::with_capacity(lengths.len());
        for length in lengths {
            let mut blob = vec![0; length as usize];
            read_exact(from, &mut blob).await?;
            blobs.push(blob);
        }
        Ok(Self { message, blobs })
    }
}

async fn read_exact(from: &mut (impl AsyncRead + Unpin), into: &mut [u8]) -> Result<(), FrameError> {
    from.read_exact(into).await.map(drop).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => FrameError::Torn,
        _ => FrameError::Io(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::protocol::{FromModel, ToModel};
    use proptest::prelude::*;

    fn read<M: DeserializeOwned>(mut bytes: &[u8]) -> Result<Frame<M>, FrameError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Frame::read(&mut bytes))
    }

    fn with_header(header: &str) -> Vec<u8> {
        [&(header.len() as u32).to_le_bytes()[..], header.as_bytes()].concat()
    }

    #[test]
    fn a_frame_comes_back_as_it_went() {
        let frame = Frame { message: ToModel::Ping { number: 7 }, blobs: vec![b"abc".to_vec(), Vec::new()] };
        assert_eq!(read::<ToModel>(&frame.encode().unwrap()).unwrap(), frame);
    }

    #[test]
    fn limits_hold_before_anything_is_allocated() {
        let huge = u32::MAX.to_le_bytes();
        assert!(matches!(read::<FromModel>(&huge), Err(FrameError::HeaderSize(_))));
        let blobs = with_header(r#"{"type":"done","pass":1,"blobs":[4294967295]}"#);
        assert!(matches!(read::<FromModel>(&blobs), Err(FrameError::BlobSize(4_294_967_295))));
        let many = format!(r#"{{"type":"done","pass":1,"blobs":[0{}]}}"#, ",0".repeat(PASS_ITEMS_MAX));
        assert!(matches!(read::<FromModel>(&with_header(&many)), Err(FrameError::BlobCount(_))));
        let frame = Frame { message: ToModel::Trim, blobs: vec![vec![0; BLOBS_BYTES_MAX + 1]] };
        assert!(matches!(frame.encode(), Err(FrameError::BlobSize(_))));
    }

    #[test]
    fn each_kind_of_invalid_message_has_its_error() {
        assert!(matches!(read::<FromModel>(b""), Err(FrameError::Ended)));
        assert!(matches!(read::<FromModel>(b"\x01"), Err(FrameError::Torn)));
        assert!(matches!(read::<FromModel>(&with_header(r#"{"type":"song"}"#)), Err(FrameError::Header(_))));
        assert!(matches!(read::<FromModel>(b"Traceback (most"), Err(FrameError::HeaderSize(_))));
        let cut = with_header(r#"{"type":"done","pass":1,"blobs":[5]}"#);
        assert!(matches!(read::<FromModel>(&cut), Err(FrameError::Torn)));
    }

    #[test]
    fn fields_of_later_versions_are_ignored() {
        let later = with_header(r#"{"type":"done","pass":1,"peak":null,"colour":"red"}"#);
        assert_eq!(read::<FromModel>(&later).unwrap().message, FromModel::Done { pass: 1, peak: None });
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64), length in 0u32..64) {
            let _ = read::<FromModel>(&bytes);
            let _ = read::<FromModel>(&[&length.to_le_bytes()[..], &bytes].concat());
        }
    }
}
