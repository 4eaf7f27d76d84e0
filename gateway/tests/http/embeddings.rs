//! Embeddings, by the routes of each API: vectors, counts of tokens, token ids, dimensions and prompts; and the list of models.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};

use crate::harness::{ECHO, MINILM, Setup};

fn vector(value: &Value) -> Vec<f64> {
    value.as_array().expect("a vector").iter().map(|x| x.as_f64().expect("a number")).collect()
}

#[test]
fn embeddings_are_the_models_whatever_route_they_come_by() {
    let setup = Setup::with(&[MINILM]);
    let texts = json!(["A man is eating food.", "Someone has a meal.", "The stock market fell."]);
    let openai = setup.next().post("/v1/embeddings", &json!({"model": MINILM, "input": texts}));
    assert_eq!(openai.status, 200, "{openai:?}");
    let openai = openai.json();
    assert_eq!((&openai["object"], &openai["model"]), (&json!("list"), &json!(MINILM)));
    let vectors: Vec<_> =
        openai["data"].as_array().unwrap().iter().map(|item| vector(&item["embedding"])).collect();
    assert_eq!(vectors.len(), 3);
    assert!(vectors.iter().all(|v| v.len() == 384));
    // Sentences of one meaning are closer than others: these are MiniLM's vectors, in order.
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    assert!(dot(&vectors[0], &vectors[1]) > 0.5 && dot(&vectors[0], &vectors[2]) < 0.3);
    for path in ["/embed", "/"] {
        let tei = setup.next().post(path, &json!({"inputs": texts}));
        assert_eq!(tei.status, 200, "{tei:?}");
        let tei: Vec<_> = tei.json().as_array().unwrap().iter().map(vector).collect();
        assert_eq!(tei, vectors, "{path}");
        let refused = setup.next().post(path, &json!({"inputs": []}));
        assert_eq!((refused.status, &refused.json()["error_type"]), (400, &json!("empty")), "{path}");
    }
    let job = setup.next().send(
        "POST",
        "/v1/jobs",
        &[("prefer", "wait=60")],
        Some(&json!({"model": MINILM, "inputs": texts})),
    );
    let job = job.json();
    assert_eq!(job["state"], "done");
    assert_eq!(vector(&job["outputs"][2]["embedding"]), vectors[2]);
    let single = setup.next().post("/v1/embeddings", &json!({"model": MINILM, "input": texts[0]})).json();
    assert_eq!(vector(&single["data"][0]["embedding"]), vectors[0]);
}

/// The counts are those of Hugging Face's tokenizer, with the tokens that frame a text, and cut as the model's files say:
/// `t = Tokenizer.from_file("models/all-MiniLM-L6-v2/tokenizer.json"); t.no_padding(); t.enable_truncation(256);
/// len(t.encode(text).ids)` with tokenizers 0.22.1 for Python.
#[test]
fn usage_is_the_models_count_of_tokens() {
    let setup = Setup::with(&[MINILM]);
    let counted = [
        ("A man is eating food.".to_owned(), 8),
        ("Überraschung: naïve café".to_owned(), 9),
        ("東京 is 🗼".to_owned(), 6),
        ("unbelievably tokenised ".repeat(3), 23),
        ("word ".repeat(1000), 256),
    ];
    let ask = |input: &Value| {
        let answer = setup.next().post("/v1/embeddings", &json!({"model": MINILM, "input": input}));
        assert_eq!((answer.status, answer.header("x-vramq-usage")), (200, None), "{answer:?}");
        let usage = answer.json()["usage"].clone();
        assert_eq!(usage["prompt_tokens"], usage["total_tokens"]);
        usage["total_tokens"].as_u64().expect("a count")
    };
    for (text, tokens) in &counted {
        for _ in &setup.gateways {
            assert_eq!(ask(&json!(text)), *tokens, "{text:.40}");
        }
    }
    let (texts, tokens): (Vec<_>, Vec<u64>) = counted.into_iter().unzip();
    assert_eq!(ask(&json!(texts)), tokens.iter().sum::<u64>());
    // As many texts as a request may have, in many passes.
    assert_eq!(ask(&json!(vec!["A man is eating food."; 2048])), 2048 * 8);
    let job = json!({"model": MINILM, "inputs": texts});
    let job = setup.next().send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&job)).json();
    assert_eq!(job["tokens"], json!(tokens.iter().sum::<u64>()));
}

/// A client that sends tokens gets the vectors of their texts, from a gateway that knows the vocabulary; from another one, an error.
#[test]
fn token_ids_are_the_texts_that_they_stand_for() {
    let mut setup = Setup::new();
    setup.worker(&[MINILM], &[]);
    let file = setup.folder.path().join("words.tiktoken");
    // As in OpenAI's vocabularies: blanks belong to the word that follows, and a token may be a part of a character.
    let tokens: [&[u8]; 6] = [b"A man", b" is eating", b" food.", b"caf", b"\xc3", b"\xa9"];
    let lines =
        tokens.iter().enumerate().map(|(at, bytes)| format!("{} {}\n", BASE64.encode(bytes), at + 10));
    let long = "x ".repeat(300_000);
    let lines = lines.collect::<String>() + &format!("{} 20\n", BASE64.encode(&long));
    std::fs::write(&file, lines).unwrap();
    let setting = format!("openai.vocabulary={}", file.display());
    for _ in 0..2 {
        setup.gateway(&["--set", &setting]);
    }
    setup.wait_for_models(&[MINILM]);
    let ask = |input: &Value| setup.next().post("/v1/embeddings", &json!({"model": MINILM, "input": input}));
    let data = |input: Value| {
        let answer = ask(&input);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    };
    for (ids, texts) in [
        (json!([10, 11, 12]), json!(["A man is eating food."])),
        (json!([[10, 11, 12], [13, 14, 15]]), json!(["A man is eating food.", "café"])),
    ] {
        assert_eq!(data(ids), data(texts));
    }
    for wrong in [json!([10, 99]), json!([[10], [9]]), json!([[10], []]), json!([10, -1]), json!([10, "x"])] {
        let refused = ask(&wrong);
        assert_eq!(
            (refused.status, &refused.json()["error"]["param"]),
            (400, &json!("input")),
            "{refused:?}"
        );
    }
    setup.gateway(&[]);
    setup.wait_for_models(&[MINILM]);
    let body = json!({"model": MINILM, "input": [[10, 11, 12]]});
    let refused = setup.gateways[2].post("/v1/embeddings", &body);
    assert!(
        refused.status == 400 && refused.text.contains("check_embedding_ctx_length=False"),
        "{refused:?}"
    );
    // Decoded texts take memory like sent ones. Each of the two inputs fits alone, but not both in one request.
    setup.gateway(&["--set", &setting, "--set", "http.body_mib_max=1", "--set", "http.bodies_mib_max=1"]);
    setup.wait_for_models(&[MINILM]);
    for (input, status) in [(json!([&long]), 200), (json!([[20]]), 200), (json!([&long, [20]]), 413)] {
        let answer = setup.gateways[3].post("/v1/embeddings", &json!({"model": MINILM, "input": input}));
        assert_eq!(answer.status, status, "{}", answer.text.chars().take(300).collect::<String>());
    }
}

/// A model that has prompts: `document` and `query`.
fn prompted() -> String {
    format!("prompted={}/../inference/tests/fixtures/tiny-mean-normalize-v6-f16", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn dimensions_and_prompts_reach_the_model() {
    let mut setup = Setup::new();
    setup.worker(&[], &["--model", &prompted()]);
    for _ in 0..2 {
        setup.gateway(&["--set", "model.prompted.matryoshka=true"]);
    }
    setup.wait_for_models(&["prompted"]);
    let ask = |path: &str, body: Value| setup.next().post(path, &body);
    let openai = |more: Value| {
        let mut body = json!({"model": "prompted", "input": "the cat sat on the mat"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ask("/v1/embeddings", body)
    };
    let whole = vector(&openai(json!({})).json()["data"][0]["embedding"]);
    let cut = vector(&openai(json!({"dimensions": 4})).json()["data"][0]["embedding"]);
    let length = whole[..4].iter().map(|x| x * x).sum::<f64>().sqrt();
    assert_eq!(cut.len(), 4);
    assert!(cut.iter().zip(&whole).all(|(cut, x)| (cut - x / length).abs() < 1e-5), "{cut:?} of {whole:?}");
    let tei = ask("/embed", json!({"inputs": "the cat sat on the mat", "dimensions": 4}));
    let tei = vector(&tei.json()[0]);
    assert!(
        tei.len() == 4 && tei.iter().zip(&cut).all(|(a, b)| (a - b).abs() < 1e-5),
        "{tei:?}, not {cut:?}"
    );
    // They are the job's parameters: what the model does not know, it says.
    for (path, body, what) in [
        (
            "/v1/embeddings",
            json!({"model": "prompted", "input": "x", "prompt_name": "poem"}),
            "this model has `document`, `query`",
        ),
        ("/embed", json!({"inputs": "x", "prompt_name": "poem"}), "this model has `document`, `query`"),
        (
            "/embed",
            json!({"inputs": "x", "dimensions": 100_000}),
            "params.dimensions is 100000; this model has",
        ),
    ] {
        let refused = ask(path, body);
        assert!(refused.status == 400 && refused.text.contains(what), "{refused:?}");
        assert_eq!(refused.header("x-should-retry"), Some("false"));
    }
    assert_eq!(openai(json!({"prompt_name": "query"})).status, 200);
    assert_eq!(openai(json!({"dimensions": 0})).status, 400);
}

#[test]
fn models_are_those_that_workers_serve() {
    let setup = Setup::with(&[ECHO, MINILM]);
    let listed = setup.next().get("/v1/models").json();
    let ids: Vec<_> = listed["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(ids, [ECHO, MINILM]);
    assert_eq!(setup.next().get("/v1/models/echo").json()["object"], "model");
    assert_eq!(setup.next().get("/v1/models/nobody/has-this").status, 404);
    // With two models, a request must name one.
    let several = setup.next().post("/embed", &json!({"inputs": "x"}));
    assert_eq!(several.status, 422, "{several:?}");
    assert!(several.json()["error"].as_str().unwrap().contains("tei.embed"));
    let chosen = setup.next().post("/embed?model=minilm", &json!({"inputs": "x"}));
    assert_eq!(chosen.json()[0].as_array().unwrap().len(), 384);
    assert_eq!(setup.next().get("/info?model=minilm").json()["model_id"], MINILM);
}
