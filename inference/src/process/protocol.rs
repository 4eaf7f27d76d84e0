//! The messages between a worker and a model's process, version 1. `docs/process-protocol.md` describes them for other languages.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::accepts::Accepts;

/// The version that both sides send in their first message. New fields need no new version, because readers ignore unknown ones. A
/// new message that a peer must understand does.
pub const VERSION: u32 = 1;

/// The variable that tells the program which descriptor its end of the socket pair is.
pub const FD_VARIABLE: &str = "VRAMQ_FD";

/// The descriptor of the program's end of the socket pair: the first after the standard ones.
pub const FD: i32 = 3;

/// The most items of one pass: their descriptions must fit a header (see [`HEADER_BYTES_MAX`](super::frame::HEADER_BYTES_MAX)).
pub const PASS_ITEMS_MAX: usize = 4096;

/// What a worker sends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToModel {
    /// The first message: load now.
    Hello {
        version: u32,
        model: String,
        /// `cpu` or `cuda:N`; within the process a GPU is always `cuda:0`, since no other is visible to it.
        device: String,
        /// The most items of a pass.
        items_max: usize,
    },
    /// Run these items; blob `i` is the payload of item `i`.
    Run {
        pass: u64,
        items: Vec<ItemHeader>,
        params: Map<String, Value>,
        /// Device bytes that the pass may take beyond the weights, where that is known.
        budget: Option<u64>,
        /// Milliseconds from now until the pass is cancelled.
        deadline_ms: u64,
        /// The worker learns from this pass's peak: first return cached memory and reset the peak.
        measure: bool,
    },
    /// Stop this pass at the next chance, and say `failed` with the kind `cancelled`. Ignored if the pass has ended.
    Cancel { pass: u64 },
    /// Answer with `pong`. Sent between passes only.
    Ping { number: u64 },
    /// Return cached device memory.
    Trim,
    /// End the process with status 0.
    Shutdown,
}

/// What a model sends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromModel {
    /// The model is loaded.
    Ready {
        version: u32,
        /// Device bytes of the weights, as far as the program knows.
        #[serde(default)]
        weights: u64,
        /// The kinds of items, and the media types of bytes, that it takes; empty means all.
        #[serde(default)]
        accepts: Accepts,
        /// Identifies weights and element type, for `model-revision`.
        #[serde(default)]
        revision: Option<String>,
    },
    /// The result for one item, in the order of the items; its payload is the only blob, or a file in the scratch folder.
    Output {
        pass: u64,
        item: usize,
        #[serde(flatten)]
        output: OutputHeader,
    },
    Progress {
        pass: u64,
        item: usize,
        /// From 0 to 1.
        fraction: f64,
        #[serde(default)]
        note: String,
    },
    /// Every item has its output.
    Done {
        pass: u64,
        /// The most device bytes beyond the weights that the pass held, if the program knows.
        #[serde(default)]
        peak: Option<u64>,
    },
    /// The device's memory ran out. Outputs that were sent before stay. The process goes on.
    Oom {
        /// Absent while loading.
        #[serde(default)]
        pass: Option<u64>,
        /// The item at fault, if it is known.
        #[serde(default)]
        item: Option<usize>,
        #[serde(flatten)]
        memory: OomReport,
    },
    /// The pass, or loading, ended without all outputs. The process goes on, except after `device`.
    Failed {
        #[serde(default)]
        pass: Option<u64>,
        #[serde(default)]
        item: Option<usize>,
        kind: FailureKind,
        #[serde(default)]
        detail: String,
        /// With the kind `model`: a disk has no room for what the program wrote. No job is at fault, and each is tried again later.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        disk_full: bool,
    },
    Pong {
        number: u64,
        /// Device bytes that the process holds, cached ones included, if it knows.
        #[serde(default)]
        reserved: Option<u64>,
    },
}

/// The memory figures at an out-of-memory, in bytes. Figures that the framework did not report are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OomReport {
    #[serde(default)]
    pub asked: Option<u64>,
    #[serde(default)]
    pub free: Option<u64>,
    #[serde(default)]
    pub total: Option<u64>,
    /// What recognised it: `torch`, `cublas`, `cudnn`, `jax`, `onnxruntime`, `cupy`, `model`, …
    #[serde(default, rename = "where")]
    pub source: String,
    #[serde(default)]
    pub detail: String,
}

/// Why a pass failed, as the program reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The item's publisher is at fault; no retry helps.
    Input,
    /// The program's `run` failed.
    Model,
    /// `run` returned something that is not an output, or not one for each item.
    Output,
    /// Loading failed.
    Load,
    /// The pass was cancelled.
    Cancelled,
    /// The host's memory ran out. A smaller pass need not help.
    HostMemory,
    /// The device is unusable for this process, which has to be started again.
    Device,
}

/// What kind of value an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemKind {
    Text,
    Bytes,
    Json,
    Uri,
}

impl ItemKind {
    pub const ALL: [Self; 4] = [Self::Text, Self::Bytes, Self::Json, Self::Uri];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Bytes => "bytes",
            Self::Json => "json",
            Self::Uri => "uri",
        }
    }
}

/// An item without its payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ItemHeader {
    pub kind: ItemKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// A file in the scratch folder that has the payload; the item's blob is empty then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// An output without its payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputHeader {
    pub kind: OutputKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<vramq_schemas::Dtype>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// A file in the scratch folder that has the payload; there is no blob then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// What kind of value an output is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputKind {
    /// Little-endian elements of `dtype`.
    Embedding,
    /// JSON text.
    Json,
    Bytes,
    /// A reference, as text.
    Uri,
}
