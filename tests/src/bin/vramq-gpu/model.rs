//! Models with random weights, of the shapes that people use.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::Value;
use tempfile::TempDir;
use vramq_tests::random::Random;

/// A model's folder whose files besides weights and sizes are taken from here: tokeniser, pooling, longest text.
const TEMPLATE: &str = "inference/tests/fixtures/tiny-long";

/// The sizes of a BERT.
#[derive(Clone, Copy, Debug)]
struct Shape {
    name: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    feed_forward: usize,
}

const SHAPES: &[Shape] = &[
    Shape { name: "tiny", layers: 2, hidden: 64, heads: 2, feed_forward: 256 },
    Shape { name: "minilm", layers: 6, hidden: 384, heads: 12, feed_forward: 1536 },
    Shape { name: "base", layers: 12, hidden: 768, heads: 12, feed_forward: 3072 },
    Shape { name: "large", layers: 24, hidden: 1024, heads: 16, feed_forward: 4096 },
];

/// A model by the name of a shape, drawn at random and removed with this, or by its folder.
pub struct Named {
    pub name: String,
    pub path: PathBuf,
    _drawn: Option<TempDir>,
}

impl Named {
    pub fn of(model: &str, random: &mut Random) -> Result<Self> {
        let Some(shape) = SHAPES.iter().find(|shape| shape.name == model) else {
            let path = PathBuf::from(model);
            let name = path.file_name().map_or(model.to_owned(), |name| name.to_string_lossy().into_owned());
            return Ok(Self { name, path, _drawn: None });
        };
        let drawn = tempfile::tempdir()?;
        draw(*shape, drawn.path(), random)?;
        Ok(Self { name: model.to_owned(), path: drawn.path().to_owned(), _drawn: Some(drawn) })
    }
}

/// Draws a model of a shape into a folder.
pub fn draw_into(shape: &str, folder: &Path, random: &mut Random) -> Result<bool> {
    let shape =
        SHAPES.iter().find(|known| known.name == shape).with_context(|| format!("no shape {shape}"))?;
    fs::create_dir_all(folder)?;
    draw(*shape, folder, random)?;
    Ok(true)
}

fn draw(shape: Shape, folder: &Path, random: &mut Random) -> Result<()> {
    copy(Path::new(TEMPLATE), folder).context("copy the template's files")?;
    let Shape { layers, hidden, heads, feed_forward, .. } = shape;
    let config = rewrite(
        &folder.join("config.json"),
        &[
            ("hidden_size", hidden),
            ("num_hidden_layers", layers),
            ("num_attention_heads", heads),
            ("intermediate_size", feed_forward),
        ],
    )?;
    rewrite(&folder.join("1_Pooling/config.json"), &[("word_embedding_dimension", hidden)])?;
    let size =
        |key: &str| config[key].as_u64().map(|size| size as usize).with_context(|| format!("no {key}"));
    let embeddings = [size("vocab_size")?, size("max_position_embeddings")?, size("type_vocab_size")?];
    write_weights(shape, embeddings, &folder.join("model.safetensors"), random)
}

/// Sets numbers of a file in JSON.
fn rewrite(file: &Path, numbers: &[(&str, usize)]) -> Result<Value> {
    let mut value: Value = serde_json::from_slice(&fs::read(file)?)?;
    for (key, number) in numbers {
        value[*key] = (*number).into();
    }
    fs::write(file, value.to_string())?;
    Ok(value)
}

/// The folder's files but its weights.
fn copy(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            fs::create_dir(&target)?;
            copy(&entry.path(), &target)?;
        } else if entry.file_name() != "model.safetensors" {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Names and shapes as transformers has them for a BERT.
fn write_weights(shape: Shape, embeddings: [usize; 3], file: &Path, random: &mut Random) -> Result<()> {
    let Shape { layers, hidden, feed_forward, .. } = shape;
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let mut draw = |name: String, sizes: &[usize], mean: f32, deviation: f32| {
        let count = sizes.iter().product();
        let bytes = (0..count).flat_map(|_| (mean + deviation * normal(random)).to_le_bytes()).collect();
        tensors.insert(name, (sizes.to_vec(), bytes));
    };
    let [words, positions, types] = embeddings;
    for (name, rows) in [("word", words), ("position", positions), ("token_type", types)] {
        draw(format!("embeddings.{name}_embeddings.weight"), &[rows, hidden], 0.0, 0.05);
    }
    let mut norms = vec!["embeddings.LayerNorm".to_owned()];
    for layer in 0..layers {
        let layer = format!("encoder.layer.{layer}");
        let maps = [
            ("attention.self.query", hidden, hidden),
            ("attention.self.key", hidden, hidden),
            ("attention.self.value", hidden, hidden),
            ("attention.output.dense", hidden, hidden),
            ("intermediate.dense", feed_forward, hidden),
            ("output.dense", hidden, feed_forward),
        ];
        for (name, rows, columns) in maps {
            draw(format!("{layer}.{name}.weight"), &[rows, columns], 0.0, 0.04);
            draw(format!("{layer}.{name}.bias"), &[rows], 0.0, 0.1);
        }
        norms
            .extend(["attention.output.LayerNorm", "output.LayerNorm"].map(|name| format!("{layer}.{name}")));
    }
    for norm in norms {
        draw(format!("{norm}.weight"), &[hidden], 1.0, 0.1);
        draw(format!("{norm}.bias"), &[hidden], 0.0, 0.1);
    }
    let views = tensors
        .iter()
        .map(|(name, (sizes, bytes))| Ok((name, TensorView::new(Dtype::F32, sizes.clone(), bytes)?)))
        .collect::<Result<Vec<_>>>()?;
    Ok(serialize_to_file(views, None, file)?)
}

/// Near enough to a normal distribution of deviation 1: the sum of twelve uniform ones (Irwin and Hall).
fn normal(random: &mut Random) -> f32 {
    const STEPS: usize = 1 << 24;
    let sum: usize = (0..12).map(|_| random.below(STEPS)).sum();
    sum as f32 / STEPS as f32 - 6.0
}
