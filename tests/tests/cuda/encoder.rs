//! The encoder on CUDA against references that sentence-transformers and transformers made: of texts, of pairs, and of token ids, for
//! lengths and shapes that no text has. An emulation of a GPU runs the kernels' source, and fails what a GPU would not run correctly
//! (tests/fake_cuda/emulation). These tests show nothing about a GPU's speed.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use sha2::{Digest as _, Sha256};
use vramq_inference::device::Device as _;
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::encoder::{Encoder, LoadError};
use vramq_inference::engine::{Engine as _, Item, shape_of};
use vramq_schemas::{Input, Params};
use vramq_tests::bert::{RandomBert, fixture, reference};
use vramq_tests::encoders::{
    all_as_referred, cache, cosine, cuda_encoder, lengths_agree, logits_agree, minilm, open, texts_agree,
    tokens, vectors, vectors_agree,
};
use vramq_tests::fake_cuda::{allocated, cublaslt, gpu, outstanding};
use vramq_tests::lengths::Lengths;
use vramq_tests::setup::full;
use vramq_tests::with_libraries;

with_libraries! { [gpu()?];
    tiny_models_agree: [];
    every_family_agrees: [];
    rotary_families_agree: [];
    heads_of_128_and_256_agree: [];
    rerankers_agree: [];
    classifiers_of_several_labels_agree: [];
    sparse_vectors_agree: [];
    sizes_that_are_no_multiple_of_anything_agree: [];
    heads_of_32_and_64_agree: [];
    a_wide_model_agrees: [];
    every_length_agrees: [];
    empty_items_agree: [];
    minilm_agrees_in_f32: [];
    minilm_agrees_in_16_bits: [];
    turing_has_f16_and_f32: ["FAKE_CUDA_SM" = "75"];
    the_type_is_by_the_model = types_are_chosen: [];
    the_type_is_by_the_device = types_are_chosen_on_turing: ["FAKE_CUDA_SM" = "75"];
    models_without_a_kernel_are_refused: [];
    numbers_too_large_for_f16_are_refused: [];
    a_pass_takes_its_plan_and_gives_it_back: [];
    kernels_are_compiled_once: [];
    embedded_kernels_replace_refused_ones: ["FAKE_CUDA_FAIL" = "cuModuleLoadData:1:209"];
    a_driver_that_takes_no_kernels_is_told: ["FAKE_CUDA_FAIL" = "cuModuleLoadData:1:209:0"];
}

// The same where cuBLASLt makes the products: tests/tests/cuda/products.rs has the rest of it.
with_libraries! { [gpu()?, cublaslt()?];
    cublaslt_agrees_with_minilm = minilm_agrees_in_16_bits: [];
    cublaslt_has_a_workspace = a_wide_model_agrees: [];
    cublaslt_leaves_the_vocabulary_to_the_kernels = sparse_vectors_agree: [];
    cublaslt_counts_in_what_a_model_takes = a_pass_takes_its_plan_and_gives_it_back: [];
}

const ALL: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];

mod bodies {
    use super::*;

    pub fn tiny_models_agree() -> Result<()> {
        for name in ["tiny-mean", "tiny-max"] {
            texts_agree(name, &ALL)?;
        }
        Ok(())
    }

    pub fn every_family_agrees() -> Result<()> {
        for name in ["tiny-roberta", "tiny-xlm-roberta", "tiny-camembert", "tiny-distilbert", "tiny-mpnet"] {
            texts_agree(name, &ALL)?;
        }
        // Distances beyond a tile of keys, and beyond those that have a bias of their own.
        lengths_agree("tiny-mpnet", &ALL, &[1, 9, 64, 65, 130, 300])
    }

    pub fn rotary_families_agree() -> Result<()> {
        for name in ["tiny-modernbert-bias", "tiny-gte-no-types", "tiny-dense"] {
            texts_agree(name, &ALL)?;
        }
        // With texts of up to 300 tokens.
        for name in ["tiny-modernbert", "tiny-qwen3", "tiny-nomic", "tiny-gte", "tiny-gte-ntk", "tiny-gemma"]
        {
            texts_agree(name, &ALL)?;
        }
        // Windows that begin and end within a tile of keys; texts of several tiles.
        for name in ["tiny-modernbert", "tiny-qwen3", "tiny-nomic", "tiny-gte", "tiny-gemma"] {
            lengths_agree(name, &ALL, if full() { &[1, 8, 64, 65, 130, 300] } else { &[8, 65, 130] })?;
        }
        Ok(())
    }

    pub fn heads_of_128_and_256_agree() -> Result<()> {
        for name in ["bert-1x256x2x96", "bert-1x256x1x96", "bert-1x200x1x96"] {
            lengths_agree(name, &ALL, &[1, 31, 33, 100])?;
        }
        Ok(())
    }

    pub fn rerankers_agree() -> Result<()> {
        for name in [
            "tiny-bert-reranker",
            "tiny-roberta-reranker",
            "tiny-xlm-roberta-reranker",
            "tiny-mpnet-reranker",
        ] {
            logits_agree(name, &ALL)?;
        }
        for name in ["tiny-modernbert-reranker", "tiny-gte-reranker", "tiny-qwen3-reranker"] {
            logits_agree(name, &ALL)?;
        }
        Ok(())
    }

    /// Three labels, and four that do not exclude each other.
    pub fn classifiers_of_several_labels_agree() -> Result<()> {
        for name in ["tiny-distilbert-classifier", "tiny-camembert-classifier"] {
            logits_agree(name, &ALL)?;
        }
        for name in ["tiny-modernbert-classifier", "tiny-qwen3-classifier"] {
            logits_agree(name, &ALL)?;
        }
        Ok(())
    }

    /// Their vocabulary is several chunks, of which the last is no multiple of anything.
    pub fn sparse_vectors_agree() -> Result<()> {
        for name in ["tiny-splade", "tiny-splade-distilbert"] {
            texts_agree(name, &ALL)?;
            lengths_agree(name, &ALL, &[0, 3, 24, 0, 1])?;
        }
        Ok(())
    }

    pub fn sizes_that_are_no_multiple_of_anything_agree() -> Result<()> {
        for name in ["tiny-cls-normalize", "tiny-mean-normalize-v6-f16"] {
            texts_agree(name, &ALL)?;
        }
        Ok(())
    }

    pub fn heads_of_32_and_64_agree() -> Result<()> {
        for name in ["bert-2x96x3x200", "bert-2x192x3x320", "bert-1x160x4x136"] {
            lengths_agree(name, &ALL, &[1, 7, 64, 65, 130, 200])?;
        }
        Ok(())
    }

    pub fn a_wide_model_agrees() -> Result<()> {
        lengths_agree("bert-1x1024x16x4096", &[ElementType::F16], &[5, 70])
    }

    pub fn every_length_agrees() -> Result<()> {
        let near = |n: usize| [n - 1, n, n + 1];
        let lengths: Vec<usize> =
            [2, 16, 32, 64, 128, 256].into_iter().flat_map(near).chain([5, 100, 511, 512]).collect();
        // A pass of them all is long for an emulation. Those around a tile of keys, and of rows, are in every run.
        let lengths =
            if full() { lengths } else { vec![1, 2, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257] };
        lengths_agree("tiny-long", &ALL, &lengths)
    }

    pub fn empty_items_agree() -> Result<()> {
        lengths_agree("tiny-mean", &ALL, &[0, 3, 0, 0, 1])?;
        lengths_agree("tiny-cls-normalize", &ALL, &[0])
    }

    /// Some texts of MiniLM's reference, and their vectors: an emulation takes long for all of them.
    fn some_of_minilm(which: &[usize]) -> Result<(Vec<String>, Vec<Vec<f32>>)> {
        let (texts, vectors) = reference("minilm")?;
        Ok(which.iter().map(|at| (texts[*at].clone(), vectors[*at].clone())).unzip())
    }

    /// Of 8 and 14 tokens.
    pub fn minilm_agrees_in_f32() -> Result<()> {
        vectors_agree(&minilm()?, some_of_minilm(&[0, 1])?, &[ElementType::F32])
    }

    /// Of 8 tokens, and of 218, which are several tiles of keys; in bf16 of 14 instead, but for `make nightly`.
    pub fn minilm_agrees_in_16_bits() -> Result<()> {
        let source = minilm()?;
        for (element, which) in
            [(ElementType::F16, [0, 24]), (ElementType::Bf16, [0, if full() { 24 } else { 1 }])]
        {
            let (texts, expected) = some_of_minilm(&which)?;
            let inputs: Vec<Input> = texts.into_iter().map(Input::Text).collect();
            let encoder = cuda_encoder(&source, element, Some(cache()?))?;
            let items = encoder.prepare(&inputs, &Params::default())?;
            let found = vectors(&encoder.run(&items)?)?;
            ensure!(found.len() == expected.len(), "{} vectors in {element}", found.len());
            for (found, expected) in found.iter().zip(&expected) {
                let cosine = cosine(found, expected);
                ensure!(cosine >= 0.9999, "cosine {cosine} in {element}");
            }
        }
        Ok(())
    }

    pub fn turing_has_f16_and_f32() -> Result<()> {
        texts_agree("tiny-mean", &[ElementType::F32, ElementType::F16])?;
        let refused =
            cuda_encoder(&fixture("tiny-mean"), ElementType::Bf16, None).err().context("it loads")?;
        let text = refused.to_string();
        ensure!(text == "bf16 needs compute capability 8.0 or newer, the device has 7.5", "{text}");
        Ok(())
    }

    /// What models are computed in where nobody says.
    fn chosen(names: &[&str]) -> Result<Vec<String>> {
        let computes = |name: &&str| -> Result<String> {
            let options = CudaOptions { cache: Some(cache()?), ..CudaOptions::default() };
            let encoder = Encoder::load_cuda(&fixture(name), open()?, &options, 2)?;
            let computes = encoder.computes().context("it does not say")?;
            let (computes, products) = computes.split_once(", ").context("it does not say who multiplies")?;
            ensure!(products.starts_with("matrix products by "), "{name}: {products}");
            let computes = computes.to_owned();
            let tokens = if computes == "f32" { 2048 } else { 8192 };
            ensure!(encoder.pass_cost() == Some(tokens), "{name}: passes of {:?}", encoder.pass_cost());
            Ok(computes)
        };
        names.iter().map(computes).collect()
    }

    pub fn types_are_chosen() -> Result<()> {
        let found = chosen(&["tiny-mean", "tiny-mpnet", "tiny-modernbert", "tiny-qwen3", "tiny-nomic"])?;
        ensure!(found == ["f16", "f16", "bf16", "bf16", "f16"], "{found:?}");
        Ok(())
    }

    pub fn types_are_chosen_on_turing() -> Result<()> {
        let found = chosen(&["tiny-mean", "tiny-qwen3"])?;
        ensure!(found == ["f16", "f32"], "{found:?}");
        Ok(())
    }

    pub fn models_without_a_kernel_are_refused() -> Result<()> {
        let shapes = [
            (RandomBert { hidden: 528, heads: 2, ..RandomBert::default() }, "heads of 264 elements"),
            (
                RandomBert { hidden: 4104, heads: 513, feed_forward: 8, ..RandomBert::default() },
                "a width of 4104",
            ),
        ];
        for (shape, words) in shapes {
            let refused =
                cuda_encoder(&shape.write()?.source(), ElementType::F16, None).err().context("it loads")?;
            ensure!(refused.to_string().contains(words), "{refused}");
        }
        Ok(())
    }

    pub fn numbers_too_large_for_f16_are_refused() -> Result<()> {
        let model = RandomBert { scale: 1e6, ..RandomBert::default() }.write()?;
        let refused = cuda_encoder(&model.source(), ElementType::F16, Some(cache()?));
        let refused = refused.err().context("it loads")?;
        ensure!(matches!(refused, LoadError::Unsupported { .. }), "{refused:?}");
        ensure!(refused.to_string().contains("dtype = \"bf16\""), "{refused}");
        cuda_encoder(&model.source(), ElementType::Bf16, Some(cache()?))?;
        Ok(())
    }

    /// The driver counts what it is asked for. Heads that share the width; sparse vectors; keys that heads share, with a gate; a norm after
    /// each block; a gate alone.
    pub fn a_pass_takes_its_plan_and_gives_it_back() -> Result<()> {
        for name in ["tiny-long", "tiny-splade", "tiny-qwen3", "tiny-gemma", "tiny-modernbert"] {
            takes_its_plan(name).with_context(|| name)?;
        }
        Ok(())
    }

    fn takes_its_plan(name: &str) -> Result<()> {
        let device = open()?;
        let (before, held_before) = (device.memory(), outstanding()?);
        let options = CudaOptions { cache: Some(cache()?), ..CudaOptions::default() };
        let encoder = Encoder::load_cuda(&fixture(name), Arc::clone(&device), &options, 2)?;
        let (loaded, held) = (device.memory(), outstanding()?);
        let resident = encoder.resident_bytes();
        ensure!(before.free - loaded.free == resident, "{before:?}, {loaded:?}");
        ensure!((held - held_before) as u64 == resident, "{held_before} and {held} bytes are held");
        let tokens_max = encoder.item_cost_max();
        for lengths in [&[4][..], &[1, 0, 17, 3], &[tokens_max]] {
            let items = tokens(&encoder, lengths);
            let asked_before = allocated()?;
            ensure!(encoder.run(&items)?.len() == lengths.len());
            let (asked, planned) = (allocated()? - asked_before, encoder.pass_bytes(shape_of(&items)));
            ensure!(asked as u64 == planned, "{asked} bytes for tokens of {lengths:?}, not {planned}");
            ensure!(outstanding()? == held && device.memory() == loaded, "{:?}", device.memory());
        }
        // More than there is: the same error as on any device, and the device is well after it.
        let of_one = encoder.pass_bytes(shape_of(&tokens(&encoder, &[tokens_max])));
        let many = usize::try_from(2 * loaded.total / of_one)?;
        let vast: Vec<Item> = tokens(&encoder, &vec![tokens_max; many]);
        let planned = encoder.pass_bytes(shape_of(&vast));
        let asked_before = allocated()?;
        let refused = encoder.run(&vast).err().context("it has run")?;
        ensure!(refused.to_string().contains(&format!("asked for {planned} bytes")), "{refused}");
        ensure!(allocated()? == asked_before && outstanding()? == held, "{:?}", device.memory());
        ensure!(device.memory() == loaded, "{:?}", device.memory());
        ensure!(encoder.run(&tokens(&encoder, &[4]))?.len() == 1);
        ensure!(device.memory() == loaded && device.active_pass_bytes() == 0, "{:?}", device.memory());
        Ok(())
    }

    /// NVRTC's code is stored in the cache, read from there, and compiled again if the cache is broken. The new code may differ from the
    /// old: now and then, mostly on a busy machine, NVRTC assigns other registers to the same source.
    pub fn kernels_are_compiled_once() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let model = fixture("tiny-mean");
        let load = || cuda_encoder(&model, ElementType::F32, Some(folder.path().to_owned()));
        let code = || -> Result<Vec<PathBuf>> {
            let all =
                std::fs::read_dir(folder.path())?.map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
            Ok(all.into_iter().filter(|file| file.extension().is_some_and(|own| own == "bin")).collect())
        };
        let modified = |file: &PathBuf| -> Result<_> { Ok(std::fs::metadata(file)?.modified()?) };
        load()?;
        let [file] = &code()?[..] else { anyhow::bail!("{:?}", code()?) };
        let compiled = std::fs::read(file)?;
        let first = modified(file)?;
        load()?;
        ensure!(modified(file)? == first, "compiled again");
        std::fs::write(file, &compiled[..1000])?;
        load()?;
        ensure!(code()?.len() == 1, "{:?}", code()?);
        let mended = std::fs::read(file)?;
        let (digest, code) = mended.split_at_checked(32).context("no digest")?;
        ensure!(Sha256::digest(code)[..] == *digest, "the code is not whole");
        ensure!(code.starts_with(b"\x7fELF"), "no machine code");
        let second = modified(file)?;
        load()?;
        ensure!(modified(file)? == second, "the mended code was not used");
        Ok(())
    }

    /// A driver that is older than NVRTC rejects its code. Then the worker uses the embedded kernels.
    pub fn embedded_kernels_replace_refused_ones() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let reference = Lengths::read("tiny-mean")?;
        let (items, expected) = reference.of(&[9, 3])?;
        let encoder = cuda_encoder(&reference.source, ElementType::F32, Some(folder.path().to_owned()))?;
        all_as_referred(ElementType::F32, &vectors(&encoder.run(&items)?)?, &expected)?;
        for file in std::fs::read_dir(folder.path())? {
            let path = file?.path();
            ensure!(path.extension().is_some_and(|own| own == "lock"), "{} was kept", path.display());
        }
        Ok(())
    }

    pub fn a_driver_that_takes_no_kernels_is_told() -> Result<()> {
        let refused =
            cuda_encoder(&fixture("tiny-mean"), ElementType::F32, None).err().context("it loads")?;
        let text = refused.to_string();
        for part in
            ["the driver rejects the embedded kernels", "NVRTC could not help: the driver rejects its code"]
        {
            ensure!(text.contains(part), "{text}");
        }
        Ok(())
    }
}
