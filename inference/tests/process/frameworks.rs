//! How the SDK tells out-of-memory apart, by the types and codes of the frameworks.

use serde_json::json;
use vramq_inference::process::PassEnd;
use vramq_inference::process::keeper::Death;
use vramq_inference::process::protocol::FailureKind;

use crate::env::{Env, done, ended, pid};

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
        ("hip", "cuda", None),
        ("torch-hip", "torch", Some(20 << 20)),
        ("torch-accelerator", "torch", None),
        ("mps", "torch", Some(1 << 30)),
        ("cufft", "cuda", None),
        ("rapids", "cuda", None),
        ("paddle", "cuda", Some(2 << 30)),
        ("pycuda", "pycuda", None),
        ("torch-huge", "torch", None),
        ("jax-huge", "jax", Some((1 << 63) - 1)),
        ("group", "torch", Some(2 << 30)),
    ] {
        let (_, end) = ended(&pool, &[case]).await;
        let PassEnd::OutOfMemory { report, .. } = end else { panic!("{case}: {end:?}") };
        assert_eq!((report.source.as_str(), report.asked), (source, asked), "{case}");
    }
    for (case, kind) in [
        ("host", FailureKind::HostMemory),
        ("host-torch", FailureKind::HostMemory),
        ("host-onnxruntime", FailureKind::HostMemory),
        ("talks-of-host", FailureKind::Model),
        ("plain", FailureKind::Model),
        ("talks-of-it", FailureKind::Model),
        ("talks-of-loss", FailureKind::Model),
        ("talks-of-launch", FailureKind::Model),
        ("talks-of-busy", FailureKind::Model),
        ("talks-of-ecc", FailureKind::Model),
        ("talks-of-unknown", FailureKind::Model),
        // The model itself says that the input is invalid.
        ("invalid-because", FailureKind::Input),
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

/// Later calls to the device would fail too, so the process must not run another pass.
#[tokio::test]
async fn a_device_that_is_lost_is_recognised_whatever_says_so() {
    let env = Env::new();
    for (case, what) in [
        ("lost-onnxruntime", "CUDA failure 700"),
        ("lost-tensorflow", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("lost-numba", "unspecified launch failure"),
        ("lost-timeout", "the launch timed out"),
        ("lost-busy", "busy or unavailable"),
        ("lost-busy-newer", "busy or unavailable"),
        ("lost-ecc", "ECC error"),
        ("lost-unknown", "unknown error"),
        ("lost-unknown-driver", "unknown error"),
        // The pass failed for another reason, so the SDK asks the device.
        ("lost-late", "ValueError: a bad day"),
        ("lost-late-invalid", "InvalidInput: not for me"),
    ] {
        let pool = env.start(env.config("frameworks.py", "")).await.unwrap();
        let before = pid(&pool).await;
        let (_, end) = ended(&pool, &[case]).await;
        assert!(
            matches!(&end, PassEnd::Failed { kind: FailureKind::Device, detail, .. } if detail.contains(what)),
            "{case}: {end:?}"
        );
        assert_ne!(pid(&pool).await, before, "{case}");
        env.close(pool).await;
    }
}

/// As when a library in C++ aborts before any Python code can see the error.
#[tokio::test]
async fn a_process_that_died_with_the_text_of_a_full_device_ran_out_of_memory() {
    const TEXT: &str = "terminate called after throwing an instance of 'c10::OutOfMemoryError'\n  \
        what():  CUDA out of memory. Tried to allocate 2.00 GiB.\n";
    let env = Env::new();
    let pool = env.probe("").await;
    // The program survived that out-of-memory, so its later death has another cause.
    assert_eq!(done(&pool, &[&format!("say {TEXT}")]).await, [json!(null)]);
    pid(&pool).await;
    let (_, end) = ended(&pool, &["abort Aborted"]).await;
    assert!(matches!(end, PassEnd::Crashed { death: Death::Killed(libc::SIGABRT), .. }), "{end:?}");
    let (outputs, end) = ended(&pool, &["echo a", &format!("abort {TEXT}")]).await;
    let PassEnd::OutOfMemory { item: None, report, stderr, by_text: true } = end else { panic!("{end:?}") };
    assert_eq!((report.source.as_str(), report.asked), ("torch", Some(2 << 30)));
    assert!(stderr.contains("c10::OutOfMemoryError"), "{stderr}");
    assert_eq!(outputs.len(), 1);
    env.close(pool).await;
}
