//! Bodies in MessagePack as other libraries write them, and bytes that are not a body.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt;
use std::path::Path;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use vramq_schemas::codec::Body;
use vramq_schemas::{
    DecodeError, Dtype, Encoding, Input, Job, Output, Outputs, PARAMS_BYTES_MAX, Params, codec,
};

/// What a JSON body has in the place of what is read, with bytes as base64.
struct AsJson(Value);

impl<'de> Deserialize<'de> for AsJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AsJsonVisitor)
    }
}

struct AsJsonVisitor;

impl<'de> Visitor<'de> for AsJsonVisitor {
    type Value = AsJson;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<AsJson, E> {
        Ok(AsJson(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<AsJson, E> {
        Ok(AsJson(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<AsJson, E> {
        Ok(AsJson(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<AsJson, E> {
        Ok(AsJson(value.into()))
    }

    fn visit_f32<E>(self, value: f32) -> Result<AsJson, E> {
        // JSON has an f32 in as few digits as it needs.
        Ok(AsJson(serde_json::from_str(&serde_json::to_string(&value).unwrap()).unwrap()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<AsJson, E> {
        Ok(AsJson(value.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<AsJson, E> {
        Ok(AsJson(value.into()))
    }

    fn visit_bytes<E>(self, value: &[u8]) -> Result<AsJson, E> {
        Ok(AsJson(BASE64.encode(value).into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<AsJson, A::Error> {
        let mut items = Vec::new();
        while let Some(AsJson(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(AsJson(items.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<AsJson, A::Error> {
        let mut entries = serde_json::Map::new();
        while let Some((key, AsJson(value))) = map.next_entry::<String, AsJson>()? {
            entries.insert(key, value);
        }
        Ok(AsJson(entries.into()))
    }
}

/// The schemas in `schemas/json` describe both encodings: their bodies differ in bytes alone.
#[test]
fn the_golden_bytes_are_those_of_json_but_for_base64() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let mut compared = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "msgpack") {
            continue;
        }
        let AsJson(found) = rmp_serde::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let json = std::fs::read(path.with_extension("json")).unwrap();
        assert_eq!(found, serde_json::from_slice::<Value>(&json).unwrap(), "{}", path.display());
        compared += 1;
    }
    assert_eq!(compared, 9);
}

/// A value as MessagePack, by another writer than the codec's.
fn packed(value: &Value) -> Vec<u8> {
    rmp_serde::to_vec(value).unwrap()
}

/// A job with one input, whose bytes are given.
fn with_input(input: &[u8]) -> Vec<u8> {
    [b"\x82\xa5model\xa1m\xa6inputs\x91", input].concat()
}

fn read(body: &[u8]) -> Result<Job, DecodeError> {
    codec::decode(body, Encoding::MessagePack)
}

fn malformed<T: Body + fmt::Debug>(body: &[u8]) -> String {
    match codec::decode::<T>(body, Encoding::MessagePack) {
        Err(DecodeError::Malformed(what)) => what,
        other => panic!("{body:x?}: {other:?}"),
    }
}

/// Keys in any order, and lengths in more bytes than they need.
#[test]
fn bodies_that_other_libraries_write_are_read() {
    let inputs: [&[u8]; 6] = [
        b"\xa1a",
        b"\xda\x00\x01b",
        b"\x81\xa5bytes\xc5\x00\x02\x00\xff",
        b"\xde\x00\x01\xd9\x03uri\xa8s3://b/k",
        b"\x81\xa4json\xc0",
        b"\x81\xa4json\xca\x3d\xcc\xcc\xcd",
    ];
    let body = [
        &b"\xde\x00\x03\xa6inputs\xdc\x00\x06"[..],
        &inputs.concat(),
        b"\xa6params\x81\xa1x\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xa5model\xd9\x01m",
    ];
    let job = read(&body.concat()).unwrap();
    let json = |text: &str| Input::Json(vramq_schemas::JsonText::parse(text).unwrap());
    let expected = [
        Input::Text("a".to_owned()),
        Input::Text("b".to_owned()),
        Input::Bytes(vec![0, 0xff]),
        Input::Uri("s3://b/k".to_owned()),
        json("null"),
        // An f32 in as few digits as it needs.
        json("0.1"),
    ];
    assert_eq!((job.model.as_str(), job.inputs.as_slice()), ("m", &expected[..]));
    assert_eq!(job.params, Params(json!({"x": u64::MAX}).as_object().unwrap().clone()));
}

/// A body of JSON without bytes is the same body when any library writes it as MessagePack.
#[test]
fn a_json_body_converted_is_the_same_job() {
    let value = json!({"model": "m", "inputs": ["a", {"json": {"b": [1, -2, 2.5, true, null, "é\n\""]}}],
        "params": {"dtype": "f16"}});
    let as_json: Job = codec::decode(value.to_string().as_bytes(), Encoding::Json).unwrap();
    assert_eq!(read(&packed(&value)), Ok(as_json));
}

#[test]
fn faults_name_the_item() {
    let input = |value: Value| with_input(&packed(&value));
    for (body, said) in [
        (with_input(b"\x07"), "inputs[0]: invalid type: integer `7`, expected a text"),
        (with_input(b"\xc0"), "inputs[0]"),
        (with_input(b"\xc4\x01a"), "inputs[0]: invalid type: byte array"),
        (input(json!({"bytes": "AA=="})), "MessagePack has `bin`"),
        (input(json!({"bytes": [1, 2]})), "expected <bin>"),
        (input(json!({"file": "x"})), "unknown field `file`"),
        (input(json!({"uri": "x", "json": 1})), "second key"),
        (input(json!({})), "inputs[0]"),
        (with_input(b"\x81\xa3uri\xc4\x01x"), "expected a text"),
        (with_input(b"\x81\xc4\x03uri\xa1x"), "expected a text"),
        (with_input(b"\x81\xa4json\x81\x01\x02"), "expected a text as key"),
        (with_input(b"\x81\xa4json\x91\xc4\x01x"), "expected a value that JSON has"),
        (with_input(b"\x81\xa4json\xd4\x01x"), "expected a value that JSON has"),
        (with_input(b"\x81\xa4json\xca\x7f\xc0\x00\x00"), "NaN"),
        (with_input(b"\x81\xa4json\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00"), "inf"),
        (with_input(b"\xa2\xff\xfe"), "utf8"),
        (packed(&json!({"inputs": []})), "missing field `model`"),
        (packed(&json!({"model": "m"})), "missing field `inputs`"),
        (packed(&json!({"model": "m", "inputs": [], "param": {}})), "unknown field `param`"),
        (packed(&json!({"model": "m", "inputs": [], "params": []})), "params"),
        (packed(&json!({"model": "m", "inputs": null})), "a list of at most"),
        (packed(&json!({"model": 1, "inputs": []})), "invalid type: integer"),
        (packed(&json!(null)), "unit"),
        (Vec::new(), "reading marker"),
    ] {
        let what = malformed::<Job>(&body);
        assert!(what.starts_with("MessagePack: ") && what.contains(said), "{body:x?}: {what}");
    }
    let output = |value: Value| packed(&json!({"model": "m", "outputs": [value]}));
    for (body, said) in [
        (output(json!({"embedding": "AAAA"})), "MessagePack has `bin`"),
        (output(json!({"embedding": [1, "x"]})), "outputs[0]"),
        (output(json!({"uri": "x", "json": 1})), "exactly one of"),
    ] {
        let what = malformed::<Outputs>(&body);
        assert!(what.contains(said), "{body:x?}: {what}");
    }
}

#[test]
fn a_body_ends_where_it_ends() {
    let good = with_input(b"\xa1a");
    read(&good).unwrap();
    for end in 0..good.len() {
        malformed::<Job>(&good[..end]);
    }
    // Whole values, and beginnings of some.
    for more in [&b"\x00"[..], b"\xc0", b"\xa1", b"\x91", b"\xcb", b"\xc4", b"\xc1", b"{}"] {
        assert!(malformed::<Job>(&[&good, more].concat()).contains("follow the body"), "{more:x?}");
    }
}

/// As deep as in JSON, and no level deeper.
#[test]
fn the_depth_of_values_is_bounded() {
    let nested = |depth: usize| [&b"\x81\xa4json"[..], &b"\x91".repeat(depth), b"\xc0"].concat();
    let in_json = |depth: usize| format!("{}null{}", "[".repeat(depth), "]".repeat(depth));
    for (depth, fits) in [(126, true), (127, true), (128, false), (129, false), (8_000_000, false)] {
        assert_eq!(read(&with_input(&nested(depth))).is_ok(), fits, "{depth}");
        let body = format!(r#"{{"model": "m", "inputs": [{{"json": {}}}]}}"#, in_json(depth));
        assert_eq!(codec::decode::<Job>(body.as_bytes(), Encoding::Json).is_ok(), fits, "{depth} in JSON");
    }
}

/// A value is bounded by what it takes as JSON text, as in a JSON body.
#[test]
fn values_are_bounded_as_text() {
    let nils = |count: u32| [&[0xdd][..], &count.to_be_bytes(), &vec![0xc0; count as usize]].concat();
    let json = |count| with_input(&[&b"\x81\xa4json"[..], &nils(count)].concat());
    let Input::Json(text) = read(&json(3_000_000)).unwrap().inputs.remove(0) else { panic!("no JSON") };
    assert_eq!(text.as_str().len(), 2 + 5 * 3_000_000 - 1);
    assert!(malformed::<Job>(&json(3_400_000)).contains("as JSON text"));
    let params =
        |count: u32| [&b"\x83\xa5model\xa1m\xa6inputs\x90\xa6params\x81\xa1x"[..], &nils(count)].concat();
    let fits = u32::try_from(PARAMS_BYTES_MAX).unwrap() / 5 - 2;
    read(&params(fits)).unwrap();
    assert!(
        malformed::<Job>(&params(fits + 3)).contains("params: the JSON values take more than 65536 bytes")
    );
}

#[test]
fn vectors_are_numbers_or_bytes() {
    let vector = |body: &[u8]| {
        let body = [b"\x82\xa5model\xa1m\xa7outputs\x91", body].concat();
        match codec::decode::<Outputs>(&body, Encoding::MessagePack).unwrap().outputs.remove(0) {
            Output::Embedding(embedding) => embedding,
            other => panic!("{other:?}"),
        }
    };
    // As f32, as f64 and as whole numbers.
    let numbers =
        vector(b"\x81\xa9embedding\x93\xca\x3f\x00\x00\x00\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\x01");
    assert_eq!((numbers.values.to_f32(), numbers.base64), (vec![0.5, -0.5, 1.0], false));
    let bytes = vector(b"\x82\xa5dtype\xa3f16\xa9embedding\xc4\x04\x00\x38\x00\xb8");
    assert_eq!((bytes.values.dtype(), bytes.values.to_f32()), (Dtype::F16, vec![0.5, -0.5]));
}
