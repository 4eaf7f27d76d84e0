//! Sparse vectors, as SPLADE models make them: against sentence-transformers, and what of them is refused.

use std::fs;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_inference::engine::{Engine as _, Item, OutputMax, PassError, SparseItem};
use vramq_schemas::{Input, Output, Params, Sparse};

use crate::{
    CLOSE_SPLIT_SPARSE, Change, Reference, agrees, agrees_with, copy_of, cpu, fixtures, floats, json, params,
    replace, small, spoiled, texts_and_tokens, tiny,
};

const SPLADE: &str = "tiny-splade";
const DISTILBERT: &str = "tiny-splade-distilbert";
const POOLING: &str = "1_SpladePooling/config.json";

#[test]
fn splade_agrees() {
    agrees_with(SPLADE, &tiny(SPLADE));
}

/// In the layout of sentence-transformers 6, with the logarithm taken twice.
#[test]
fn splade_of_distilbert_agrees() {
    agrees_with(DISTILBERT, &tiny(DISTILBERT));
}

/// With trained weights split bf16 does not keep the bound of f32: the same three products with exact sums differ by 3.9e-5 of the
/// largest element (models/split_bf16.py).
#[test]
fn splade_with_trained_weights_agrees() {
    if let Some(folder) = small("splade-tiny", "model.safetensors") {
        agrees(trained(), &Source::Folder(folder), CLOSE_SPLIT_SPARSE);
    }
}

/// The reference of models/splade-tiny, whose file has only the elements that are not zero.
fn trained() -> Reference {
    const VOCABULARY: usize = 30_522;
    let folder = fixtures().join("splade");
    let (inputs, tokens) = texts_and_tokens(&folder);
    let indices: Vec<Vec<usize>> = json(&folder.join("indices.json"));
    let mut values = floats(&folder.join("values.f32")).into_iter();
    let vector = |indices: &Vec<usize>| {
        let mut vector = vec![0.0; VOCABULARY];
        for index in indices {
            vector[*index] = values.next().unwrap();
        }
        vector
    };
    let vectors = indices.iter().map(vector).collect();
    assert_eq!(values.len(), 0, "values are left");
    Reference { inputs, tokens, vectors, is_tiny: false }
}

fn texts() -> [Input; 2] {
    ["the city was part of the state", "a cat"].map(|text| Input::Text(text.into()))
}

fn sparse(encoder: &Encoder, params: &Params) -> Vec<Sparse> {
    let outputs = encoder.run(&encoder.prepare(&texts(), params).unwrap()).unwrap();
    let sparse = |output| match output {
        Output::Sparse(sparse) => sparse,
        other => panic!("no sparse vector: {other:?}"),
    };
    outputs.into_iter().map(sparse).collect()
}

#[test]
fn a_job_may_ask_for_the_largest_elements_only() {
    let encoder = Encoder::load_f32(&tiny(SPLADE), cpu(2)).unwrap();
    let whole = sparse(&encoder, &Params::default());
    let most = params("max_active_dims", 5);
    for (cut, whole) in sparse(&encoder, &most).iter().zip(&whole) {
        let mut values = whole.values().to_vec();
        values.sort_by(f32::total_cmp);
        let least = values[values.len() - 5];
        let large = whole.indices().iter().zip(whole.values()).filter(|(_, value)| **value >= least);
        let (indices, values): (Vec<u32>, Vec<f32>) = large.unzip();
        assert_eq!((cut.indices(), cut.values()), (&indices[..], &values[..]));
    }
    let vocabulary = encoder.dims().vocabulary as u64;
    let output_max = |params| encoder.output_max(&texts()[0], params);
    assert_eq!(output_max(&most), Some(OutputMax::Sparse { elements: 5 }));
    assert_eq!(output_max(&Params::default()), Some(OutputMax::Sparse { elements: vocabulary }));
}

#[test]
fn a_model_may_say_how_many_elements_its_vectors_have() {
    let folder = copy_of(SPLADE);
    fs::write(folder.path().join("config_sentence_transformers.json"), r#"{"max_active_dims": 3}"#).unwrap();
    let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
    assert!(sparse(&encoder, &Params::default()).iter().all(|sparse| sparse.len() == 3));
    assert!(sparse(&encoder, &params("max_active_dims", 4)).iter().all(|sparse| sparse.len() == 4));
}

#[test]
fn parameters_of_other_outputs_and_inputs_that_are_no_text_are_refused() {
    let encoder = Encoder::load_f32(&tiny(SPLADE), cpu(1)).unwrap();
    for (params, expected) in [
        (params("dimensions", 8), "params.dimensions is unknown; there are `max_active_dims`"),
        (params("max_active_dims", 0), "params.max_active_dims is 0; use a number from 1"),
        (params("prompt_name", "title"), "this model has `document`, `query`"),
    ] {
        for refused in [encoder.check(&texts(), &params), encoder.prepare(&texts(), &params).map(drop)] {
            let refused = refused.unwrap_err().0;
            assert!(refused.contains(expected), "{refused}");
        }
    }
    let pair = [Input::Json(serde_json::json!({"query": "a", "document": "b"}).into())];
    assert_eq!(
        encoder.check(&pair, &Params::default()).unwrap_err().0,
        "inputs[0] is json; this model takes text"
    );
}

#[test]
fn items_of_other_models_are_refused() {
    let ids: Box<[u32]> = [1, 2].into();
    let embedding = Item::Tokens { ids: ids.clone(), format: Default::default() };
    let sparse = Item::Sparse(SparseItem { ids, elements_max: None });
    for (model, item) in [(SPLADE, embedding), ("tiny-mean", sparse)] {
        let refused = Encoder::load_f32(&tiny(model), cpu(1)).unwrap().run(&[item]);
        assert!(matches!(refused, Err(PassError::Failed(_))), "{model}: {refused:?}");
    }
}

#[test]
fn models_without_sparse_vectors_are_refused_by_name() {
    let cases: [(&str, &str, &Change, &str); 9] = [
        (
            SPLADE,
            POOLING,
            &replace(r#""max""#, r#""sum""#),
            "the pooling strategy `sum`; this engine takes `max`",
        ),
        (SPLADE, POOLING, &replace(r#""relu""#, r#""gelu""#), "the activation function `gelu`"),
        (SPLADE, POOLING, &replace(r#"dimension": "#, r#"dimension": 1"#), "a width of 1"),
        (SPLADE, POOLING, &|_| None, "1_SpladePooling/config.json"),
        (
            SPLADE,
            "modules.json",
            &replace("MLMTransformer", "Transformer"),
            "transformer_task `(none)` before SpladePooling; this engine takes `fill-mask`",
        ),
        (
            SPLADE,
            "modules.json",
            &replace("SpladePooling\"", "SparseAutoEncoder\""),
            "the modules MLMTransformer, SparseAutoEncoder; this engine takes",
        ),
        (
            SPLADE,
            "config.json",
            &replace(r#""tie_word_embeddings": true"#, r#""tie_word_embeddings": false"#),
            "`tie_word_embeddings: false`",
        ),
        (
            SPLADE,
            "model.safetensors",
            &replace_name("transform.dense.bias", "transform.other.bias"),
            "no tensor `cls.predictions.transform.dense.bias`",
        ),
        (
            DISTILBERT,
            "sentence_bert_config.json",
            &replace("fill-mask", "feature-extraction"),
            "transformer_task `feature-extraction` before SpladePooling",
        ),
    ];
    for (model, file, change, expected) in cases {
        let (_folder, error) = spoiled(model, file, change);
        let said = error.to_string();
        assert!(said.contains(expected), "{file}: {said}, not {expected}");
    }
}

/// The head of another family is not taken for BERT's.
#[test]
fn other_families_make_no_sparse_vectors() {
    let folder = copy_of("tiny-xlm-roberta");
    for file in ["modules.json", POOLING] {
        let to = folder.path().join(file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(fixtures().join(SPLADE).join(file), to).unwrap();
    }
    let refused = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap_err().to_string();
    let expected =
        "the architecture `xlm-roberta` for sparse vectors; this engine takes `bert`, `distilbert`";
    assert!(refused.contains(expected), "{refused}");
}

/// A file has the bias of the map to the vocabulary under one of two names.
#[test]
fn the_bias_may_have_the_name_of_its_map() {
    let folder = copy_of(SPLADE);
    let path = folder.path().join("model.safetensors");
    let (one, other) = ("cls.predictions.bias", "cls.predictions.decoder.bias");
    let bytes = fs::read(&path).unwrap();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (from, to) = if text.contains(one) { (one, other) } else { (other, one) };
    fs::write(&path, replace_name(from, to)(bytes).unwrap()).unwrap();
    let renamed = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
    let encoder = Encoder::load_f32(&tiny(SPLADE), cpu(1)).unwrap();
    assert_eq!(sparse(&renamed, &Params::default()), sparse(&encoder, &Params::default()));
}

/// transformers 5.23 computes with the map that the file has, if its weights are others than the words' embeddings.
#[test]
fn a_map_to_the_vocabulary_of_its_own_is_refused_by_name() {
    let names = [
        (SPLADE, "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        (DISTILBERT, "distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight"),
    ];
    for (model, words, map) in names {
        let folder = copy_of(model);
        let path = folder.path().join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let load = |change: f32| {
            let all = SafeTensors::deserialize(&bytes).unwrap();
            let view = all.tensor(words).unwrap();
            let mut data = view.data().to_vec();
            let (last, _) = data.as_chunks_mut::<4>().0.split_last_mut().unwrap();
            *last = (f32::from_le_bytes(*last) + change).to_le_bytes();
            let own = TensorView::new(Dtype::F32, view.shape().to_vec(), &data).unwrap();
            let tensors = all.tensors().into_iter().filter(|(name, _)| name != map);
            let tensors = tensors.chain([(map.to_owned(), own)]);
            safetensors::serialize_to_file(tensors, None, &path).unwrap();
            Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1))
                .map_err(|error| error.to_string())
        };
        let encoder = Encoder::load_f32(&tiny(model), cpu(1)).unwrap();
        let same = load(0.0).unwrap();
        assert_eq!(sparse(&same, &Params::default()), sparse(&encoder, &Params::default()));
        let error = load(0.5).unwrap_err();
        let expected =
            format!("the tensor `{map}`, which differs from the words' embeddings; this engine takes");
        assert!(error.contains(&expected), "{error}");
    }
}

/// Gives a tensor of a safetensors file another name: a part of its name in the file's header, which is JSON after its length.
fn replace_name(from: &'static str, to: &'static str) -> impl Fn(Vec<u8>) -> Option<Vec<u8>> {
    move |bytes| {
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
        let header = std::str::from_utf8(header).unwrap();
        assert!(header.contains(from), "{from} is not in the file");
        let header = header.replace(from, to);
        Some([&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat())
    }
}
