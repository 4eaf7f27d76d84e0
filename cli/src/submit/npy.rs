//! NumPy's file format, version 1.0: a header with type and shape, then the numbers.
//! <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>

use std::io::{self, Seek, SeekFrom, Write};

/// Magic, version, header length, header: a multiple of 64, and room for any two 64-bit lengths.
const HEADER_BYTES: usize = 128;

/// Writes rows of f32 one by one, in C order; the number of rows goes into the header at the end.
pub(super) struct NpyWriter<W> {
    to: W,
    rows: u64,
    /// Known from the first row with numbers.
    width: Option<usize>,
}

impl<W: Write + Seek> NpyWriter<W> {
    pub(super) fn new(mut to: W) -> io::Result<Self> {
        to.write_all(&[0; HEADER_BYTES])?;
        Ok(Self { to, rows: 0, width: None })
    }

    /// # Errors
    /// `InvalidData` for a row of another width than those before.
    pub(super) fn row(&mut self, values: &[f32]) -> io::Result<()> {
        match self.width {
            Some(width) if width != values.len() => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("row {} has {} numbers, those before {width}", self.rows, values.len()),
                ));
            }
            Some(_) => {}
            None => {
                self.width = Some(values.len());
                // Fill the rows that were missing before the width was known.
                for _ in 0..self.rows {
                    self.write(&vec![f32::NAN; values.len()])?;
                }
            }
        }
        self.rows += 1;
        self.write(values)
    }

    /// A row of NaN, for an item without a result.
    pub(super) fn missing(&mut self) -> io::Result<()> {
        self.rows += 1;
        match self.width {
            Some(width) => self.write(&vec![f32::NAN; width]),
            None => Ok(()),
        }
    }

    /// Completes the header.
    ///
    /// # Errors
    /// `InvalidData` if no row had numbers.
    pub(super) fn finish(mut self) -> io::Result<W> {
        let width =
            self.width.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no item was answered"))?;
        self.to.seek(SeekFrom::Start(0))?;
        self.to.write_all(&header(self.rows, width))?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn write(&mut self, values: &[f32]) -> io::Result<()> {
        for value in values {
            self.to.write_all(&value.to_le_bytes())?;
        }
        Ok(())
    }
}

fn header(rows: u64, width: usize) -> [u8; HEADER_BYTES] {
    let mut bytes = [b' '; HEADER_BYTES];
    bytes[..8].copy_from_slice(b"\x93NUMPY\x01\x00");
    let length = (HEADER_BYTES - 10) as u16;
    bytes[8..10].copy_from_slice(&length.to_le_bytes());
    let dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    bytes[10..10 + dict.len()].copy_from_slice(dict.as_bytes());
    bytes[HEADER_BYTES - 1] = b'\n';
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(fill: impl Fn(&mut NpyWriter<io::Cursor<Vec<u8>>>)) -> io::Result<Vec<u8>> {
        let mut writer = NpyWriter::new(io::Cursor::new(Vec::new())).unwrap();
        fill(&mut writer);
        Ok(writer.finish()?.into_inner())
    }

    /// Compared with `numpy.save` of the same array, whose header is padded to 128 bytes too.
    #[test]
    fn bytes_are_those_of_numpy() {
        let bytes = written(|npy| {
            npy.row(&[1.0, 2.0]).unwrap();
            npy.row(&[-0.5, 3.0]).unwrap();
        })
        .unwrap();
        let (head, data) = bytes.split_at(128);
        assert_eq!(&head[..10], b"\x93NUMPY\x01\x00\x76\x00");
        let dict = String::from_utf8(head[10..].to_vec()).unwrap();
        assert_eq!(dict.trim_end(), "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }");
        assert!(dict.ends_with(" \n"));
        let numbers = data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
        assert_eq!(numbers.collect::<Vec<_>>(), [1.0, 2.0, -0.5, 3.0]);
    }

    #[test]
    fn missing_rows_are_nan_wherever_they_are() {
        let bytes = written(|npy| {
            npy.missing().unwrap();
            npy.row(&[1.0]).unwrap();
            npy.missing().unwrap();
        })
        .unwrap();
        let numbers = bytes[128..].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
        let numbers = numbers.collect::<Vec<_>>();
        assert!(numbers[0].is_nan() && numbers[2].is_nan());
        assert_eq!((numbers[1], numbers.len()), (1.0, 3));
    }

    #[test]
    fn uneven_and_empty_are_errors() {
        let mut npy = NpyWriter::new(io::Cursor::new(Vec::new())).unwrap();
        npy.row(&[1.0]).unwrap();
        assert!(npy.row(&[1.0, 2.0]).is_err());
        assert!(written(|npy| npy.missing().unwrap()).is_err());
    }

    #[test]
    fn the_longest_header_fits() {
        let bytes = header(u64::MAX, usize::MAX);
        assert!(bytes.ends_with(b", } \n") || bytes.ends_with(b" \n"), "{bytes:?}");
    }
}
