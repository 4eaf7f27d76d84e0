//! Media types and sizes of images and audio, read from their headers. Bytes of an unknown format have no media type.

/// The media type of an image, of audio or of a PDF, by its first bytes. Containers that hold several (MP4, Matroska) have none.
pub fn media_type(data: &[u8]) -> Option<&'static str> {
    const STARTS: [(&[u8], &str); 9] = [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"GIF87a", "image/gif"),
        (b"GIF89a", "image/gif"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"II*\0", "image/tiff"),
        (b"MM\0*", "image/tiff"),
        (b"fLaC", "audio/flac"),
        (b"%PDF-", "application/pdf"),
        (b"BM", "image/bmp"),
    ];
    let start = STARTS.into_iter().find(|(start, _)| data.starts_with(start));
    match start {
        // Two letters alone are weak evidence, so the header is checked.
        Some((_, "image/bmp")) => bmp(data).map(|_| "image/bmp"),
        Some((_, media_type)) => Some(media_type),
        None if data.starts_with(b"RIFF") => match data.get(8..12)? {
            b"WEBP" => Some("image/webp"),
            b"WAVE" => Some("audio/wav"),
            _ => None,
        },
        None if data.starts_with(b"OggS") => ogg(data).map(|_| "audio/ogg"),
        None => mp3(data).map(|_| "audio/mpeg"),
    }
}

/// Width times height of a PNG, JPEG, GIF, WebP, BMP or TIFF image.
pub fn pixels(data: &[u8]) -> Option<u64> {
    let (width, height) = png(data)
        .or_else(|| gif(data))
        .or_else(|| webp(data))
        .or_else(|| bmp(data))
        .or_else(|| tiff(data))
        .or_else(|| jpeg(data))?;
    width.checked_mul(height).filter(|pixels| *pixels > 0)
}

/// The length of WAV, FLAC, Ogg (Vorbis, Opus) or MP3 audio; an MP3 without a header of its own is judged by its first frame.
pub fn seconds(data: &[u8]) -> Option<f64> {
    let seconds = wav(data).or_else(|| flac(data)).or_else(|| ogg(data)).or_else(|| mp3(data))?;
    (seconds.is_finite() && seconds > 0.0).then_some(seconds)
}

fn bytes<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn be16(data: &[u8], at: usize) -> Option<u64> {
    bytes(data, at).map(|b| u16::from_be_bytes(b).into())
}

fn be32(data: &[u8], at: usize) -> Option<u64> {
    bytes(data, at).map(|b| u32::from_be_bytes(b).into())
}

fn le16(data: &[u8], at: usize) -> Option<u64> {
    bytes(data, at).map(|b| u16::from_le_bytes(b).into())
}

fn le32(data: &[u8], at: usize) -> Option<u64> {
    bytes(data, at).map(|b| u32::from_le_bytes(b).into())
}

/// PNG specification 11.2.2: IHDR comes first.
fn png(data: &[u8]) -> Option<(u64, u64)> {
    if !data.starts_with(b"\x89PNG\r\n\x1a\n") || data.get(12..16)? != b"IHDR" {
        return None;
    }
    Some((be32(data, 16)?, be32(data, 20)?))
}

/// GIF89a specification, section 18: the logical screen.
fn gif(data: &[u8]) -> Option<(u64, u64)> {
    let is_gif = data.starts_with(b"GIF87a") || data.starts_with(b"GIF89a");
    if is_gif { Some((le16(data, 6)?, le16(data, 8)?)) } else { None }
}

/// RFC 9649: the first chunk is VP8X (canvas), VP8L or VP8.
fn webp(data: &[u8]) -> Option<(u64, u64)> {
    if !data.starts_with(b"RIFF") || data.get(8..12)? != b"WEBP" {
        return None;
    }
    let le24 = |at| bytes::<3>(data, at).map(|b| u64::from(u32::from_le_bytes([b[0], b[1], b[2], 0])));
    match data.get(12..16)? {
        b"VP8X" => Some((le24(24)? + 1, le24(27)? + 1)),
        b"VP8L" => {
            let bits = le32(data, 21)?;
            Some(((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1))
        }
        b"VP8 " => Some((le16(data, 26)? & 0x3FFF, le16(data, 28)? & 0x3FFF)),
        _ => None,
    }
}

/// BITMAPINFOHEADER; the height is negative where rows go from the top.
fn bmp(data: &[u8]) -> Option<(u64, u64)> {
    if !data.starts_with(b"BM") || le32(data, 14)? < 40 {
        return None;
    }
    let signed = |at| bytes(data, at).map(|b| u64::from(i32::from_le_bytes(b).unsigned_abs()));
    Some((signed(18)?, signed(22)?))
}

/// TIFF 6.0, section 2: tags 256 and 257 of the first directory.
fn tiff(data: &[u8]) -> Option<(u64, u64)> {
    type Read = fn(&[u8], usize) -> Option<u64>;
    let (short, long): (Read, Read) = match data.get(..4)? {
        b"II*\0" => (le16, le32),
        b"MM\0*" => (be16, be32),
        _ => return None,
    };
    let directory = usize::try_from(long(data, 4)?).ok()?;
    let (mut width, mut height) = (None, None);
    for entry in 0..short(data, directory)? as usize {
        let at = directory.checked_add(2 + entry * 12)?;
        // Type 3 is a short, in the first half of the value.
        let value = if short(data, at + 2)? == 3 { short(data, at + 8)? } else { long(data, at + 8)? };
        match short(data, at)? {
            256 => width = Some(value),
            257 => height = Some(value),
            _ => {}
        }
    }
    width.zip(height)
}

/// ITU-T T.81, B.2.2: the first start-of-frame segment.
fn jpeg(data: &[u8]) -> Option<(u64, u64)> {
    if !data.starts_with(&[0xFF, 0xD8]) {
        return None;
    }
    let mut at = 2;
    loop {
        if *data.get(at)? != 0xFF {
            return None;
        }
        let marker = *data.get(at + 1)?;
        match marker {
            // Padding, and markers without a segment.
            0xFF => at += 1,
            0x01 | 0xD0..=0xD7 => at += 2,
            // Start of frame; C4, C8 and CC are tables.
            0xC0..=0xCF if !matches!(marker, 0xC4 | 0xC8 | 0xCC) => {
                return Some((be16(data, at + 7)?, be16(data, at + 5)?));
            }
            // The picture's data: no frame came before it.
            0xD9 | 0xDA => return None,
            _ => at += 2 + (be16(data, at + 2)? as usize).max(2),
        }
    }
}

/// RIFF WAVE: the bytes of `data` over the bytes a second of `fmt `.
fn wav(data: &[u8]) -> Option<f64> {
    if !data.starts_with(b"RIFF") || data.get(8..12)? != b"WAVE" {
        return None;
    }
    let (mut at, mut rate) = (12, None);
    loop {
        let (name, length) = (data.get(at..at + 4)?, le32(data, at + 4)?);
        match name {
            b"fmt " => rate = Some(le32(data, at + 16)?),
            b"data" => {
                // Some writers never fill in the length: then the rest of the data counts.
                let there = (data.len() - (at + 8)) as u64;
                return Some(length.min(there) as f64 / rate? as f64);
            }
            _ => {}
        }
        // Chunks are padded to an even length.
        at = at.checked_add(8 + usize::try_from(length + (length & 1)).ok()?)?;
    }
}

/// RFC 9639, 8.2: STREAMINFO comes first: 20 bits of rate, 36 bits of samples.
fn flac(data: &[u8]) -> Option<f64> {
    if !data.starts_with(b"fLaC") || data.get(4)? & 0x7F != 0 {
        return None;
    }
    let bits = u64::from_be_bytes(bytes(data, 18)?);
    Some((bits & 0xF_FFFF_FFFF) as f64 / (bits >> 44) as f64)
}

/// RFC 3533: the granule position of the last page over the codec's rate.
fn ogg(data: &[u8]) -> Option<f64> {
    /// The longest page, so that the last one starts within so many bytes.
    const PAGE_BYTES_MAX: usize = 65_307;
    if !data.starts_with(b"OggS") {
        return None;
    }
    let first = 27 + usize::from(*data.get(26)?);
    let packet = data.get(first..)?;
    // Opus counts at 48 kHz, whatever the input was, and skips some samples first (RFC 7845, 4).
    let (rate, skipped) = if packet.starts_with(b"OpusHead") {
        (48_000, le16(packet, 10)?)
    } else if packet.starts_with(b"\x01vorbis") {
        (le32(packet, 12)?, 0)
    } else {
        return None;
    };
    let tail = data.len().saturating_sub(PAGE_BYTES_MAX);
    let last = tail + data[tail..].windows(4).rposition(|window| window == b"OggS")?;
    let granule = u64::from_le_bytes(bytes(data, last + 6)?);
    Some(granule.saturating_sub(skipped) as f64 / rate as f64)
}

/// ISO 11172-3, 2.4.1.3: the first frame's rate; a Xing or Info tag has the number of frames.
fn mp3(data: &[u8]) -> Option<f64> {
    const KBITS_1: [u64; 15] = [0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320];
    const KBITS_2: [u64; 15] = [0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160];
    const RATES: [u64; 3] = [44_100, 48_000, 32_000];
    let mut at = 0;
    if data.starts_with(b"ID3") {
        let size: [u8; 4] = bytes(data, 6)?;
        at = 10 + size.iter().fold(0, |sum, byte| sum << 7 | usize::from(byte & 0x7F));
    }
    let header = be32(data, at)?;
    let (version, layer) = (header >> 19 & 3, header >> 17 & 3);
    // The sync word, version 1, 2 or 2.5, layer III.
    if header >> 21 != 0x7FF || version == 1 || layer != 1 {
        return None;
    }
    let is_1 = version == 3;
    let rate = RATES.get((header >> 10 & 3) as usize)? >> [2, 0, 1, 0][version as usize];
    let samples = if is_1 { 1152 } else { 576 };
    let is_mono = header >> 6 & 3 == 3;
    let tag = at
        + 4
        + match (is_1, is_mono) {
            (true, false) => 32,
            (false, true) => 9,
            _ => 17,
        };
    let has_tag = matches!(data.get(tag..tag + 4), Some(b"Xing" | b"Info"));
    if has_tag && be32(data, tag + 4)? & 1 == 1 {
        return Some((be32(data, tag + 8)? * samples) as f64 / rate as f64);
    }
    let kbits = if is_1 { KBITS_1 } else { KBITS_2 }.get((header >> 12 & 15) as usize).copied()?;
    Some((data.len() - at) as f64 / (kbits * 125) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wav_of(samples: u32, rate: u32) -> Vec<u8> {
        let mut wav = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0".to_vec();
        wav.extend(rate.to_le_bytes());
        wav.extend((rate * 2).to_le_bytes());
        wav.extend(b"\x02\0\x10\0LIST\x03\0\0\0abc\0data");
        wav.extend((samples * 2).to_le_bytes());
        wav.extend(vec![0; samples as usize * 2]);
        wav
    }

    #[test]
    fn images() {
        let png =
            [&b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"[..], &640u32.to_be_bytes(), &480u32.to_be_bytes()].concat();
        assert_eq!(pixels(&png), Some(307_200));
        assert_eq!(pixels(b"GIF89a\x0a\0\x14\0"), Some(200));
        // A quantisation table before the frame, and padding.
        let jpeg = b"\xff\xd8\xff\xe0\0\x04ab\xff\xff\xdb\0\x03x\xff\xc2\0\x0b\x08\0\x10\0\x20\x01";
        assert_eq!(pixels(jpeg), Some(16 * 32));
        let webp = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\x7f\x02\0\xdf\x01\0";
        assert_eq!(pixels(webp), Some(640 * 480));
        let vp8 = b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a\x80\x02\xe0\x01";
        assert_eq!(pixels(vp8), Some(640 * 480));
        let bmp = [&b"BM"[..], &[0; 12], &40u32.to_le_bytes(), &5i32.to_le_bytes(), &(-7i32).to_le_bytes()]
            .concat();
        assert_eq!(pixels(&bmp), Some(35));
        let tiff = b"MM\0*\0\0\0\x08\0\x02\x01\0\0\x03\0\0\0\x01\0\x09\0\0\x01\x01\0\x04\0\0\0\x01\0\0\0\x0b";
        assert_eq!(pixels(tiff), Some(99));
        let media_types =
            [&png[..], b"GIF89a\x0a\0\x14\0", &jpeg[..], &webp[..], &bmp[..], &tiff[..]].map(media_type);
        let expected = ["png", "gif", "jpeg", "webp", "bmp", "tiff"].map(|name| format!("image/{name}"));
        assert_eq!(media_types.map(Option::unwrap_or_default), expected.each_ref().map(String::as_str));
    }

    #[test]
    fn audio() {
        assert_eq!(seconds(&wav_of(24_000, 16_000)), Some(1.5));
        let mut flac = b"fLaC\0\0\0\x22".to_vec();
        flac.extend([0; 10]);
        flac.extend((44_100u64 << 44 | 15 << 36 | 88_200).to_be_bytes());
        assert_eq!(seconds(&flac), Some(2.0));
        let page = |granule: u64, packet: &[u8]| {
            let mut page = b"OggS\0\x02".to_vec();
            page.extend(granule.to_le_bytes());
            page.extend([0; 12]);
            page.extend([1, packet.len() as u8]);
            page.extend(packet);
            page
        };
        let head = b"OpusHead\x01\x01\x38\x01\x80\xbb\0\0\0\0\0";
        let opus = [page(0, head), page(48_000 * 3 + 312, b"data")].concat();
        assert_eq!(seconds(&opus), Some(3.0));
        // 128 kbit/s, 44.1 kHz, stereo: 16,000 bytes are a second.
        let mut mp3 = b"\xff\xfb\x90\0".to_vec();
        mp3.resize(32_000, 0);
        assert_eq!(seconds(&mp3), Some(2.0));
        let media_types = [&wav_of(1, 8_000)[..], &flac[..], &opus[..], &mp3[..]].map(media_type);
        assert_eq!(media_types, ["audio/wav", "audio/flac", "audio/ogg", "audio/mpeg"].map(Some));
        mp3[36..48].copy_from_slice(b"Xing\0\0\0\x01\0\0\x03\xe8");
        assert_eq!(seconds(&mp3), Some(1_152_000.0 / 44_100.0));
    }

    #[test]
    fn data_that_is_neither_image_nor_audio_has_no_size() {
        for data in [&b""[..], b"hello", b"\xff\xd8\xff\xda\0\x02", b"RIFF\0\0\0\0WAVEdata\x04\0\0\0abcd"] {
            assert_eq!((pixels(data), seconds(data)), (None, None), "{data:?}");
        }
        for data in [&b""[..], b"hello", b"BMW", b"%PDF", b"RIFF\0\0\0\0AVI ", b"OggS", b"\0\0\0\x18ftypmp42"]
        {
            assert_eq!(media_type(data), None, "{data:?}");
        }
        assert_eq!(pixels(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\0\0\0\0\x09"), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(start in 0usize..10, rest in proptest::collection::vec(any::<u8>(), 0..200)) {
            let starts: [&[u8]; 10] = [
                b"", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8L", b"BM", b"II*\0", b"\xff\xd8",
                b"RIFF\0\0\0\0WAVE", b"fLaC", b"OggS",
            ];
            let data = [starts[start], &rest].concat();
            let _ = (pixels(&data), seconds(&data), media_type(&data));
        }
    }
}
