//! How the SDK tells out-of-memory apart, by the types and codes of the frameworks.

use vramq_inference::process::PassEnd;
use vramq_inference::process::protocol::FailureKind;

use crate::env::{Env, ended, pid};

#[tokio::test]
async fn each_framework_says_it_in_its_own_way() {
    let env = Env::new();
    let pool = env.start(env.config("frameworks.py", "")).await.unwrap();
    let before = pid(&pool).await;
    for (case, source, asked) in [
        ("torch", "torch", Some(2 << 30)),
        ("torch-old", "torch", Some(20 << 20)),
        ("torch-subclass", "torch", None),
        ("wrapped", "torch", Some(2 << 30)),
        ("cublas", "cublas", None),
        ("cudnn", "cudnn", None),
        ("cuda", "cuda", None),
        ("ctranslate2", "ctranslate2", None),
        ("jax", "jax", Some(8_589_934_592)),
        ("onnxruntime", "onnxruntime", Some(1_073_741_824)),
        ("cupy", "cupy", Some(512)),
        ("tensorflow", "tensorflow", None),
        ("numba", "numba", None),
    ] {
        let (_, end) = ended(&pool, &[case]).await;
        let PassEnd::OutOfMemory { report, .. } = end else { panic!("{case}: {end:?}") };
        assert_eq!((report.source.as_str(), report.asked), (source, asked), "{case}");
    }
    for (case, kind) in [
        ("host", FailureKind::HostMemory),
        ("host-torch", FailureKind::HostMemory),
        ("plain", FailureKind::Model),
        ("talks-of-it", FailureKind::Model),
        ("suppressed", FailureKind::Model),
    ] {
        let (_, end) = ended(&pool, &[case]).await;
        assert!(matches!(&end, PassEnd::Failed { kind: seen, .. } if *seen == kind), "{case}: {end:?}");
    }
    assert_eq!(pid(&pool).await, before);
    // The tensors of the pass that ran out are free before the next one.
    let (outputs, _) = ended(&pool, &["held"]).await;
    assert_eq!(outputs, [vramq_schemas::Output::Json(serde_json::json!(0))]);
    env.close(pool).await;
}
