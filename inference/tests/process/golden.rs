//! The protocol's bytes, frozen: `golden/` has a file for each frame. A change of them is a new version of the protocol.

use std::path::PathBuf;

use serde_json::json;
use vramq_inference::process::accepts::{Accepted, Accepts};
use vramq_inference::process::frame::Frame;
use vramq_inference::process::protocol::{
    FailureKind, FromModel, ItemHeader, ItemKind, OomReport, OutputHeader, OutputKind, ToModel, VERSION,
};
use vramq_schemas::Dtype;

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(format!("{name}.bin"))
}

/// Compares, or writes when `VRAMQ_GOLDEN=write`.
fn check(name: &str, bytes: &[u8]) {
    if std::env::var("VRAMQ_GOLDEN").as_deref() == Ok("write") {
        std::fs::write(file(name), bytes).unwrap();
    }
    let golden = std::fs::read(file(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(golden == bytes, "{name}: {:?}", String::from_utf8_lossy(bytes));
}

fn item(kind: ItemKind) -> ItemHeader {
    ItemHeader { kind, media_type: None, file: None }
}

fn to_model() -> Vec<(&'static str, Frame<ToModel>)> {
    let params = json!({"size": 512}).as_object().unwrap().clone();
    let png = ItemHeader { media_type: Some("image/png".to_owned()), ..item(ItemKind::Bytes) };
    let large = ItemHeader { file: Some("input-7-2".to_owned()), ..item(ItemKind::Bytes) };
    let items = vec![item(ItemKind::Text), png, large, item(ItemKind::Json), item(ItemKind::Uri)];
    let run =
        ToModel::Run { pass: 7, items, params, budget: Some(1 << 30), deadline_ms: 600_000, measure: false };
    let blobs = [&b"gr\xc3\xbc\xc3\x9fe"[..], b"\x89PNG", b"", b"{\"a\":1}", b"s3://bucket/key"];
    let hello =
        ToModel::Hello { version: VERSION, model: "minilm".into(), device: "cuda:0".into(), items_max: 8 };
    vec![
        ("hello", hello.into()),
        ("run", Frame { message: run, blobs: blobs.map(Vec::from).to_vec() }),
        ("cancel", ToModel::Cancel { pass: 7 }.into()),
        ("ping", ToModel::Ping { number: 3 }.into()),
        ("trim", ToModel::Trim.into()),
        ("shutdown", ToModel::Shutdown.into()),
    ]
}

fn from_model() -> Vec<(&'static str, Frame<FromModel>)> {
    let output = |item, kind, dtype, blob: &[u8]| {
        let output = OutputHeader { kind, dtype, media_type: None, file: None };
        Frame { message: FromModel::Output { pass: 7, item, output }, blobs: vec![blob.to_vec()] }
    };
    let by_file = OutputHeader {
        kind: OutputKind::Bytes,
        dtype: None,
        media_type: Some("video/mp4".to_owned()),
        file: Some("result.mp4".to_owned()),
    };
    let accepts = Accepts([ItemKind::Text, ItemKind::Bytes].map(Accepted::Kind).to_vec());
    let memory = OomReport {
        asked: Some(2 << 30),
        free: Some(1 << 29),
        total: Some(16 << 30),
        source: "torch".to_owned(),
        detail: "CUDA out of memory".to_owned(),
    };
    let ready = FromModel::Ready {
        version: VERSION,
        weights: 91_226_112,
        accepts,
        revision: Some("f32-1a2b".into()),
    };
    let progress = FromModel::Progress { pass: 7, item: 1, fraction: 0.25, note: "step 5 of 20".to_owned() };
    let failed = FromModel::Failed {
        pass: Some(7),
        item: Some(2),
        kind: FailureKind::Input,
        detail: "no image".into(),
        disk_full: false,
    };
    let vector = [0.5f32, -1.0].map(f32::to_le_bytes).concat();
    vec![
        ("ready", ready.into()),
        ("output-embedding", output(0, OutputKind::Embedding, Some(Dtype::F32), &vector)),
        ("output-json", output(1, OutputKind::Json, None, b"{\"label\":\"cat\"}")),
        ("output-file", FromModel::Output { pass: 7, item: 2, output: by_file }.into()),
        ("output-uri", output(3, OutputKind::Uri, None, b"s3://bucket/result")),
        ("progress", progress.into()),
        ("done", FromModel::Done { pass: 7, peak: Some(123_456_789) }.into()),
        ("oom", FromModel::Oom { pass: Some(7), item: Some(4), memory }.into()),
        ("failed", failed.into()),
        ("pong", FromModel::Pong { number: 3, reserved: Some(1 << 28) }.into()),
    ]
}

#[tokio::test]
async fn frames_have_the_bytes_that_they_always_had() {
    for (name, frame) in to_model() {
        let bytes = frame.encode().unwrap();
        check(name, &bytes);
        assert_eq!(Frame::read(&mut &bytes[..]).await.unwrap(), frame, "{name}");
    }
    for (name, frame) in from_model() {
        let bytes = frame.encode().unwrap();
        check(name, &bytes);
        assert_eq!(Frame::read(&mut &bytes[..]).await.unwrap(), frame, "{name}");
    }
    let files = std::fs::read_dir(file("hello").parent().unwrap()).unwrap().count();
    assert_eq!(files, to_model().len() + from_model().len(), "a golden file that no test reads");
}

/// `docs/process-protocol.md` shows the same headers.
#[test]
fn the_documentation_shows_the_golden_headers() {
    let docs = crate::env::repository().join("docs/process-protocol.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let names =
        to_model().into_iter().map(|(name, _)| name).chain(from_model().into_iter().map(|(name, _)| name));
    for name in names {
        let bytes = std::fs::read(file(name)).unwrap();
        let length = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
        let header = std::str::from_utf8(&bytes[4..4 + length]).unwrap();
        assert!(docs.contains(header), "{name} is not in docs/process-protocol.md: {header}");
    }
}
