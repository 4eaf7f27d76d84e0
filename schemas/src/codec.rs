//! Encodes and decodes bodies as JSON, MessagePack and bincode. The only user of bincode.

use bincode::config::{Configuration, Limit};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::job::{Input, Job};
pub use crate::limits::BODY_BYTES_MAX;
use crate::limits::ITEMS_MAX;
use crate::msgpack::{self, MessagePack};
use crate::output::Output;
use crate::reply::{Failure, ItemProgress, Outputs};

pub const JSON: &str = "application/json";
pub const MESSAGE_PACK: &str = "application/msgpack";
pub const BINCODE: &str = "application/vnd.vramq.v1+bincode";

/// Other content types of MessagePack: IANA's, and the one of Celery's library. Replies use [`MESSAGE_PACK`].
const MESSAGE_PACK_TOO: [&str; 2] = ["application/vnd.msgpack", "application/x-msgpack"];

/// The first byte of a bincode body: the oldest version that can express the body, so that an older reader rejects only bodies that it
/// cannot read (`unsupported-encoding`). Version 2 has [`Input::Json`], version 3 [`Output::Sparse`].
const BINCODE_VERSION: u8 = 1;
const BINCODE_VERSION_JSON_INPUTS: u8 = 2;
const BINCODE_VERSION_SPARSE: u8 = 3;

/// The encoding of a body. A reply uses that of its job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    #[default]
    Json,
    /// The same fields as in JSON, with bytes as `bin` instead of base64.
    MessagePack,
    /// bincode 2 through serde: little endian, variable-length integers, a version byte first.
    Bincode,
}

impl Encoding {
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Json => JSON,
            Self::MessagePack => MESSAGE_PACK,
            Self::Bincode => BINCODE,
        }
    }

    /// The encoding that a content type names. Parameters (`; charset=utf-8`) are ignored; a message without a
    /// content type is taken for JSON.
    ///
    /// # Errors
    /// [`DecodeError::ContentType`] for every other.
    pub fn of(content_type: Option<&str>) -> Result<Self, DecodeError> {
        let Some(named) = content_type else {
            return Ok(Self::Json);
        };
        let media_type = named.split(';').next().unwrap_or_default().trim();
        let is = |name: &str| media_type.eq_ignore_ascii_case(name);
        if is(JSON) {
            Ok(Self::Json)
        } else if is(BINCODE) {
            Ok(Self::Bincode)
        } else if is(MESSAGE_PACK) || MESSAGE_PACK_TOO.into_iter().any(is) {
            Ok(Self::MessagePack)
        } else {
            Err(DecodeError::ContentType(named.chars().take(80).collect()))
        }
    }
}

/// Why bytes cannot be read as a body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("content type {0:?} is unknown; use `{JSON}`, `{MESSAGE_PACK}` or `{BINCODE}`")]
    ContentType(String),
    #[error(
        "bincode version {0} is unknown; this side reads versions {BINCODE_VERSION} to {BINCODE_VERSION_SPARSE}"
    )]
    Version(u8),
    #[error("the body takes {bytes} bytes, at most {cap} are allowed; send large inputs by reference")]
    TooLarge { bytes: usize, cap: usize },
    #[error("{0}")]
    Malformed(String),
}

/// A body that can be encoded: [`Job`], [`Outputs`], [`Failure`] or [`ItemProgress`]. No other type can implement it, because `MessagePack`
/// is private.
pub trait Body: Serialize + DeserializeOwned + MessagePack {
    /// The oldest version of the bincode encoding that can express this body.
    fn bincode_version(&self) -> u8 {
        BINCODE_VERSION
    }
}

impl Body for Job {
    fn bincode_version(&self) -> u8 {
        match self.inputs.iter().any(|input| matches!(input, Input::Json(_))) {
            true => BINCODE_VERSION_JSON_INPUTS,
            false => BINCODE_VERSION,
        }
    }
}

impl Body for Outputs {
    fn bincode_version(&self) -> u8 {
        match self.outputs.iter().any(|output| matches!(output, Output::Sparse(_))) {
            true => BINCODE_VERSION_SPARSE,
            false => BINCODE_VERSION,
        }
    }
}

impl Body for Failure {}
impl Body for ItemProgress {}

/// Writes a body. The size is not checked here: a publisher compares it with [`BODY_BYTES_MAX`].
///
/// # Errors
/// When a value has no form in the encoding: a vector with an element that is not finite, as JSON numbers.
pub fn encode<T: Body>(body: &T, encoding: Encoding) -> Result<Vec<u8>, EncodeError> {
    match encoding {
        Encoding::Json => serde_json::to_vec(body).map_err(|e| EncodeError(e.to_string())),
        Encoding::MessagePack => msgpack::write(body).map_err(EncodeError),
        Encoding::Bincode => {
            let mut bytes = vec![body.bincode_version()];
            bincode::serde::encode_into_std_write(body, &mut bytes, bincode::config::standard())
                .map_err(|e| EncodeError(e.to_string()))?;
            Ok(bytes)
        }
    }
}

/// A body that has no form in the encoding.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("encode body: {0}")]
pub struct EncodeError(String);

/// The most memory that decoding a body takes at any moment, whatever its bytes are. Most of it is the doubling of
/// a list that grows, and JSON outputs (`MEMORY_MAX` in `json_budget.rs`). A body's own size bounds it too: a short
/// one never takes more than 128 times its length and a few KiB.
pub const DECODE_BYTES_MAX: usize = 6 * BODY_BYTES_MAX;

/// Reads a body. Never panics, and never has more than [`DECODE_BYTES_MAX`] allocated.
///
/// # Errors
/// [`DecodeError`], with what was wrong and where.
pub fn decode<T: Body>(bytes: &[u8], encoding: Encoding) -> Result<T, DecodeError> {
    if bytes.len() > BODY_BYTES_MAX {
        return Err(DecodeError::TooLarge { bytes: bytes.len(), cap: BODY_BYTES_MAX });
    }
    match encoding {
        // A list of a body's values in their order would be read, too.
        Encoding::Json if bytes.trim_ascii_start().starts_with(b"[") => {
            Err(DecodeError::Malformed("JSON: the body is a list; it must be an object".to_owned()))
        }
        Encoding::Json => serde_json::from_slice(bytes).map_err(|e| malformed(format!("JSON: {e}"))),
        Encoding::MessagePack => msgpack::read(bytes).map_err(|e| malformed(format!("MessagePack: {e}"))),
        Encoding::Bincode => decode_bincode(bytes),
    }
}

/// The longest description of a fault, in bytes. Parsers quote what they found, and that may be megabytes.
const MALFORMED_BYTES_MAX: usize = 512;

fn malformed(mut what: String) -> DecodeError {
    what.truncate(what.floor_char_boundary(MALFORMED_BYTES_MAX));
    what.shrink_to_fit();
    DecodeError::Malformed(what)
}

fn decode_bincode<T: Body>(bytes: &[u8]) -> Result<T, DecodeError> {
    // bincode counts a varint at its maximal length: up to 20 bytes more per item than it takes.
    const CLAIMS_MAX: usize = BODY_BYTES_MAX + 32 * ITEMS_MAX;
    // This limit is the second line of defence. The first: this crate's types borrow texts and bytes, so bincode compares a length with the
    // input before anything is allocated. For owned values it would allocate the claimed length.
    const CONFIG: Configuration<bincode::config::LittleEndian, bincode::config::Varint, Limit<CLAIMS_MAX>> =
        bincode::config::standard().with_limit();
    let (version, rest) =
        bytes.split_first().ok_or_else(|| DecodeError::Malformed("bincode: the body is empty".to_owned()))?;
    if !(BINCODE_VERSION..=BINCODE_VERSION_SPARSE).contains(version) {
        return Err(DecodeError::Version(*version));
    }
    let (body, read): (T, usize) =
        bincode::serde::decode_from_slice(rest, CONFIG).map_err(|e| malformed(format!("bincode: {e}")))?;
    let needed = body.bincode_version();
    if needed > *version {
        return Err(DecodeError::Malformed(format!(
            "bincode: the body needs version {needed}, it has {version}"
        )));
    }
    if read < rest.len() {
        return Err(DecodeError::Malformed(format!("bincode: {} bytes too many", rest.len() - read)));
    }
    Ok(body)
}
