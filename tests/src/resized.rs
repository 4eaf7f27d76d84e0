//! Models of a fixture's family in other sizes, with random weights.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::bert::Written;
use crate::programs::root;
use crate::weights::{Draw, safetensors, tensors};

/// Keys of configurations that are sizes of tensors.
const SIZES: [&str; 6] = [
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "in_features",
    "out_features",
    "word_embedding_dimension",
];

/// Writes a fixture's model with each size on the left, wherever it has that, replaced by the one on the right.
///
/// # Errors
/// There is no room for it, or no such fixture.
pub fn resized(name: &str, sizes: &[(usize, usize)]) -> Result<Written> {
    let folder = tempfile::tempdir()?;
    copy(&root().join("inference/tests/fixtures").join(name), folder.path(), sizes, &mut Draw::default())
        .with_context(|| name.to_owned())?;
    Ok(Written::new(folder))
}

fn copy(from: &Path, to: &Path, sizes: &[(usize, usize)], draw: &mut Draw) -> Result<()> {
    let mut entries = fs::read_dir(from)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            fs::create_dir(&to)?;
            copy(&from, &to, sizes, draw)?;
        } else if from.extension() == Some(OsStr::new("safetensors")) {
            fs::write(to, weights(&fs::read(from)?, sizes, draw)?)?;
        } else if entry.file_name() == "config.json" {
            fs::write(to, config(&fs::read(from)?, sizes)?)?;
        } else {
            fs::copy(from, to)?;
        }
    }
    Ok(())
}

fn replaced(size: usize, sizes: &[(usize, usize)]) -> usize {
    sizes.iter().find(|(from, _)| *from == size).map_or(size, |(_, to)| *to)
}

fn weights(file: &[u8], sizes: &[(usize, usize)], draw: &mut Draw) -> Result<Vec<u8>> {
    let drawn = tensors(file)?.into_iter().map(|(name, shape)| {
        let shape: Vec<usize> = shape.into_iter().map(|size| replaced(size, sizes)).collect();
        let elements = draw.tensor(&name, &shape);
        ((name, shape), elements)
    });
    Ok(safetensors(drawn))
}

fn config(file: &[u8], sizes: &[(usize, usize)]) -> Result<String> {
    let mut config: Value = serde_json::from_slice(file)?;
    for (_, size) in config.as_object_mut().into_iter().flatten().filter(|(key, _)| SIZES.contains(&&***key))
    {
        let from = size.as_u64().context("a size is no number")?;
        *size = replaced(from as usize, sizes).into();
    }
    Ok(config.to_string())
}
