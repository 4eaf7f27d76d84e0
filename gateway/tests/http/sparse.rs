//! `/embed_sparse`, as clients of text-embeddings-inference call it, with a real model of sparse vectors.

use serde_json::{Value, json};

use crate::harness::{ECHO, Setup};
use crate::scores::fixture;

const SPLADE: &str = "splade";

/// How far an element may be from the reference's, also in split bf16 where the worker finds AMX.
const CLOSE: f64 = 5e-4;

#[test]
fn texts_become_the_references_sparse_vectors() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &["--model", &format!("{SPLADE}={}", fixture("tiny-splade").display())]);
    setup.gateway(&["--set", &format!("tei.embed_sparse={SPLADE}")]);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO, SPLADE]);
    let file = |name: &str| std::fs::read(fixture("tiny-splade").join(name)).unwrap();
    let texts: Vec<String> = serde_json::from_slice(&file("texts.json")).unwrap();
    let numbers = file("vectors.f32");
    let numbers: Vec<f32> = numbers.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let width = numbers.len() / texts.len();

    let answer = setup.gateways[0].post("/embed_sparse", &json!({"inputs": texts, "truncate": true}));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.header("x-vramq-job-id").is_some() && answer.header("x-compute-tokens").is_some());
    let vectors = answer.json();
    assert_eq!(vectors.as_array().unwrap().len(), texts.len());
    for (vector, expected) in vectors.as_array().unwrap().iter().zip(numbers.chunks(width)) {
        let elements: Vec<(usize, f64)> = vector.as_array().unwrap().iter().map(element).collect();
        assert!(elements.is_sorted_by(|a, b| a.0 < b.0), "{vector}");
        let mut all = vec![0.0; width];
        for (index, value) in elements {
            all[index] = value;
        }
        for (index, (found, expected)) in all.iter().zip(expected).enumerate() {
            assert!((found - f64::from(*expected)).abs() < CLOSE, "{index}: {found}, not {expected}");
        }
    }

    // One text gives a list, too, and the URL may name the model.
    let route = format!("/embed_sparse?model={SPLADE}");
    let one = setup.gateways[1].post(&route, &json!({"inputs": texts[0]}));
    assert_eq!(one.json(), json!([vectors[0]]), "{one:?}");
    let echo = setup.next().post(&format!("/embed_sparse?model={ECHO}"), &json!({"inputs": "a"}));
    assert_eq!((echo.status, &echo.json()["error_type"]), (424, &json!("backend")), "{echo:?}");
    let several = setup.gateways[1].post("/embed_sparse", &json!({"inputs": "a"}));
    assert!(several.status == 422 && several.text.contains("tei.embed_sparse"), "{several:?}");
    let prompt = json!({"inputs": "a", "prompt_name": "title"});
    assert_eq!(setup.next().post(&route, &prompt).status, 400);
    let embed = setup.next().post(&format!("/embed?model={SPLADE}"), &json!({"inputs": "a"}));
    assert!(embed.status == 400 && embed.text.contains("gives no embeddings"), "{embed:?}");
}

fn element(element: &Value) -> (usize, f64) {
    let index = element["index"].as_u64().unwrap();
    (usize::try_from(index).unwrap(), element["value"].as_f64().unwrap())
}
