//! Passes of programs: the items that a model gets, and the outputs that come back.

use serde_json::{Map, Value, json};
use vramq_inference::process::protocol::FailureKind;
use vramq_inference::process::{Item, NotTaken, PassEnd, PassEvent, PassRequest};
use vramq_schemas::{Embedding, Output, Values};

use crate::env::{Env, done, ended, json, pid, repository, run, state, texts, until};

#[tokio::test]
async fn items_come_as_they_are_and_outputs_in_their_order() {
    let env = Env::new();
    let pool = env.probe("").await;
    let many: Vec<String> = (0..300).map(|number| format!("echo {number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let expected: Vec<Value> = (0..300).map(|number| json!(number.to_string())).collect();
    assert_eq!(done(&pool, &many).await, expected);
    let request = PassRequest {
        items: vec![
            Item::Bytes { media_type: Some("image/png".to_owned()), bytes: vec![1, 2, 3] },
            Item::Json(json!({"deep": [1, {"a": null}]}).into()),
            Item::Uri("s3://bucket/key".to_owned()),
            // Too large for a frame: it goes by a file.
            Item::Bytes { media_type: None, bytes: vec![1; 70 << 20] },
        ],
        ..PassRequest::default()
    };
    let (outputs, end) = pool.run(request).unwrap().finish().await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    let outputs: Vec<Value> = outputs.into_iter().map(json).collect();
    assert_eq!(outputs[0], json!({"bytes": 3, "sum": 6, "media_type": "image/png"}));
    assert_eq!(outputs[1], json!({"deep": [1, {"a": null}]}));
    assert_eq!(outputs[2], json!("s3://bucket/key"));
    assert_eq!(outputs[3], json!({"bytes": 70 << 20, "sum": 1000, "media_type": null}));
    env.close(pool).await;
}

#[tokio::test]
async fn large_outputs_come_by_a_file() {
    let env = Env::new();
    let pool = env.probe("").await;
    let (outputs, end) = ended(&pool, &["big 40000000", "file a letter", "echo after"]).await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    let bytes = |media_type: &str, bytes: Vec<u8>| Output::Bytes { media_type: media_type.to_owned(), bytes };
    assert_eq!(outputs[0], bytes("application/x-big", vec![b'b'; 40_000_000]));
    assert_eq!(outputs[1], bytes("text/plain", b"a letter".to_vec()));
    env.close(pool).await;
}

#[tokio::test]
async fn parameters_budget_and_deadline_reach_the_model() {
    let env = Env::new();
    let pool = env.probe("item_s = 40").await;
    let mut params = Map::new();
    params.insert("size".to_owned(), json!([1, 2]));
    let request = PassRequest { params, budget: Some(12345), ..texts(&["params", "params"]) };
    let (outputs, _) = pool.run(request).unwrap().finish().await;
    let seen = json(outputs[0].clone());
    assert_eq!((&seen["params"], &seen["budget"]), (&json!({"size": [1, 2]}), &json!(12345)));
    let left = seen["left"].as_f64().unwrap();
    assert!((0.0..=80.0).contains(&left), "{left}");
    env.close(pool).await;
}

/// As inputs, parameters and outputs. Compared as texts, which tell -0.0 from 0.0 and 1 from 1.0.
#[tokio::test]
async fn numbers_come_and_go_bit_for_bit() {
    let env = Env::new();
    let pool = env.probe("").await;
    let mut state = 5_u64;
    let random = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    });
    let hard = [
        0.942_450_283_777_050_3,
        2.225_073_858_507_201e-308,
        5e-324,
        f64::MAX,
        0.1 + 0.2,
        9_007_199_254_740_992.0,
        1.0,
        -0.0,
    ];
    let integers = [json!(i64::MIN), json!(u64::MAX), json!(9_007_199_254_740_993_u64)];
    let doubles = random.take(400).chain(hard).map(Value::from);
    let numbers = Value::from(doubles.chain(integers).collect::<Vec<_>>());
    let mut params = Map::new();
    params.insert("numbers".to_owned(), numbers.clone());
    let items = vec![Item::Json(json!({"numbers": numbers}).into()), Item::Text("params".to_owned())];
    let request = PassRequest { items, params, ..PassRequest::default() };
    let (outputs, end) = pool.run(request).unwrap().finish().await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    let outputs: Vec<Value> = outputs.into_iter().map(json).collect();
    assert_eq!(outputs[0]["numbers"].to_string(), numbers.to_string());
    assert_eq!(outputs[1]["params"]["numbers"].to_string(), numbers.to_string());
    env.close(pool).await;
}

#[tokio::test]
async fn progress_comes_between_the_outputs() {
    let env = Env::new();
    let pool = env.probe("").await;
    let mut pass = run(&pool, &["echo a", "progress b"]);
    let mut events = Vec::new();
    while let Some(event) = pass.next().await {
        events.push(event);
    }
    assert_eq!(events[0], PassEvent::Output { item: 0, output: Output::Json(json!("a")) });
    let progress: Vec<f64> = events
        .iter()
        .filter_map(|event| match event {
            PassEvent::Progress { item: 1, fraction, note } if note.starts_with("step ") => Some(*fraction),
            _ => None,
        })
        .collect();
    assert!(progress.len() >= 3 && progress.is_sorted() && progress.ends_with(&[1.0]), "{progress:?}");
    assert!(matches!(events[events.len() - 2], PassEvent::Output { item: 1, .. }));
    assert!(matches!(events[events.len() - 1], PassEvent::End(PassEnd::Done { .. })));
    env.close(pool).await;
}

/// They are of several callers.
#[tokio::test]
async fn all_items_of_a_pass_are_reported_on() {
    let env = Env::new();
    let pool = env.probe("").await;
    let mut pass = run(&pool, &["progress_of_all 3", "echo b", "echo c"]);
    let mut reports = [0; 3];
    while let Some(event) = pass.next().await {
        if let PassEvent::Progress { item, .. } = event {
            reports[item] += 1;
        }
    }
    assert_eq!(reports, [3; 3]);
    // By an index a thread that comes late could report on another caller's item.
    let said: Vec<Value> = done(&pool, &["progress_of_a_thread"]).await;
    assert_eq!(said, [json!(["a thread of the program's own gives progress() the item, not its index"])]);
    env.close(pool).await;
}

#[tokio::test]
async fn a_failed_item_keeps_the_results_before_it_and_the_process() {
    let env = Env::new();
    let pool = env.probe("").await;
    let before = pid(&pool).await;
    let (outputs, end) = ended(&pool, &["echo a", "raise a bad day", "echo c"]).await;
    assert_eq!(outputs, [Output::Json(json!("a"))]);
    let PassEnd::Failed { kind: FailureKind::Model, item: Some(1), detail, stderr } = end else {
        panic!("{end:?}")
    };
    assert_eq!(detail, "ValueError: a bad day");
    assert!(stderr.contains("Traceback") && stderr.contains("do_raise"), "{stderr}");
    let (_, end) = ended(&pool, &["echo a", "input not for me"]).await;
    let PassEnd::Failed { kind: FailureKind::Input, item: Some(1), detail, .. } = end else {
        panic!("{end:?}")
    };
    assert_eq!(detail, "not for me");
    assert_eq!(pid(&pool).await, before);
    env.close(pool).await;
}

/// Earlier text may be about items of another caller, and the text goes into replies.
#[tokio::test]
async fn output_of_earlier_passes_is_not_in_the_error_of_a_pass() {
    let env = Env::new();
    let pool = env.probe("").await;
    // In a traceback, and in a line that is still in Python's buffer when the pass has its output.
    ended(&pool, &["raise of alice"]).await;
    assert_eq!(done(&pool, &["murmur of alice"]).await, [json!(null)]);
    let (_, end) = ended(&pool, &["raise of bob"]).await;
    let PassEnd::Failed { stderr, .. } = end else { panic!("{end:?}") };
    assert!(stderr.contains("ValueError: of bob") && !stderr.contains("of alice"), "{stderr}");
    done(&pool, &["murmur of alice"]).await;
    let (_, end) = ended(&pool, &["exit 3"]).await;
    let PassEnd::Crashed { stderr, .. } = end else { panic!("{end:?}") };
    assert_eq!(stderr, "last words\n");
    env.close(pool).await;
}

#[tokio::test]
async fn an_invalid_item_is_named_where_the_model_knows_it() {
    let env = Env::new();
    let pool = env.probe("").await;
    let before = pid(&pool).await;
    for (items, named) in [
        // The only item of a pass need not be named.
        (&["unfit"][..], Some(0)),
        (&["unfit text"], Some(0)),
        (&["echo a", "unfit second"], Some(1)),
        (&["unfit second", "echo a"], Some(1)),
        // Among several items an unnamed one is unknown. An item that is not in the pass is ignored.
        (&["unfit", "echo a"], None),
        (&["unfit before", "echo a"], None),
        (&["unfit after", "echo a"], None),
        (&["unfit text", "echo a"], None),
    ] {
        let (_, end) = ended(&pool, items).await;
        let PassEnd::Failed { kind: FailureKind::Input, item, detail, .. } = end else {
            panic!("{items:?}: {end:?}")
        };
        assert_eq!((item, detail.as_str()), (named, "one of them"), "{items:?}");
    }
    assert_eq!(pid(&pool).await, before);
    env.close(pool).await;
}

#[tokio::test]
async fn out_of_memory_is_typed_and_the_same_process_runs_the_next_pass() {
    let env = Env::new();
    let pool = env.probe("").await;
    let before = pid(&pool).await;
    for _ in 0..20 {
        let (outputs, end) = ended(&pool, &["echo a", "oom", "echo c"]).await;
        assert_eq!(outputs, [Output::Json(json!("a"))]);
        let PassEnd::OutOfMemory { item: Some(1), report, by_text: false, .. } = end else {
            panic!("{end:?}")
        };
        assert_eq!((report.asked, report.free, report.total), (Some(3), Some(2), Some(1)));
        assert_eq!((report.source.as_str(), report.detail.as_str()), ("model", "the tests say so"));
        assert_eq!(pid(&pool).await, before);
    }
    env.close(pool).await;
}

#[tokio::test]
async fn three_instances_run_at_the_same_time() {
    let env = Env::new();
    let pool = env.probe("instances = 3").await;
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    // No pass ends before all three run.
    let held = format!("until {}", gate.display());
    let passes: Vec<_> = (0..3).map(|_| run(&pool, &["pid", &held])).collect();
    until("all three run", || (0..3).all(|slot| state(&pool, slot) == "running")).await;
    std::fs::write(&gate, "").unwrap();
    let mut pids = Vec::new();
    for pass in passes {
        let (outputs, end) = pass.finish().await;
        assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
        pids.push(json(outputs[0].clone()).as_i64().unwrap());
    }
    pids.sort_unstable();
    pids.dedup();
    assert_eq!(pids.len(), 3);
    env.close(pool).await;
}

#[tokio::test]
async fn messages_that_are_no_pass_are_not_taken() {
    let env = Env::new();
    let pool = env.probe("").await;
    assert!(matches!(pool.run(PassRequest::default()), Err(NotTaken::Items(0))));
    assert!(matches!(pool.run(texts(&vec!["echo"; 5000])), Err(NotTaken::Items(5000))));
    pool.close().await;
    assert!(matches!(pool.run(texts(&["echo"])), Err(NotTaken::Closed)));
    env.close(pool).await;
}

/// Every type that `run` can return, and what comes of it.
#[tokio::test]
async fn return_types() {
    let env = Env::new();
    let pool = env.start(env.config("returns.py", "")).await.unwrap();
    let vector =
        |values: &[f32]| Output::Embedding(Embedding { values: Values::F32(values.to_vec()), base64: false });
    let bytes = |media_type: &str| Output::Bytes { media_type: media_type.to_owned(), bytes: b"x".to_vec() };
    for (case, outputs) in [
        ("texts", vec![Output::Json(json!("a")), Output::Json(json!("b"))]),
        ("generator", vec![Output::Json(json!({"n": 0})), Output::Json(json!({"n": 1}))]),
        ("lists", vec![Output::Json(json!([1, 2.5])), Output::Json(json!([]))]),
        ("plain", vec![Output::Json(json!(null)), Output::Json(json!(true))]),
        ("embeddings", vec![vector(&[1.0, 2.0]), vector(&[0.5])]),
        ("bytes", vec![bytes("application/octet-stream"), bytes("image/png")]),
        ("uris", vec![Output::Uri("s3://b/0".to_owned()), Output::Uri("s3://b/1".to_owned())]),
        ("array", vec![vector(&[0.0, 1.0]), vector(&[2.0, 3.0])]),
        ("tensor", vec![vector(&[0.0, 1.0]), vector(&[2.0, 3.0])]),
        ("types", vec![vector(&[0.0, 1.0]), vector(&[0.0, 1.0])]),
        ("no-type", vec![bytes("application/octet-stream"), bytes("image/png")]),
    ] {
        let (seen, end) = ended(&pool, &[case, case]).await;
        assert!(matches!(end, PassEnd::Done { .. }), "{case}: {end:?}");
        assert_eq!(seen, outputs, "{case}");
    }
    // The case, how many outputs count, and the error.
    for (case, before, what) in [
        ("none", 0, "run returned None"),
        ("one-text", 0, "run returned one str"),
        ("one-dict", 0, "run returned one dict"),
        ("number", 0, "run returned one int"),
        ("too-few", 0, "1 outputs for 2 items; item 1 has none"),
        ("too-many", 0, "3 outputs for 2 items"),
        ("yields-too-few", 0, "1 outputs for 2 items; item 1 has none"),
        ("yields-too-many", 0, "more than 2 outputs for 2 items"),
        ("set", 1, "item 1: builtins.set is not an output"),
        ("object", 1, "item 1: builtins.object is not an output"),
        ("nan", 1, "item 1: the value cannot be JSON: ['a'] is nan"),
        ("deep-nan", 1, "item 1: the value cannot be JSON: ['a'][1]['b'] is nan"),
        ("number-of-numpy", 1, "['scores'][1] is __main__.FakeScalar; send its .tolist()"),
        ("frame", 0, "run returned one FakeFrame; it must return 2 outputs, one for each item"),
        ("bad-key", 1, "item 1: the value cannot be JSON"),
        ("nan-vector", 1, "item 1: element 1 of the embedding is nan"),
        ("text-vector", 1, "item 1: element 0 of the embedding is str"),
        ("empty-vector", 1, "item 1: an embedding without elements"),
        ("large-f16", 1, "item 1: the embedding does not fit f16"),
        ("uri-surrogate", 1, "item 1: a Uri that is not UTF-8"),
        ("type-number", 1, "item 1: a media type that is int, not a text"),
        ("type-empty", 1, "item 1: an empty media type; None is that of any bytes"),
        ("type-long", 1, "item 1: a media type of 2000006 bytes; the limit is 1024"),
        ("bytes-none", 1, "item 1: Bytes of NoneType, not of bytes"),
        ("file-none", 1, "item 1: a File whose path is NoneType, not a text"),
        ("large-integer", 1, "item 1: the value cannot be JSON: ['a'] is an integer beyond 64 bits"),
        ("large-element", 1, "item 1: element 1 of the embedding is an integer that does not fit f32"),
        ("odd-shape", 1, "item 1: __main__.OddShape is not an output: TypeError: "),
        ("file-outside", 1, "item 1: the file /etc/hostname is not in the scratch folder"),
        ("array-row", 0, "an array of shape (2,); it must have a row for each item; return its .tolist()"),
        ("array-short", 0, "an array of shape (1, 2) for 2 items"),
        ("array-deep", 1, "item 1: an array of shape (2, 2); a vector has one dimension"),
    ] {
        let (outputs, end) = ended(&pool, &[case, case]).await;
        let PassEnd::Failed { kind: FailureKind::Output, item, detail, .. } = end else {
            panic!("{case}: {end:?}")
        };
        assert!(detail.contains(what), "{case}: {detail}");
        assert_eq!(outputs.len(), before, "{case}");
        // With too many or too few outputs it is unknown which items they belong to: the extra one may be the first.
        assert_eq!(item, (before > 0).then_some(before), "{case}");
    }
    assert_eq!(done(&pool, &["texts"]).await, [json!("a")]);
    env.close(pool).await;
}

/// The SDK is one file, which works as a copy, too.
#[tokio::test]
async fn a_copied_sdk_serves() {
    let env = Env::new();
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("vramq.py");
    std::fs::copy(repository().join("python/vramq/models.py"), &copy).unwrap();
    let program = "import vramq\nclass M(vramq.Model):\n  def run(self, items, params):\n    return [vramq.__file__]\nvramq.serve(M)\n";
    std::fs::write(folder.path().join("serve.py"), program).unwrap();
    let mut config = env.config("serve.py", "");
    config.env.clear();
    config.folder = folder.path().to_owned();
    let pool = env.start(config).await.unwrap();
    assert_eq!(done(&pool, &["x"]).await, [json!(copy)]);
    env.close(pool).await;
}

/// A program in another language and without an SDK: the documentation's example.
#[tokio::test]
async fn the_example_in_perl_serves() {
    let env = Env::new();
    let example = repository().join("docs/protocol-examples/shout.pl");
    // What docs/process-protocol.md says of it.
    assert!(std::fs::read_to_string(&example).unwrap().lines().count() <= 40);
    let pool = env.start(env.config_of(&["/usr/bin/perl", example.to_str().unwrap()], "")).await.unwrap();
    assert_eq!(done(&pool, &["loud", "gr\u{fc}n"]).await, [json!("LOUD"), json!("GR\u{dc}N")]);
    assert_eq!(done(&pool, &["again"]).await, [json!("AGAIN")]);
    // One item in the frame, and one in a file.
    let large = "a".repeat(5 << 20);
    let outputs = done(&pool, &["small", &large]).await;
    assert!(
        outputs == [json!("SMALL"), json!(large.to_uppercase())],
        "{} bytes",
        outputs[1].to_string().len()
    );
    let request = PassRequest { items: vec![Item::Uri("s3://b/k".to_owned())], ..PassRequest::default() };
    let (_, end) = pool.run(request).unwrap().finish().await;
    let PassEnd::Failed { kind: FailureKind::Input, item: Some(0), detail, .. } = end else {
        panic!("{end:?}")
    };
    assert_eq!(detail, "the item is of kind uri; the model takes text");
    env.close(pool).await;
}
