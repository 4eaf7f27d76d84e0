//! `/rerank` and `/predict`, as clients of text-embeddings-inference call them, with real rerankers and classifiers.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::harness::{Answer, ECHO, Setup};

const RERANKER: &str = "reranker";
const CLASSIFIER: &str = "classifier";
const EMBEDDER: &str = "embedder";

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../inference/tests/fixtures").join(name)
}

fn setup() -> Setup {
    let mut setup = Setup::new();
    let of = |name: &str, folder: &str| format!("{name}={}", fixture(folder).display());
    let models = [
        of(RERANKER, "tiny-bert-reranker"),
        of(CLASSIFIER, "tiny-camembert-classifier"),
        of(EMBEDDER, "tiny-mean"),
    ];
    let models: Vec<_> = models.iter().flat_map(|model| ["--model", model.as_str()]).collect();
    setup.worker(&[ECHO], &models);
    setup.gateway(&[
        "--set",
        &format!("tei.rerank={RERANKER}"),
        "--set",
        &format!("tei.predict={CLASSIFIER}"),
    ]);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO, RERANKER, CLASSIFIER, EMBEDDER]);
    setup
}

fn scores(answer: &Answer) -> Vec<f64> {
    let of = |of: &Value| of["score"].as_f64().unwrap();
    answer.json().as_array().unwrap().iter().map(of).collect()
}

#[test]
fn pairs_are_ranked_as_the_reference_scores_them() {
    let setup = setup();
    // The pairs of texts in the fixture, and what transformers makes of them.
    let file = |name: &str| std::fs::read(fixture("tiny-bert-reranker").join(name)).unwrap();
    let pairs: Vec<Vec<String>> = serde_json::from_slice(&file("pairs.json")).unwrap();
    let pairs: Vec<_> = pairs.into_iter().filter(|texts| texts.len() == 2).collect();
    let bytes = file("scores.f32");
    let expected: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(pairs.len(), expected.len());
    for (pair, expected) in pairs.iter().zip(&expected) {
        let body = json!({"query": pair[0], "texts": [pair[1]], "return_text": true});
        let answer = setup.gateways[1].post(&format!("/rerank?model={RERANKER}"), &body);
        assert_eq!((answer.status, &answer.json()[0]["text"]), (200, &json!(pair[1])), "{answer:?}");
        assert!((scores(&answer)[0] - f64::from(*expected)).abs() < 1e-5, "{answer:?}, not {expected}");
    }
    let texts = ["the cat sat", "a dog", "the cat sat on the mat"];
    let answer = setup.gateways[0].post("/rerank", &json!({"query": "a cat", "texts": texts}));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(
        scores(&answer).is_sorted_by(|a, b| a >= b) && scores(&answer).len() == texts.len(),
        "{answer:?}"
    );
    assert!(answer.json()[0].get("text").is_none() && answer.header("x-vramq-job-id").is_some());
    let raw =
        setup.gateways[0].post("/rerank", &json!({"query": "a cat", "texts": texts, "raw_scores": true}));
    let sigmoids: Vec<_> = scores(&raw).into_iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
    assert!(sigmoids.iter().zip(scores(&answer)).all(|(a, b)| (a - b).abs() < 1e-5), "{raw:?} {answer:?}");
}

#[test]
fn texts_and_pairs_are_labelled() {
    let setup = setup();
    let one = setup.gateways[0].post("/predict", &json!({"inputs": "the cat sat"}));
    assert_eq!(one.status, 200, "{one:?}");
    assert!(scores(&one).is_sorted_by(|a, b| a >= b) && one.json()[0]["label"].is_string(), "{one:?}");
    let listed = setup.gateways[0].post("/predict", &json!({"inputs": ["the cat sat"]}));
    assert_eq!(listed.json(), one.json(), "{listed:?}");
    let pair = setup.gateways[0].post("/predict", &json!({"inputs": ["the cat", "sat"]})).json();
    let batch = setup.gateways[0].post("/predict", &json!({"inputs": [["the cat sat"], ["the cat", "sat"]]}));
    assert_eq!(batch.json(), json!([one.json(), pair]), "{batch:?}");
}

#[test]
fn a_model_of_the_wrong_kind_is_an_error() {
    let setup = setup();
    let ask =
        |route: &str, model: &str, body: &Value| setup.next().post(&format!("{route}?model={model}"), body);
    let rerank = json!({"query": "a", "texts": ["b"]});
    for answer in [
        ask("/rerank", CLASSIFIER, &rerank),
        ask("/rerank", ECHO, &rerank),
        ask("/predict", RERANKER, &json!({"inputs": "a"})),
        // It takes no pairs, or not the parameter.
        ask("/rerank", EMBEDDER, &rerank),
        ask("/predict", EMBEDDER, &json!({"inputs": ["a", "b"]})),
        ask("/predict", EMBEDDER, &json!({"inputs": "a"})),
        ask("/predict", EMBEDDER, &json!({"inputs": "a", "raw_scores": true})),
    ] {
        assert_eq!((answer.status, &answer.json()["error_type"]), (424, &json!("backend")), "{answer:?}");
    }
    assert_eq!(ask("/rerank", RERANKER, &json!({"query": "a", "texts": []})).status, 400);
    let several = setup.gateways[1].post("/predict", &json!({"inputs": "a"}));
    assert!(several.status == 422 && several.text.contains("tei.predict"), "{several:?}");
}
