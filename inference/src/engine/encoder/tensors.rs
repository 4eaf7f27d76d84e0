//! Reads a safetensors file tensor by tensor, each directly into its destination. The whole file is never in memory.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::LoadError;

/// Bytes read at a time.
const CHUNK_BYTES: usize = 256 * 1024;

/// The library's own bound on a header, 100 MB.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Little-endian elements to as many f32.
type Convert = fn(&[u8], &mut [f32]);

pub(super) struct TensorFile {
    file: File,
    path: PathBuf,
    tensors: Metadata,
    /// Where the tensors' bytes begin.
    data_start: u64,
    data_len: u64,
}

impl TensorFile {
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let read = |source| LoadError::Read { path: path.to_owned(), source };
        let malformed = |reason: String| LoadError::Safetensors { path: path.to_owned(), reason };
        let mut file = File::open(path).map_err(read)?;
        let file_len = file.metadata().map_err(read)?.len();
        let mut header_len = [0; 8];
        if file_len < 8 {
            return Err(malformed(format!("{file_len} bytes are not a safetensors file")));
        }
        file.read_exact(&mut header_len).map_err(read)?;
        let header_len = u64::from_le_bytes(header_len);
        if header_len > HEADER_BYTES_MAX.min(file_len - 8) {
            return Err(malformed(format!(
                "a header of {header_len} bytes in a file of {file_len}; it is truncated, or not a safetensors file"
            )));
        }
        let mut header = vec![0; header_len as usize];
        file.read_exact(&mut header).map_err(read)?;
        let tensors: Metadata =
            serde_json::from_slice(&header).map_err(|e| malformed(format!("header: {e}")))?;
        let data_start = 8 + header_len;
        let data_len = file_len - data_start;
        if tensors.data_len() as u64 > data_len {
            return Err(malformed(format!(
                "truncated: its header lists {} bytes, the file has {data_len}",
                tensors.data_len()
            )));
        }
        Ok(Self { file, path: path.to_owned(), tensors, data_start, data_len })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all its tensors.
    pub fn names(&self) -> Vec<String> {
        self.tensors.offset_keys()
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.info(name).is_some()
    }

    /// Reads a tensor of exactly this shape as f32 into `to`, which has as many elements.
    pub fn read(&mut self, name: &str, shape: &[usize], to: &mut [f32]) -> Result<(), LoadError> {
        debug_assert_eq!(shape.iter().product::<usize>(), to.len());
        let (start, element, convert) = self.find(name, shape)?;
        self.stream(start, element, to, convert)
            .map_err(|source| LoadError::Read { path: self.path.clone(), source })
    }

    /// The same for who takes it on in pieces: `take` gets one after the other.
    pub fn read_pieces(
        &mut self,
        name: &str,
        shape: &[usize],
        mut take: impl FnMut(&[f32]) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        let (mut start, element, convert) = self.find(name, shape)?;
        let mut left: usize = shape.iter().product();
        let mut piece = vec![0.0; left.min(CHUNK_BYTES / element)];
        while left > 0 {
            let piece = &mut piece[..left.min(CHUNK_BYTES / element)];
            self.stream(start, element, piece, convert)
                .map_err(|source| LoadError::Read { path: self.path.clone(), source })?;
            take(piece)?;
            start += (piece.len() * element) as u64;
            left -= piece.len();
        }
        Ok(())
    }

    /// Where a tensor of exactly this shape begins, the size of its elements, and how they become f32.
    fn find(&self, name: &str, shape: &[usize]) -> Result<(u64, usize, Convert), LoadError> {
        let Some(info) = self.tensors.info(name) else {
            return Err(LoadError::MissingTensor { path: self.path.clone(), name: name.to_owned() });
        };
        if info.shape != shape {
            return Err(LoadError::TensorShape {
                path: self.path.clone(),
                name: name.to_owned(),
                expected: shape.to_vec(),
                found: info.shape.clone(),
            });
        }
        let (element, convert): (usize, Convert) = match info.dtype {
            Dtype::F32 => (4, from_f32),
            Dtype::F16 => (2, from_f16),
            Dtype::BF16 => (2, from_bf16),
            found => {
                return Err(LoadError::TensorDtype {
                    path: self.path.clone(),
                    name: name.to_owned(),
                    found: format!("{found:?}"),
                });
            }
        };
        let (start, end) = info.data_offsets;
        let elements: usize = shape.iter().product();
        if end.checked_sub(start) != Some(elements * element) || end as u64 > self.data_len {
            return Err(LoadError::Safetensors {
                path: self.path.clone(),
                reason: format!(
                    "tensor {name} lies at bytes {start}..{end}, which is not its size, or not in the file"
                ),
            });
        }
        Ok((start as u64, element, convert))
    }

    fn stream(&mut self, start: u64, element: usize, to: &mut [f32], convert: Convert) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.data_start + start))?;
        let mut chunk = vec![0; CHUNK_BYTES.min(to.len() * element)];
        for to in to.chunks_mut((CHUNK_BYTES / element).max(1)) {
            let bytes = &mut chunk[..to.len() * element];
            self.file.read_exact(bytes)?;
            convert(bytes, to);
        }
        Ok(())
    }
}

fn from_f32(bytes: &[u8], to: &mut [f32]) {
    for (bytes, to) in bytes.as_chunks().0.iter().zip(to) {
        *to = f32::from_le_bytes(*bytes);
    }
}

fn from_f16(bytes: &[u8], to: &mut [f32]) {
    for (bytes, to) in bytes.as_chunks().0.iter().zip(to) {
        *to = f16::from_le_bytes(*bytes).to_f32();
    }
}

fn from_bf16(bytes: &[u8], to: &mut [f32]) {
    for (bytes, to) in bytes.as_chunks().0.iter().zip(to) {
        *to = bf16::from_le_bytes(*bytes).to_f32();
    }
}
