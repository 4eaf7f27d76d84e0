//! Real models on PyTorch: `scripts/setup peers model`, then `make test-pytorch`.

use std::path::PathBuf;

use vramq_inference::process::protocol::FailureKind;
use vramq_inference::process::{PassEnd, PassRequest};
use vramq_schemas::{Embedding, Output};

use crate::env::{Env, ended, pid, repository, texts};

/// The vectors that the library itself made, one text at a time (`models/reference.py`).
fn reference() -> (Vec<String>, Vec<Vec<f32>>) {
    let folder = repository().join("inference/tests/fixtures/minilm");
    let texts: Vec<String> =
        serde_json::from_slice(&std::fs::read(folder.join("texts.json")).unwrap()).unwrap();
    let bytes = std::fs::read(folder.join("vectors.f32")).unwrap();
    let numbers: Vec<f32> =
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    let width = numbers.len() / texts.len();
    (texts, numbers.chunks_exact(width).map(<[f32]>::to_vec).collect())
}

fn cosine(one: &[f32], other: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    dot(one, other) / (dot(one, one) * dot(other, other)).sqrt()
}

fn python() -> PathBuf {
    PathBuf::from(std::env::var_os("VRAMQ_BENCH_PYTHON").expect("VRAMQ_BENCH_PYTHON"))
}

#[tokio::test]
#[ignore = "needs PyTorch: make test-pytorch"]
async fn sentence_transformers_gives_the_encoders_vectors() {
    let python = python();
    let model = PathBuf::from(std::env::var_os("VRAMQ_TEST_MODEL").expect("VRAMQ_TEST_MODEL"));
    let env = Env::new();
    let serve = repository().join("docs/model-examples/minilm.py");
    let more = format!(
        "load_s = 600\nvram = {{ per = \"characters\" }}\nenv = {{ MODEL = {model:?}, HF_HUB_OFFLINE = \"1\" }}"
    );
    let config = env.config_of(&[python.to_str().unwrap(), serve.to_str().unwrap()], &more);
    let pool = env.start(config).await.unwrap();
    let (inputs, vectors) = reference();
    for (inputs, vectors) in inputs.chunks(8).zip(vectors.chunks(8)) {
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        let (outputs, end) = pool.run(PassRequest { ..texts(&inputs) }).unwrap().finish().await;
        assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
        for ((output, vector), input) in outputs.into_iter().zip(vectors).zip(inputs) {
            let Output::Embedding(Embedding { values, .. }) = output else { panic!("{output:?}") };
            let cosine = cosine(&values.to_f32(), vector);
            assert!(cosine >= 0.9999, "{cosine} for {input:?}");
        }
    }
    env.close(pool).await;
}

/// What the SDK makes of the errors of PyTorch, NumPy and ONNX Runtime themselves. `frameworks.rs` has the same of types that are made up.
#[tokio::test]
#[ignore = "needs PyTorch: make test-pytorch"]
async fn real_frameworks_run_out_of_memory_of_the_device_or_of_the_host() {
    let env = Env::new();
    let command = [python().to_str().unwrap().to_owned(), "real_frameworks.py".to_owned()];
    let config = env.config_of(&command.each_ref().map(String::as_str), "load_s = 600");
    let pool = env.start(config).await.unwrap();
    let before = pid(&pool).await;
    for (case, source, asked, free) in [
        ("torch-class", "torch", Some(2 << 30), Some(512 << 20)),
        ("torch-cuda-class", "torch", Some(2 << 30), Some(512 << 20)),
        ("torch-accelerator", "torch", None, None),
        // The arena has the same words on every device: for a model on the CPU its memory is the device's.
        ("onnx-arena", "onnxruntime", Some(1 << 50), None),
    ] {
        let (_, end) = ended(&pool, &[case]).await;
        let PassEnd::OutOfMemory { report, .. } = end else { panic!("{case}: {end:?}") };
        assert_eq!((report.source.as_str(), report.asked, report.free), (source, asked, free), "{case}");
    }
    for (case, words) in [
        (
            "torch-cpu",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1125899906842624 bytes",
        ),
        ("numpy", "Unable to allocate 1.00 PiB"),
        ("onnx", "Status Message: std::bad_alloc"),
    ] {
        let (_, end) = ended(&pool, &[case]).await;
        assert!(
            matches!(&end, PassEnd::Failed { kind: FailureKind::HostMemory, detail, .. } if detail.contains(words)),
            "{case}: {end:?}"
        );
    }
    // No process was ended for any of it.
    assert_eq!(pid(&pool).await, before);
    env.close(pool).await;
}
