//! Items and outputs: formats, dimensions, prompts, memory, and inputs that are rejected.

use std::fs;
use std::sync::Arc;

use serde_json::json;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::device::{Device as _, OutOfMemory};
use vramq_inference::engine::encoder::{Encoder, LoadError, Source};
use vramq_inference::engine::{Engine as _, Item, OutputMax, PassError, shape_of};
use vramq_schemas::{Dtype, Input, Output, Params, Values};

use crate::{Reference, copy_of, cpu, ids, numbers, params, tiny};

#[test]
fn outputs_come_in_the_formats_asked_for() {
    let encoder = Encoder::load_f32(&tiny("tiny-mean"), cpu(2)).unwrap();
    let inputs = [Input::Text("a cat".into())];
    let exact = numbers(&encoder.run(&encoder.prepare(&inputs, &Params::default()).unwrap()).unwrap()[0]);
    let mut params = Params::default();
    params.0.insert("dtype".into(), "f16".into());
    params.0.insert("encoding".into(), "base64".into());
    let outputs = encoder.run(&encoder.prepare(&inputs, &params).unwrap()).unwrap();
    let Output::Embedding(embedding) = &outputs[0] else { panic!("no embedding") };
    assert!(embedding.base64);
    assert_eq!(embedding.values.dtype(), Dtype::F16);
    let Values::F16(half) = &embedding.values else { panic!("not f16") };
    assert_eq!(*half, exact.iter().map(|x| half::f16::from_f32(*x)).collect::<Vec<_>>());
    assert_eq!(encoder.run(&[]).unwrap(), []);
}

#[test]
fn vectors_are_cut_and_have_length_one_again() {
    let encoder = Encoder::load_f32(&tiny("tiny-mean"), cpu(2)).unwrap();
    let inputs = [Input::Text("a cat".into())];
    let with = |dimensions: serde_json::Value| encoder.prepare(&inputs, &params("dimensions", dimensions));
    let whole = numbers(&encoder.run(&encoder.prepare(&inputs, &Params::default()).unwrap()).unwrap()[0]);
    let cut = numbers(&encoder.run(&with(5.into()).unwrap()).unwrap()[0]);
    let length = whole[..5].iter().map(|x| x * x).sum::<f32>().sqrt();
    assert_eq!(cut.len(), 5);
    assert!(cut.iter().zip(&whole).all(|(cut, whole)| (cut - whole / length).abs() < 1e-6));
    assert_eq!(with(33.into()).unwrap_err().0, "params.dimensions is 33; this model has 32");
    for wrong in [0.into(), (-1).into(), "5".into()] {
        assert!(with(wrong).unwrap_err().0.contains("params.dimensions"));
    }
}

/// Dimensions are those of the layers behind pooling, not those of the tokens.
#[test]
fn dimensions_are_counted_behind_dense_layers() {
    let encoder = Encoder::load_f32(&tiny("tiny-gemma"), cpu(2)).unwrap();
    let inputs = [Input::Text("a cat".into())];
    let dimensions = |dimensions: u32| {
        let items = encoder.prepare(&inputs, &params("dimensions", dimensions));
        items.map(|items| numbers(&encoder.run(&items).unwrap()[0]).len())
    };
    assert_eq!(dimensions(28).unwrap(), 28);
    assert_eq!(dimensions(5).unwrap(), 5);
    assert_eq!(dimensions(29).unwrap_err().0, "params.dimensions is 29; this model has 28");
    let most = encoder.output_max(&inputs[0], &Params::default());
    assert!(matches!(most, Some(OutputMax::Embedding { elements: 28, .. })), "{most:?}");
}

/// EmbeddingGemma's tokenizer has a token for images, whose id is beyond the model's embeddings.
#[test]
fn a_token_without_an_embedding_refuses_its_text_alone() {
    let encoder = Encoder::load_f32(&tiny("tiny-gemma"), cpu(2)).unwrap();
    let inputs = [Input::Text("a cat".into()), Input::Text("a <image_soft_token> cat".into())];
    assert_eq!(encoder.prepare(&inputs[..1], &Params::default()).unwrap().len(), 1);
    assert_eq!(
        encoder.prepare(&inputs, &Params::default()).unwrap_err().0,
        "inputs[1]: the model has no embedding of the token `<image_soft_token>`"
    );
}

#[test]
fn prompts_go_before_texts_by_name_or_by_default() {
    let folder = copy_of("tiny-mean");
    let prompts = r#"{"prompts": {"query": "the city ", "document": ""}, "default_prompt_name": "query"}"#;
    fs::write(folder.path().join("config_sentence_transformers.json"), prompts).unwrap();
    let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
    let tokens = |prompt: Option<&str>, text: &str| {
        let mut params = Params::default();
        params.0.extend(prompt.map(|name| ("prompt_name".to_owned(), name.into())));
        encoder.prepare(&[Input::Text(text.into())], &params).map(|items| ids(&items[0]).to_vec())
    };
    let whole = tokens(Some("document"), "the city was").unwrap();
    assert_eq!(tokens(Some("query"), "was").unwrap(), whole);
    assert_eq!(tokens(None, "was").unwrap(), whole);
    assert_eq!(
        tokens(Some("title"), "was").unwrap_err().0,
        "params.prompt_name is \"title\"; this model has `document`, `query`"
    );
}

/// As in sentence-transformers (6.2, `_default_prompts`), so that callers need not know whether a model was trained with prompts.
#[test]
fn every_model_of_vectors_has_a_prompt_for_queries_and_for_documents() {
    let folder = copy_of("tiny-mean");
    let load = || Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1));
    let reference = Reference::read("tiny-mean");
    let check = || {
        let encoder = load().unwrap();
        for params in [Params::default(), params("prompt_name", "query"), params("prompt_name", "document")] {
            let items = encoder.prepare(&reference.inputs, &params).unwrap();
            for (item, expected) in items.iter().zip(&reference.tokens) {
                assert_eq!(ids(item), expected);
            }
        }
    };
    check();
    let file = folder.path().join("config_sentence_transformers.json");
    fs::write(&file, r#"{"default_prompt_name": "query"}"#).unwrap();
    check();
    fs::write(&file, r#"{"prompts": {"title": "the "}, "default_prompt_name": "name"}"#).unwrap();
    let error = load().unwrap_err().to_string();
    assert!(error.contains("the default prompt `name`; this engine takes one of `prompts`"), "{error}");
}

/// sentence-transformers makes an empty prompt of `null`.
#[test]
fn a_prompt_that_is_null_is_empty() {
    let folder = copy_of("tiny-mean");
    let prompts = r#"{"prompts": {"query": null, "document": "the "}, "default_prompt_name": "query"}"#;
    fs::write(folder.path().join("config_sentence_transformers.json"), prompts).unwrap();
    let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
    let reference = Reference::read("tiny-mean");
    for params in [Params::default(), params("prompt_name", "query")] {
        let items = encoder.prepare(&reference.inputs, &params).unwrap();
        for (item, expected) in items.iter().zip(&reference.tokens) {
            assert_eq!(ids(item), expected);
        }
    }
}

/// The vector is cut, and not normalised again, as by `encode` of sentence-transformers (6.2) for such a folder.
#[test]
fn a_folder_may_say_how_many_elements_of_a_vector_are_kept() {
    for (fixture, kept, has_length_1) in
        [("tiny-mean", 5, false), ("tiny-gemma", 7, true), ("tiny-mean", 400, false)]
    {
        let folder = copy_of(fixture);
        let own = json!({"truncate_dim": kept}).to_string();
        fs::write(folder.path().join("config_sentence_transformers.json"), own).unwrap();
        let [encoder, whole] = [Source::Folder(folder.path().into()), tiny(fixture)]
            .map(|source| Encoder::load_f32(&source, cpu(1)).unwrap());
        assert_ne!(encoder.revision(), whole.revision(), "{fixture}");
        let reference = Reference::read(fixture);
        let inputs = &reference.inputs[..4];
        let vectors = |encoder: &Encoder, params: &Params| -> Vec<Vec<f32>> {
            let items = encoder.prepare(inputs, params).unwrap();
            encoder.run(&items).unwrap().iter().map(numbers).collect()
        };
        let (none, three) = (Params::default(), params("dimensions", 3));
        let (cut, all) = (vectors(&encoder, &none), vectors(&whole, &none));
        let width = all[0].len().min(kept);
        for (cut, all) in cut.iter().zip(&all) {
            assert_eq!(cut[..], all[..width], "{fixture}");
        }
        let length = |vector: &Vec<f32>| vector.iter().map(|x| x * x).sum::<f32>().sqrt();
        assert_eq!((length(&all[0]) - 1.0).abs() < 1e-5, has_length_1, "{fixture}");
        let most = encoder.output_max(&inputs[0], &none);
        assert!(
            matches!(most, Some(OutputMax::Embedding { elements, .. }) if elements == width as u64),
            "{most:?}"
        );
        assert_eq!(vectors(&encoder, &three), vectors(&whole, &three), "{fixture}");
        let refused = encoder.prepare(inputs, &params("dimensions", width + 1)).unwrap_err().0;
        assert_eq!(refused, format!("params.dimensions is {}; this model has {width}", width + 1));
    }
}

#[test]
fn a_pass_that_does_not_fit_is_a_typed_out_of_memory_and_costs_nothing() {
    let probe = Encoder::load_f32(&tiny("tiny-mean"), cpu(2)).unwrap();
    let inputs: Vec<Input> = (0..64).map(|n| Input::Text(format!("text {n} of a batch"))).collect();
    let items = probe.prepare(&inputs, &Params::default()).unwrap();
    let bytes = |items: &[Item]| probe.pass_bytes(shape_of(items));
    assert!(bytes(&items[..32]) < bytes(&items));

    let total = probe.resident_bytes() + bytes(&items) - 1;
    let device = CpuDevice::new(total, 2).unwrap();
    let encoder = Encoder::load_f32(&tiny("tiny-mean"), Arc::clone(&device)).unwrap();
    let baseline = device.memory();
    assert_eq!(baseline.free, total - encoder.resident_bytes());
    let refused = encoder.run(&items).unwrap_err();
    assert_eq!(
        refused,
        PassError::from(OutOfMemory { asked: bytes(&items), free: baseline.free, total, foreign: 0 })
    );
    assert_eq!(device.memory(), baseline);
    let first = encoder.run(&items[..32]).unwrap();
    let second = encoder.run(&items[32..]).unwrap();
    assert_eq!(device.memory(), baseline);
    assert_eq!(probe.run(&items).unwrap().len(), first.len() + second.len());
    drop(encoder);
    assert_eq!(device.memory().free, total);
}

#[test]
fn weights_that_do_not_fit_are_a_typed_out_of_memory() {
    let needs = Encoder::load_f32(&tiny("tiny-mean"), cpu(1)).unwrap().resident_bytes();
    let device = CpuDevice::new(needs - 1, 1).unwrap();
    match Encoder::load_f32(&tiny("tiny-mean"), Arc::clone(&device)) {
        Err(LoadError::OutOfMemory(oom)) => assert_eq!((oom.asked, oom.free), (needs, needs - 1)),
        other => panic!("{other:?}"),
    }
    assert_eq!(device.memory().free, needs - 1);
}

#[test]
fn items_of_another_model_are_refused() {
    let encoder = Encoder::load_f32(&tiny("tiny-mean"), cpu(1)).unwrap();
    let item = |ids: &[u32]| Item::Tokens { ids: ids.into(), format: Default::default() };
    assert!(matches!(encoder.run(&[item(&[273])]), Err(PassError::Failed(_))));
    assert!(matches!(encoder.run(&[item(&[1; 41])]), Err(PassError::Failed(_))));
    let plain = Item::Plain(Input::Text("a".into()));
    assert!(matches!(encoder.run(&[plain]), Err(PassError::Failed(_))));
    // An item without tokens is allowed: the mean of nothing is zeros.
    let outputs = encoder.run(&[item(&[]), item(&[5, 6])]).unwrap();
    assert!(numbers(&outputs[0]).iter().all(|x| *x == 0.0));
    assert!(numbers(&outputs[1]).iter().any(|x| *x != 0.0));
}

#[test]
fn not_a_number_in_the_weights_fails_the_pass_and_hangs_nothing() {
    let folder = copy_of("tiny-mean");
    let path = folder.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let (header, tensors) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let query = tensors.info("encoder.layer.0.attention.self.query.weight").unwrap();
    let first = 8 + header + query.data_offsets.0;
    bytes[first..first + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(2)).unwrap();
    let items = encoder.prepare(&[Input::Text("a cat sat".into())], &Params::default()).unwrap();
    let refused = encoder.run(&items).unwrap_err().to_string();
    assert!(refused.contains("of the vector of item 0 is not a finite number"), "{refused}");
}
