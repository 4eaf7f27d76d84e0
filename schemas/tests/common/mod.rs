//! Values that the tests share.

#![allow(dead_code, reason = "every test binary uses another part of it")]

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use serde_json::{Map, Value};
use vramq_schemas::{
    BODY_BYTES_MAX, Embedding, Encoding, Failure, Input, ItemProgress, Job, JsonText, Output, Outputs,
    Params, Reason, Sparse, Values, codec,
};

pub const ENCODINGS: [Encoding; 3] = [Encoding::Json, Encoding::MessagePack, Encoding::Bincode];

pub fn extension(encoding: Encoding) -> &'static str {
    match encoding {
        Encoding::Json => "json",
        Encoding::MessagePack => "msgpack",
        Encoding::Bincode => "bincode",
    }
}

/// What a reader of the encoding has of a job: MessagePack carries the values of JSON inputs, the others their texts.
pub fn as_read(job: &Job, encoding: Encoding) -> Job {
    let mut job = job.clone();
    for input in &mut job.inputs {
        if let (Input::Json(text), Encoding::MessagePack) = (&input, encoding) {
            *input = Input::Json(serde_json::from_str::<Value>(text.as_str()).unwrap().into());
        }
    }
    job
}

/// One job of each kind.
pub fn jobs() -> Vec<(&'static str, Job)> {
    let job = |inputs, params: Value| Job {
        model: "minilm".to_owned(),
        inputs,
        params: Params(params.as_object().cloned().unwrap_or_default()),
    };
    vec![
        (
            "job-text",
            job(
                vec![
                    Input::Text("a text".to_owned()),
                    Input::Text(String::new()),
                    Input::Text("ñ, 漢字, \"quoted\", \u{1f468}\u{200d}\u{1f680}, \u{0}\n".to_owned()),
                ],
                Value::Null,
            ),
        ),
        (
            "job-bytes",
            job(vec![Input::Bytes(vec![0, 1, 2, 0xfe, 0xff]), Input::Bytes(Vec::new())], Value::Null),
        ),
        (
            "job-json",
            job(
                vec![
                    Input::Json(JsonText::parse(r#"{"b": [1, 2.50, null],  "a": "\u00e9\""}"#).unwrap()),
                    Input::Text("beside a text".to_owned()),
                    Input::Json(JsonText::parse("null").unwrap()),
                ],
                Value::Null,
            ),
        ),
        ("job-uri", job(vec![Input::Uri("s3://bucket/key".to_owned())], Value::Null)),
        (
            "job-params",
            job(
                vec![Input::Text("a text".to_owned())],
                serde_json::json!({"dtype": "f16", "encoding": "base64", "nested": {"list": [1, -2.5, null, true]}}),
            ),
        ),
    ]
}

/// One reply with every variant of output but the sparse vector.
pub fn outputs() -> Outputs {
    let embedding = |values, base64| Output::Embedding(Embedding { values, base64 });
    let f32s = vec![0.0, -1.5, 0.1, f32::MAX, f32::MIN_POSITIVE];
    let f16s = [0.0, -1.5, 0.1, 65_504.0].map(half::f16::from_f32).to_vec();
    Outputs {
        model: "minilm".to_owned(),
        outputs: vec![
            embedding(Values::F32(f32s.clone()), false),
            embedding(Values::F32(f32s), true),
            embedding(Values::F16(f16s.clone()), false),
            embedding(Values::F16(f16s), true),
            embedding(Values::F32(Vec::new()), false),
            Output::Json(serde_json::json!({"label": "x", "scores": [0.25, null, "y", {}]})),
            Output::Bytes { media_type: "image/png".to_owned(), bytes: vec![0x89, b'P', b'N', b'G', 0xff] },
            Output::Uri("s3://bucket/key".to_owned()),
        ],
    }
}

/// One reply with sparse vectors, which are newer.
pub fn sparse() -> Outputs {
    let sparse = |indices, values| Output::Sparse(Sparse::new(indices, values).unwrap());
    Outputs {
        model: "splade".to_owned(),
        outputs: vec![
            sparse(vec![0, 7, 300, 70_000], vec![0.5, 1.25, 0.1, f32::MAX]),
            sparse(Vec::new(), Vec::new()),
        ],
    }
}

pub fn failure() -> Failure {
    Failure {
        reason: Reason::OutOfMemory,
        error: "out of memory at batch 1: 9 GiB asked, 3 GiB free".to_owned(),
    }
}

pub fn progress() -> ItemProgress {
    ItemProgress { item: 7, fraction: 0.25, note: "step 5 of 20".to_owned() }
}

/// A job whose body has exactly this many bytes: one text of a repeated alphabet.
pub fn job_of(bytes: usize, encoding: Encoding) -> Job {
    let job = |length: usize| Job {
        model: "minilm".to_owned(),
        inputs: vec![Input::Text(('a'..='z').cycle().take(length).collect::<String>())],
        params: Params::default(),
    };
    let around =
        codec::encode(&job(BODY_BYTES_MAX - 1024), encoding).unwrap().len() - (BODY_BYTES_MAX - 1024);
    let job = job(bytes - around);
    assert_eq!(codec::encode(&job, encoding).unwrap().len(), bytes);
    job
}

pub fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_filter("finite", |x| x.is_finite()).prop_map(Value::from),
        ".*".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 8, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..8).prop_map(Value::from),
            btree_map(".*", inner, 0..8)
                .prop_map(|map| Value::Object(map.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

pub fn any_job() -> impl Strategy<Value = Job> {
    let input = prop_oneof![
        ".*".prop_map(Input::Text),
        vec(any::<u8>(), 0..64).prop_map(Input::Bytes),
        ".*".prop_map(Input::Uri),
        any_json().prop_map(|value| Input::Json(JsonText::from(value))),
    ];
    let params = btree_map(".*", any_json(), 0..4).prop_map(|map| Params(map.into_iter().collect()));
    (".*", vec(input, 0..16), params).prop_map(|(model, inputs, params)| Job { model, inputs, params })
}

pub fn any_outputs() -> impl Strategy<Value = Outputs> {
    let finite = any::<f32>().prop_filter("finite", |x| x.is_finite());
    let f32s = vec(finite, 0..32).prop_map(Values::F32);
    let f16s = vec(any::<u16>().prop_map(half::f16::from_bits), 0..32)
        .prop_map(|all| Values::F16(all.into_iter().filter(|x| x.is_finite()).collect()));
    let output = prop_oneof![
        (prop_oneof![f32s, f16s], any::<bool>())
            .prop_map(|(values, base64)| Output::Embedding(Embedding { values, base64 })),
        any_json().prop_map(Output::Json),
        (".*", vec(any::<u8>(), 0..64)).prop_map(|(media_type, bytes)| Output::Bytes { media_type, bytes }),
        ".*".prop_map(Output::Uri),
        btree_map(any::<u32>(), any::<f32>().prop_filter("finite", |x| x.is_finite()), 0..16).prop_map(
            |elements| {
                let (indices, values) = elements.into_iter().unzip();
                Output::Sparse(Sparse::new(indices, values).unwrap())
            }
        ),
    ];
    (".*", vec(output, 0..12)).prop_map(|(model, outputs)| Outputs { model, outputs })
}

pub fn any_failure() -> impl Strategy<Value = Failure> {
    (proptest::sample::select(Reason::ALL.to_vec()), ".*")
        .prop_map(|(reason, error)| Failure { reason, error })
}
