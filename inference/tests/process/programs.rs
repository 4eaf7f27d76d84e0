//! Real programs as models: ONNX Runtime by the example in `docs/`, and ImageMagick, which knows nothing of vramq. `make
//! test-programs`.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use vramq_inference::process::cost::Unit;
use vramq_inference::process::protocol::FailureKind;
use vramq_inference::process::{Costs, Item, PassEnd, PassRequest};
use vramq_schemas::Output;

use crate::env::{Env, json, repository};

/// ImageMagick, as Debian has it.
const CONVERT: &str = "/usr/bin/convert";

fn python() -> PathBuf {
    PathBuf::from(std::env::var_os("VRAMQ_TEST_PROGRAMS_PYTHON").expect("VRAMQ_TEST_PROGRAMS_PYTHON"))
}

/// What a program prints.
fn printed(program: &str, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

/// The logistic regression on irises that ONNX Runtime brings along. The expected probabilities were computed in plain Python,
/// `1 / (1 + exp(-(W x + b)))` of each class over their sum, with the file's intercepts and first six coefficients: its input has
/// two features.
#[tokio::test]
#[ignore = "needs ONNX Runtime: make test-programs"]
async fn onnx_runtime_runs_a_model_of_json_inputs() {
    let env = Env::new();
    let python = python();
    let code = "from onnxruntime.datasets import get_example; print(get_example('logreg_iris.onnx'))";
    let model = printed(python.to_str().unwrap(), &["-c", code]);
    let model = String::from_utf8(model).unwrap();
    let serve = repository().join("docs/model-examples/onnx.py");
    let more = format!("env = {{ MODEL = {:?} }}\nitems_max = 4", model.trim());
    let pool =
        env.start(env.config_of(&[python.to_str().unwrap(), serve.to_str().unwrap()], &more)).await.unwrap();
    let irises = json!([[5.1, 3.5], [4.9, 3.0], [6.7, 3.0]]);
    let items = vec![Item::Json((&irises).into()), Item::Json(json!({"float_input": irises}).into())];
    let (outputs, end) = pool.run(PassRequest { items, ..PassRequest::default() }).unwrap().finish().await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    let outputs: Vec<Value> = outputs.into_iter().map(json).collect();
    assert_eq!(outputs[0], outputs[1], "both forms are the same input");
    assert_eq!(outputs[0]["label"], json!([0, 0, 0]));
    for (at, expected) in [0.978253, 0.956215, 0.883158].into_iter().enumerate() {
        let probability = outputs[0]["probabilities"][at]["0"].as_f64().unwrap();
        assert!((probability - expected).abs() < 1e-5, "{probability} instead of {expected}");
    }
    let items = vec![Item::Json(json!([[1.0]]).into())];
    let (_, end) = pool.run(PassRequest { items, ..PassRequest::default() }).unwrap().finish().await;
    let PassEnd::Failed { kind: FailureKind::Input, item: Some(0), detail, .. } = end else {
        panic!("{end:?}")
    };
    assert!(detail.contains("shape"), "{detail}");
    env.close(pool).await;
}

#[tokio::test]
#[ignore = "needs ImageMagick: make test-programs"]
async fn imagemagick_makes_thumbnails() {
    let env = Env::new();
    let more = "mode = \"once\"\n\
        once = { input_suffix = \".png\", output_suffix = \".jpg\", media_type = \"image/jpeg\" }\n\
        vram = { per = \"pixels\", mib_per_unit = 1e-5 }";
    let command = [CONVERT, "{input}", "-resize", "{params.width}x", "{output}"];
    let pool = env.start(env.config_of(&command, more)).await.unwrap();
    let picture = |size: &str| Item::Bytes {
        media_type: Some("image/png".to_owned()),
        bytes: printed(CONVERT, &["-size", size, "gradient:red-blue", "png:-"]),
    };
    let items = vec![picture("200x100"), picture("300x600")];
    let pixels = |item: &Item| Costs::new(item).of(Unit::Pixels);
    assert_eq!(items.iter().map(pixels).collect::<Vec<_>>(), [Some(20_000.0), Some(180_000.0)]);
    let mut request = PassRequest { items, ..PassRequest::default() };
    request.params.insert("width".to_owned(), json!(40));
    let (outputs, end) = pool.run(request).unwrap().finish().await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    let sizes = outputs.into_iter().map(|output| {
        let Output::Bytes { media_type, bytes } = output else { panic!("{output:?}") };
        assert_eq!(media_type, "image/jpeg");
        pixels(&Item::Bytes { media_type: None, bytes })
    });
    // 40 wide, and the height by the picture's proportions.
    assert_eq!(sizes.collect::<Vec<_>>(), [Some(800.0), Some(3_200.0)]);
    env.close(pool).await;
}
