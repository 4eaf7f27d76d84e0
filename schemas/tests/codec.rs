//! Bodies: round trips, and bytes that are not a body.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    ENCODINGS, any_failure, any_job, any_outputs, as_read, failure, jobs, outputs, progress, sparse,
};
use proptest::prelude::*;
use serde_json::Value;
use vramq_schemas::{
    DecodeError, Embedding, Encoding, Failure, ITEMS_MAX, Input, ItemProgress, Job, JsonText, Output,
    Outputs, PARAMS_BYTES_MAX, Params, Reason, Sparse, Values, codec,
};

/// Decodes as everything; the only wrong thing is a panic.
fn decode_all(bytes: &[u8]) {
    for encoding in ENCODINGS {
        let _ = codec::decode::<Job>(bytes, encoding);
        let _ = codec::decode::<Outputs>(bytes, encoding);
        let _ = codec::decode::<Failure>(bytes, encoding);
        let _ = codec::decode::<ItemProgress>(bytes, encoding);
    }
}

fn valid_bodies() -> Vec<Vec<u8>> {
    let mut bodies = Vec::new();
    for encoding in ENCODINGS {
        bodies.extend(jobs().iter().map(|(_, job)| codec::encode(job, encoding).unwrap()));
        bodies.push(codec::encode(&outputs(), encoding).unwrap());
        bodies.push(codec::encode(&sparse(), encoding).unwrap());
        bodies.push(codec::encode(&failure(), encoding).unwrap());
        bodies.push(codec::encode(&progress(), encoding).unwrap());
    }
    bodies
}

fn malformed<T: codec::Body + std::fmt::Debug>(body: &[u8], encoding: Encoding) -> String {
    match codec::decode::<T>(body, encoding) {
        Err(DecodeError::Malformed(what)) => what,
        other => panic!("{other:?}"),
    }
}

proptest! {
    #[test]
    fn jobs_come_back(job in any_job()) {
        for encoding in ENCODINGS {
            let body = codec::encode(&job, encoding).unwrap();
            let read = codec::decode::<Job>(&body, encoding);
            prop_assert_eq!(read, Ok(as_read(&job, encoding)));
        }
    }

    #[test]
    fn outputs_come_back(outputs in any_outputs()) {
        for encoding in ENCODINGS {
            let body = codec::encode(&outputs, encoding).unwrap();
            let read = codec::decode::<Outputs>(&body, encoding);
            prop_assert_eq!(read.as_ref(), Ok(&outputs));
        }
    }

    #[test]
    fn failures_come_back(failure in any_failure()) {
        for encoding in ENCODINGS {
            let body = codec::encode(&failure, encoding).unwrap();
            let read = codec::decode::<Failure>(&body, encoding);
            prop_assert_eq!(read.as_ref(), Ok(&failure));
        }
    }

    #[test]
    fn arbitrary_bytes_are_an_error_at_worst(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        decode_all(&bytes);
        decode_all(&[&[1], &bytes[..]].concat());
    }

    #[test]
    fn mutated_bodies_are_an_error_at_worst(
        body in proptest::sample::select(valid_bodies()),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 1..6),
    ) {
        let mut body = body;
        for (index, byte, edit) in edits {
            if body.is_empty() {
                break;
            }
            let at = index.index(body.len());
            match edit {
                0 => body[at] = byte,
                1 => body.insert(at, byte),
                _ => body.truncate(at),
            }
        }
        decode_all(&body);
    }
}

#[test]
fn the_versions_and_the_tails_of_bincode() {
    let good = codec::encode(&failure(), Encoding::Bincode).unwrap();
    assert_eq!(good[0], 1);
    let decode = |body: &[u8]| codec::decode::<Failure>(body, Encoding::Bincode);
    for version in [0, 4, 255] {
        let other = [&[version], &good[1..]].concat();
        assert_eq!(decode(&other), Err(DecodeError::Version(version)));
    }
    for body in [&[][..], &good[..1], &good[..good.len() - 1], &[&good[..], &[0]].concat()] {
        assert!(matches!(decode(body), Err(DecodeError::Malformed(_))), "{body:?}");
    }
}

/// A worker of a later version may have a reason that this side does not know. Its text still counts.
#[test]
fn an_unknown_reason_is_another_one() {
    let failure = Failure { reason: Reason::StoreUnavailable, error: "why".to_owned() };
    for encoding in ENCODINGS {
        let mut body = codec::encode(&failure, encoding).unwrap();
        // A letter of its name, or in bincode the number of the variant.
        let at = body.windows(5).position(|word| word == b"store").unwrap_or(1);
        body[at] = b'x';
        let read = codec::decode::<Failure>(&body, encoding).unwrap();
        assert_eq!((read.reason, read.error.as_str()), (Reason::Other, "why"), "{encoding:?}");
        assert!(codec::encode(&read, encoding).is_err(), "no worker fails a job so");
    }
    assert!("other".parse::<Reason>().is_err());
}

/// A worker from before JSON inputs rejects only bodies with JSON inputs as `unsupported-encoding`: no other body is of version 2.
#[test]
fn only_json_inputs_need_the_second_version() {
    for (name, job) in jobs() {
        let body = codec::encode(&job, Encoding::Bincode).unwrap();
        assert_eq!(body[0], if name == "job-json" { 2 } else { 1 }, "{name}");
        let other = [&[3 - body[0]], &body[1..]].concat();
        match (name, codec::decode::<Job>(&other, Encoding::Bincode)) {
            ("job-json", Err(DecodeError::Malformed(what))) => {
                assert!(what.contains("needs version 2"), "{what}");
            }
            (_, read) => assert_eq!(read.as_ref(), Ok(&job), "{name}"),
        }
    }
}

/// As texts, which tell -0.0 from 0.0 and 1 from 1.0.
#[test]
fn numbers_of_json_come_back_bit_for_bit() {
    let doubles = [
        0.942_450_283_777_050_3,
        2.225_073_858_507_201e-308,
        5e-324,
        f64::MAX,
        0.1 + 0.2,
        9_007_199_254_740_992.0,
        1.0,
        -0.0,
    ];
    let integers = [Value::from(i64::MIN), Value::from(u64::MAX), Value::from(9_007_199_254_740_993_u64)];
    let numbers: Vec<Value> = doubles.into_iter().map(Value::from).chain(integers).collect();
    let numbers = Value::from(numbers);
    let text = numbers.to_string();
    let job = Job {
        model: "m".to_owned(),
        inputs: vec![Input::Json(JsonText::from(&numbers))],
        params: Params([("numbers".to_owned(), numbers.clone())].into_iter().collect()),
    };
    let outputs = Outputs { model: "m".to_owned(), outputs: vec![Output::Json(numbers)] };
    for encoding in ENCODINGS {
        let job: Job = codec::decode(&codec::encode(&job, encoding).unwrap(), encoding).unwrap();
        assert_eq!(job.params.0["numbers"].to_string(), text, "{encoding:?}");
        let [Input::Json(input)] = &job.inputs[..] else { panic!("{job:?}") };
        assert_eq!(input.as_str(), text, "{encoding:?}");
        let read: Outputs = codec::decode(&codec::encode(&outputs, encoding).unwrap(), encoding).unwrap();
        let [Output::Json(output)] = &read.outputs[..] else { panic!("{read:?}") };
        assert_eq!(output.to_string(), text, "{encoding:?}");
    }
}

#[test]
fn content_types() {
    for (named, encoding) in [
        (None, Encoding::Json),
        (Some("application/json"), Encoding::Json),
        (Some("Application/JSON ; charset=utf-8"), Encoding::Json),
        (Some("application/vnd.vramq.v1+bincode"), Encoding::Bincode),
        (Some("application/msgpack"), Encoding::MessagePack),
        (Some("application/vnd.msgpack"), Encoding::MessagePack),
        (Some("application/x-msgpack"), Encoding::MessagePack),
    ] {
        assert_eq!(Encoding::of(named), Ok(encoding), "{named:?}");
    }
    for named in ["", "text/plain", "application/vnd.vramq.v2+bincode", "application/jsonx"] {
        assert!(matches!(Encoding::of(Some(named)), Err(DecodeError::ContentType(_))), "{named}");
    }
    let Err(DecodeError::ContentType(shown)) = Encoding::of(Some(&"é".repeat(200))) else {
        panic!("it is no content type")
    };
    assert_eq!(shown.chars().count(), 80);
}

#[test]
fn faults_name_the_item() {
    for (body, said) in [
        (r#"{"model": "m", "inputs": ["a", 1]}"#, "inputs[1]"),
        (r#"{"model": "m", "inputs": [{"bytes": "?"}]}"#, "bytes are not base64"),
        (r#"{"model": "m", "inputs": [{"file": "x"}]}"#, "unknown field `file`"),
        (r#"{"model": "m", "inputs": [{"uri": "x", "bytes": ""}]}"#, "second key"),
        (r#"{"model": "m", "inputs": [{}]}"#, "inputs[0]"),
        (r#"{"model": "m", "inputs": [{"json": 1, "uri": ""}]}"#, "second key"),
        (r#"{"model": "m", "inputs": ["a", {"json": "\ud800"}]}"#, "inputs[1]"),
        (r#"{"model": "m", "inputs": "a"}"#, "a list of at most"),
        (r#"{"model": "m", "inputs": null}"#, "a list of at most"),
        (r#"{"inputs": []}"#, "missing field `model`"),
        (r#"{"model": "m"}"#, "missing field `inputs`"),
        (r#"{"model": 1, "inputs": []}"#, "expected a text"),
        (r#"{"model": "m", "inputs": [], "params": []}"#, "params"),
        (r#"{"model": "m", "inputs": [], "param": {}}"#, "unknown field `param`"),
        (r#"{"model": "m", "inputs": []} x"#, "trailing characters"),
        ("", "EOF"),
    ] {
        let what = malformed::<Job>(body.as_bytes(), Encoding::Json);
        assert!(what.contains(said), "{body}: {what}");
    }
    for (body, said) in [
        (r#"{"model": "m", "outputs": [{"embedding": "AA=="}]}"#, "not a whole number of 4-byte elements"),
        (r#"{"model": "m", "outputs": [{"uri": "x", "json": 1}]}"#, "exactly one of"),
        (r#"{"model": "m", "outputs": [{}]}"#, "exactly one of"),
        (r#"{"model": "m", "outputs": [{"embedding": [1, "x"]}]}"#, "outputs[0]"),
    ] {
        let what = malformed::<Outputs>(body.as_bytes(), Encoding::Json);
        assert!(what.contains(said), "{body}: {what}");
    }
}

/// Parsers may quote megabytes, which must not reach the log.
#[test]
fn faults_are_short() {
    let key = "é".repeat(1_000_000);
    let what = malformed::<Job>(format!(r#"{{"{key}": 1}}"#).as_bytes(), Encoding::Json);
    assert!(what.len() <= 512, "{}", what.len());
}

#[test]
fn the_number_of_items_is_bounded() {
    for encoding in ENCODINGS {
        let mut job = jobs().remove(0).1;
        job.inputs = vec![Input::Text(String::new()); ITEMS_MAX];
        let body = codec::encode(&job, encoding).unwrap();
        assert_eq!(codec::decode::<Job>(&body, encoding).unwrap().inputs.len(), ITEMS_MAX);
        job.inputs.push(Input::Text(String::new()));
        let body = codec::encode(&job, encoding).unwrap();
        assert!(malformed::<Job>(&body, encoding).contains("at most 65536 inputs"));
    }
}

/// serde would read a list of a body's values in their order.
#[test]
fn a_body_is_an_object_or_a_map() {
    for list in [
        &b"\x92\xa1m\x91\xa1x"[..],
        b"\x90",
        b"\xdc\x00\x02\xa1m\x91\xa1x",
        b"\xdd\x00\x00\x00\x02\xa1m\x91\xa1x",
    ] {
        assert!(malformed::<Job>(list, Encoding::MessagePack).contains("it must be a map"), "{list:x?}");
    }
    for list in [r#"["m", ["x"]]"#, " \n[\"m\", [\"x\"], {}]", "[]"] {
        assert!(malformed::<Job>(list.as_bytes(), Encoding::Json).contains("it must be an object"), "{list}");
        assert!(
            malformed::<Outputs>(list.as_bytes(), Encoding::Json).contains("it must be an object"),
            "{list}"
        );
    }
    codec::decode::<Job>(b" \n{\"model\": \"m\", \"inputs\": [\"x\"]}", Encoding::Json).unwrap();
}

/// In the body, and in the value.
#[test]
fn a_fault_in_a_json_value_says_where_it_is() {
    let value = "{\"x\":\n1e999}";
    for (body, which) in [
        (format!("{{\"model\": \"m\",\n\"inputs\": [\"a\",\n{{\"json\": {value}}}]}}"), "inputs[1]"),
        (format!("{{\"model\": \"m\", \"inputs\": [\"a\"],\n\n\"params\": {value}}}"), "params"),
    ] {
        let fault = malformed::<Job>(body.as_bytes(), Encoding::Json);
        let begin = format!("JSON: {which}: number out of range in line 2, column ");
        assert!(fault.starts_with(&begin) && fault.contains(" of the value at line 4 column "), "{fault}");
    }
}

#[test]
fn params_are_bounded_in_size_and_depth() {
    let with = |params: &str| format!(r#"{{"model": "m", "inputs": [], "params": {params}}}"#);
    let fits = format!(r#"{{"x": "{}"}}"#, "y".repeat(PARAMS_BYTES_MAX - 9));
    codec::decode::<Job>(with(&fits).as_bytes(), Encoding::Json).unwrap();
    let large = format!(r#"{{"x": "{}"}}"#, "y".repeat(PARAMS_BYTES_MAX));
    assert!(malformed::<Job>(with(&large).as_bytes(), Encoding::Json).contains("at most 65536 are allowed"));
    for depth in [1_000, 30_000, 8_000_000] {
        let nested = format!(r#"{{"x": {}{}}}"#, "[".repeat(depth), "]".repeat(depth));
        malformed::<Job>(with(&nested).as_bytes(), Encoding::Json);
        malformed::<Job>(
            format!(r#"{{"model": "m", "inputs": [{{"json": {nested}}}]}}"#).as_bytes(),
            Encoding::Json,
        );
        let nested = "[".repeat(depth);
        malformed::<Job>(with(&nested).as_bytes(), Encoding::Json);
        malformed::<Outputs>(
            format!(r#"{{"model": "m", "outputs": [{{"json": {nested}"#).as_bytes(),
            Encoding::Json,
        );
    }
}

#[test]
fn progress_is_asked_for_by_a_parameter_that_engines_do_not_see() {
    let mut params = Params::default();
    assert_eq!(params.take_progress(), Ok(false));
    params.0.insert("size".to_owned(), 7.into());
    params.ask_for_progress();
    assert_eq!(params.take_progress(), Ok(true));
    assert_eq!(params.0.keys().collect::<Vec<_>>(), ["size"]);
    params.0.insert("progress".to_owned(), "yes".into());
    assert_eq!(params.take_progress(), Err("params.progress must be true or false".to_owned()));
}

/// An element that is not finite has no JSON number, and must not silently become `null`.
#[test]
fn elements_that_are_not_finite() {
    for bad in [f32::NAN, f32::INFINITY] {
        for values in [Values::F32(vec![0.5, bad]), Values::F16(vec![half::f16::from_f32(bad)])] {
            let outputs = |base64| Outputs {
                model: "m".to_owned(),
                outputs: vec![Output::Embedding(Embedding { values: values.clone(), base64 })],
            };
            let refused = codec::encode(&outputs(false), Encoding::Json).unwrap_err();
            assert!(refused.to_string().contains("not finite"), "{refused}");
            for (base64, encoding) in [
                (true, Encoding::Json),
                (false, Encoding::Bincode),
                (false, Encoding::MessagePack),
                (true, Encoding::MessagePack),
            ] {
                let body = codec::encode(&outputs(base64), encoding).unwrap();
                let read: Outputs = codec::decode(&body, encoding).unwrap();
                // Compared as written: NaN equals nothing.
                assert_eq!(codec::encode(&read, encoding).unwrap(), body);
            }
        }
    }
}

/// A client from before sparse vectors says that it cannot read the version of them alone.
#[test]
fn only_sparse_vectors_need_the_third_version() {
    assert_eq!(codec::encode(&outputs(), Encoding::Bincode).unwrap()[0], 1);
    let mut body = codec::encode(&sparse(), Encoding::Bincode).unwrap();
    assert_eq!(body[0], 3);
    body[0] = 2;
    let refused = malformed::<Outputs>(&body, Encoding::Bincode);
    assert!(refused.contains("needs version 3"), "{refused}");
}

#[test]
fn sparse_vectors_are_checked() {
    for (indices, values, why) in [
        (vec![1, 2], vec![0.5], "2 indices and 1 values"),
        (vec![2, 1], vec![0.5, 0.5], "do not ascend: 2, 1"),
        (vec![7, 7], vec![0.5, 0.5], "do not ascend: 7, 7"),
        (vec![3], vec![f32::NAN], "the value NaN at index 3"),
        (vec![3], vec![f32::INFINITY], "the value inf at index 3"),
    ] {
        let refused = Sparse::new(indices, values).unwrap_err();
        assert!(refused.contains(why), "{refused}");
    }
    for (sparse, why) in [
        (r#"{"indices": [1]}"#, "`indices` and `values`"),
        (r#"{"indices": [1], "values": [0.5], "more": 1}"#, "unknown field `more`"),
        (r#"{"indices": [-1], "values": [0.5]}"#, "-1"),
        (r#"{"indices": [2, 1], "values": [0.5, 1]}"#, "do not ascend"),
        (r#"{"indices": [4294967296], "values": [0.5]}"#, "4294967296"),
        (r#"{"indices": [1], "values": [1e39]}"#, "number out of range"),
        ("[1]", "a sparse vector with the keys"),
    ] {
        let body = format!(r#"{{"model": "m", "outputs": [{{"sparse": {sparse}}}]}}"#);
        let refused = malformed::<Outputs>(body.as_bytes(), Encoding::Json);
        assert!(refused.contains(why), "{refused}");
    }
    let both = br#"{"model": "m", "outputs": [{"json": 1, "sparse": {"indices": [], "values": []}}]}"#;
    let refused = malformed::<Outputs>(both, Encoding::Json);
    assert!(refused.contains("exactly one of"), "{refused}");
}
