//! The size of outputs on the wire: an upper bound before outputs are computed, and an estimate before they are encoded. Replies are cut
//! into parts by the estimate.

use vramq_core::rejection::Rejection;
use vramq_core::units::Mib;
use vramq_schemas::json_budget::JsonSize;
use vramq_schemas::{BODY_BYTES_MAX, Dtype, Embedding, Encoding, Input, Output, Reason, Values};

use crate::engine::OutputMax;

/// The bytes of an output besides its content: tag, length, punctuation.
const OVERHEAD: usize = 16;

/// A reply is cut into parts of at most this many bytes each; an item that has more is a part of its own. That is large enough to make
/// framing cheap, small enough to show progress every few hundred texts, and far below the largest body.
const PART_BYTES_MAX: usize = 1024 * 1024;

/// The most bytes that a reply has beside an output: the names of the model and of a media type.
const AROUND_MAX: usize = 64 * 1024;

/// The most bytes of a vector's element as a number in JSON: "-0.012345678," and the like.
const NUMBER: usize = 13;

/// The bytes of a vector's element as a number in MessagePack: its marker, and an f32.
const NUMBER_MESSAGE_PACK: usize = 5;

/// The most bytes of a sparse vector's index in JSON, with its comma: no vocabulary has ten million tokens. In MessagePack an index
/// takes no more than a number.
const INDEX: usize = 8;

/// The keys of a sparse vector: `{"sparse":{"indices":[],"values":[]}}`.
const SPARSE_KEYS: usize = 38;

/// The bytes of a sparse vector's element before it is encoded: its index and its value.
const SPARSE_ELEMENT: usize = 8;

/// The most bytes of a character's byte in a JSON text: "\u0000".
const ESCAPED: u64 = 6;

/// Rejects a job whose replies could exceed the model's `reply_mib_max`, before any input is prepared: the replies can be a thousand times
/// as large as the body. `output_max`: the engine's bound for an input.
///
/// # Errors
/// A [`Rejection`] with the calculation.
pub fn check_reply_bytes(
    output_max: impl Fn(&Input) -> Option<OutputMax>,
    inputs: &[Input],
    encoding: Encoding,
    reply_max: u64,
) -> Result<(), Rejection> {
    let (mut raw, mut wire) = (0_u64, 0_u64);
    for input in inputs {
        // The model does not know this output's size before it runs. Then the limits of a pass and of a part apply.
        let Some(output) = output_max(input) else { return Ok(()) };
        let (bytes, encoded) = bytes_max(output, encoding);
        raw = raw.saturating_add(bytes);
        wire = wire.saturating_add(encoded).saturating_add(OVERHEAD as u64);
    }
    if wire <= reply_max {
        return Ok(());
    }
    let (count, each) = (inputs.len(), raw / (inputs.len() as u64).max(1));
    let error = format!(
        "the replies may need {}, and the model's reply_mib_max allows {}: {count} items x {each} bytes of output = {}, which \
         {} encodes in up to {:.2} times as many bytes. Publish the items as several jobs, or ask for base64 or bincode",
        Mib(wire),
        Mib(reply_max),
        Mib(raw),
        encoding.content_type(),
        wire as f64 / raw.max(1) as f64,
    );
    Err(Rejection::new(Reason::TooLarge, error))
}

/// The most bytes that an output takes before it is encoded, and in a reply.
fn bytes_max(output: OutputMax, encoding: Encoding) -> (u64, u64) {
    let base64 = |bytes: u64| (bytes / 3 + 1).saturating_mul(4);
    match output {
        OutputMax::Embedding { elements, format } => {
            let bytes = elements.saturating_mul(if format.dtype == Dtype::F16 { 2 } else { 4 });
            let encoded = match (encoding, format.base64) {
                (Encoding::Json, true) => base64(bytes),
                (Encoding::Json, false) => elements.saturating_mul(NUMBER as u64),
                (Encoding::MessagePack, false) => elements.saturating_mul(NUMBER_MESSAGE_PACK as u64),
                (Encoding::MessagePack, true) | (Encoding::Bincode, _) => bytes,
            };
            (bytes, encoded)
        }
        OutputMax::Sparse { elements } => {
            let elements = usize::try_from(elements).unwrap_or(usize::MAX);
            (elements.saturating_mul(SPARSE_ELEMENT) as u64, sparse_bytes(elements, encoding) as u64)
        }
        OutputMax::Bytes(bytes) if encoding == Encoding::Json => (bytes, base64(bytes)),
        OutputMax::Bytes(bytes) | OutputMax::Uri(bytes) => (bytes, bytes),
        // A JSON text in JSON and bincode; shorter in MessagePack.
        OutputMax::Text(bytes) => (bytes, bytes.saturating_mul(ESCAPED)),
    }
}

/// The approximate bytes of an output on the wire, rounded up: where replies are cut, and whether they are allowed, depends on it. A JSON
/// output counts as its JSON text in any encoding.
pub fn wire_bytes(output: &Output, encoding: Encoding) -> usize {
    OVERHEAD
        + match output {
            Output::Embedding(Embedding { values, base64 }) => {
                let raw = match values {
                    Values::F32(v) => v.len() * 4,
                    Values::F16(v) => v.len() * 2,
                };
                match (encoding, base64) {
                    (Encoding::Json, true) => raw * 4 / 3,
                    (Encoding::Json, false) => values.len() * NUMBER,
                    (Encoding::MessagePack, false) => values.len() * NUMBER_MESSAGE_PACK,
                    (Encoding::MessagePack, true) | (Encoding::Bincode, _) => raw,
                }
            }
            Output::Sparse(sparse) => sparse_bytes(sparse.len(), encoding),
            Output::Json(value) => json_bytes(value),
            Output::Bytes { bytes, .. } => bytes.len() * if encoding == Encoding::Json { 4 } else { 3 } / 3,
            Output::Uri(uri) => uri.len(),
        }
}

/// How many outputs from the start fit one reply that clients can read; at least 1, if there is one.
///
/// # Errors
/// [`Rejection`] when no client can read the first output, or no reply holds it.
pub fn items_within(outputs: &[Output], encoding: Encoding) -> Result<usize, Rejection> {
    // To encode it first would take several times its size.
    if let Some(Output::Bytes { bytes, .. }) = outputs.first() {
        check_body_bytes(bytes.len())?;
    }
    let (mut fitting, mut bytes) = (0, 0);
    for output in outputs {
        let more = bytes + wire_bytes(output, encoding);
        if fitting > 0 && more > PART_BYTES_MAX {
            break;
        }
        (fitting, bytes) = (fitting + 1, more);
    }
    if bytes <= JsonSize::TEXT_ALWAYS_READABLE {
        return Ok(fitting);
    }
    let mut size = JsonSize::default();
    for (at, output) in outputs[..fitting].iter().enumerate() {
        let Output::Json(value) = output else { continue };
        size = size + JsonSize::of(value);
        match size.check() {
            Ok(()) => {}
            Err(error) if at == 0 => return Err(Rejection::new(Reason::TooLarge, error.to_string())),
            Err(_) => return Ok(at),
        }
    }
    Ok(fitting)
}

/// Whether a reply certainly holds the output.
pub fn fits_reply(output: &Output, encoding: Encoding) -> bool {
    wire_bytes(output, encoding) <= BODY_BYTES_MAX - AROUND_MAX
        && items_within(std::slice::from_ref(output), encoding).is_ok()
}

/// # Errors
/// [`Rejection`] when no reply holds an output of so many bytes.
pub fn check_body_bytes(bytes: usize) -> Result<(), Rejection> {
    if bytes <= BODY_BYTES_MAX {
        return Ok(());
    }
    let error = format!("the output takes {bytes} bytes, a reply holds at most {BODY_BYTES_MAX}");
    Err(Rejection::new(Reason::TooLarge, error))
}

/// The most bytes of a sparse vector of so many elements.
fn sparse_bytes(elements: usize, encoding: Encoding) -> usize {
    let element = match encoding {
        Encoding::Json => INDEX + NUMBER,
        Encoding::MessagePack => 2 * NUMBER_MESSAGE_PACK,
        Encoding::Bincode => SPARSE_ELEMENT,
    };
    elements.saturating_mul(element).saturating_add(SPARSE_KEYS)
}

/// The most bytes of a JSON value as text, computed without writing it. Escapes may make a text six times as long, so an estimate could
/// exceed the limit of a reply.
fn json_bytes(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::String(text) => text_bytes(text),
        serde_json::Value::Array(items) => 2 + items.iter().map(|item| json_bytes(item) + 1).sum::<usize>(),
        serde_json::Value::Object(map) => {
            let entries = map.iter().map(|(key, value)| text_bytes(key) + json_bytes(value) + 2);
            2 + entries.sum::<usize>()
        }
        serde_json::Value::Number(number) => number_bytes(number),
        serde_json::Value::Bool(_) | serde_json::Value::Null => 5,
    }
}

/// The most bytes of a number: those of a whole one, or of the longest f64, "-1.2345678901234567e-100".
fn number_bytes(number: &serde_json::Number) -> usize {
    let (size, sign) = match (number.as_u64(), number.as_i64()) {
        (Some(whole), _) => (whole, 0),
        (None, Some(negative)) => (negative.unsigned_abs(), 1),
        (None, None) => return 24,
    };
    sign + 1 + size.checked_ilog10().unwrap_or_default() as usize
}

/// The bytes of a text in JSON, with its quotes.
fn text_bytes(text: &str) -> usize {
    // Sums blocks of a fixed size in single bytes, which the compiler turns into vector instructions. Byte by byte, this took one in seven
    // instructions of a worker with small jobs.
    let (blocks, rest) = text.as_bytes().as_chunks::<ESCAPE_BLOCK>();
    let escapes = blocks.iter().map(|block| escape_bytes(block)).sum::<usize>() + escape_bytes(rest);
    2 + text.len() + escapes
}

/// Bytes in a block. Each adds at most five, so the sum of 160 fits a byte.
const ESCAPE_BLOCK: usize = 32;

/// What escapes add to at most [`ESCAPE_BLOCK`] bytes: one for `\"` and the like, five for `\u0000`.
fn escape_bytes(block: &[u8]) -> usize {
    let added = |byte: u8| {
        let short = matches!(byte, b'\n' | b'\r' | b'\t');
        u8::from(byte == b'"') + u8::from(byte == b'\\') + 5 * u8::from(byte < 0x20) - 4 * u8::from(short)
    };
    usize::from(block.iter().map(|byte| added(*byte)).sum::<u8>())
}

#[cfg(test)]
mod tests {
    use vramq_schemas::{EmbeddingFormat, Outputs, Sparse, codec};

    use super::*;

    fn vector(base64: bool) -> OutputMax {
        OutputMax::Embedding {
            elements: 384,
            format: EmbeddingFormat { base64, ..EmbeddingFormat::default() },
        }
    }

    fn texts(count: usize) -> Vec<Input> {
        vec![Input::Text("a".into()); count]
    }

    #[test]
    fn replies_above_the_cap_are_refused_with_the_arithmetic() {
        let check = |count, base64, encoding, mib: u64| {
            check_reply_bytes(|_| Some(vector(base64)), &texts(count), encoding, mib << 20)
        };
        // 1000 x (384 x 13 + 16) bytes are 4.8 MiB; as base64 2.0 MiB; in bincode 1.5 MiB; in MessagePack 1.8 MiB.
        for (base64, encoding, least) in [
            (false, Encoding::Json, 5),
            (true, Encoding::Json, 2),
            (false, Encoding::Bincode, 2),
            (false, Encoding::MessagePack, 2),
            (true, Encoding::MessagePack, 2),
        ] {
            assert_eq!(check(1000, base64, encoding, least), Ok(()), "{encoding:?}");
            let refused = check(1000, base64, encoding, least - 1).unwrap_err();
            assert_eq!(refused.reason, Reason::TooLarge);
            assert!(refused.error.contains("1000 items x 1536 bytes"), "{}", refused.error);
        }
        assert_eq!(check(0, false, Encoding::Json, 0), Ok(()));
        assert_eq!(check_reply_bytes(|_| None, &texts(9), Encoding::Json, 0), Ok(()));
    }

    #[test]
    fn a_text_takes_what_serde_json_writes() {
        let every_byte: String = (0..0x80).map(char::from).collect();
        for text in ["", "plain", "ä€𝄞", &every_byte, &every_byte.repeat(9)[5..], &"\u{1}".repeat(1000)]
        {
            // Serde writes backspace and form feed as two bytes; six are counted.
            let shorter = text.bytes().filter(|byte| matches!(byte, 8 | 12)).count() * 4;
            assert_eq!(text_bytes(text), serde_json::to_string(text).unwrap().len() + shorter, "{text:?}");
        }
    }

    #[test]
    fn a_number_takes_no_more_than_is_counted_and_a_whole_one_no_less() {
        for whole in ["0", "7", "10", "-1", "-10", "18446744073709551615", "-9223372036854775808"] {
            let number = serde_json::from_str(whole).unwrap();
            assert_eq!(number_bytes(&number), whole.len(), "{whole}");
        }
        for number in [0.5, f64::MIN_POSITIVE, -f64::MAX, 1e300] {
            let number = serde_json::Number::from_f64(number).unwrap();
            assert!(number_bytes(&number) >= number.to_string().len(), "{number}");
        }
    }

    #[test]
    fn the_bound_holds_for_what_is_written() {
        let hostile = "\u{0}\"\\\n".repeat(1000);
        let (_, most) = bytes_max(OutputMax::Text(hostile.len() as u64), Encoding::Json);
        assert!(wire_bytes(&Output::Json(hostile.into()), Encoding::Json) as u64 <= most + OVERHEAD as u64);
        let values = vec![-0.012_345_678_f32; 384];
        for base64 in [false, true] {
            let (_, most) = bytes_max(vector(base64), Encoding::Json);
            let format = EmbeddingFormat { base64, ..EmbeddingFormat::default() };
            let output = Output::Embedding(format.embedding(values.clone()));
            let wire = wire_bytes(&output, Encoding::Json) as u64;
            assert!(wire <= most + OVERHEAD as u64, "base64: {base64}");
        }
    }

    #[test]
    fn an_output_that_no_reply_holds_is_refused_before_it_is_encoded() {
        let of = |bytes: usize| Output::Bytes { media_type: "a/b".to_owned(), bytes: vec![0; bytes] };
        let outputs = [of(BODY_BYTES_MAX), of(BODY_BYTES_MAX + 1)];
        assert_eq!(items_within(&outputs, Encoding::Bincode), Ok(1), "encoding tells about the first");
        let rejection = items_within(&outputs[1..], Encoding::Bincode).unwrap_err();
        assert_eq!(rejection.reason, Reason::TooLarge);
    }

    #[test]
    fn an_output_fits_a_reply_if_the_encoded_one_does_and_clients_can_read_it() {
        let of = |bytes: usize| Output::Bytes { media_type: "a/b".to_owned(), bytes: vec![0; bytes] };
        let most = BODY_BYTES_MAX - 2 * AROUND_MAX;
        assert!(
            fits_reply(&of(most), Encoding::Bincode) && !fits_reply(&of(BODY_BYTES_MAX), Encoding::Bincode)
        );
        assert!(!fits_reply(&of(most), Encoding::Json), "base64 takes a third more");
        // Far less than a body as text, and too much in a client's memory.
        let objects = Output::Json(vec![serde_json::json!({}); 100_000].into());
        assert!(!fits_reply(&objects, Encoding::Json));
    }

    #[test]
    fn a_sparse_vector_takes_no_more_than_is_counted() {
        for indices in [0..0, 0..1, 0..300, 9_999_000..9_999_999] {
            let values = vec![0.012_345_678_f32; indices.len()];
            let sparse = Output::Sparse(Sparse::new(indices.collect(), values).unwrap());
            for encoding in [Encoding::Json, Encoding::MessagePack, Encoding::Bincode] {
                let of = |outputs| Outputs { model: String::new(), outputs };
                let written = codec::encode(&of(vec![sparse.clone()]), encoding).unwrap();
                let around = codec::encode(&of(Vec::new()), encoding).unwrap();
                let counted = wire_bytes(&sparse, encoding);
                assert!(
                    written.len() - around.len() <= counted,
                    "{encoding:?}: {} > {counted}",
                    written.len()
                );
            }
        }
    }
}
