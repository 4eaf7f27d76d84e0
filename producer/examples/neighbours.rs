//! Shows the nearest neighbours of some lines of a text file, given their embeddings as NumPy .npy (f32, normalised):
//! `neighbours TEXTS.txt VECTORS.npy`.

use std::path::Path;

use anyhow::Context;

/// Lines whose neighbours are shown, evenly spread over the file.
const QUERIES: usize = 5;
const NEIGHBOURS: usize = 3;

fn main() -> anyhow::Result<()> {
    let [texts, vectors]: [String; 2] = std::env::args()
        .skip(1)
        .collect::<Vec<_>>()
        .try_into()
        .ok()
        .context("usage: neighbours TEXTS VECTORS.npy")?;
    let texts = std::fs::read_to_string(&texts).with_context(|| texts.clone())?;
    let texts: Vec<_> = texts.lines().collect();
    let vectors = read_npy(Path::new(&vectors))?;
    anyhow::ensure!(vectors.len() == texts.len(), "{} vectors for {} texts", vectors.len(), texts.len());
    for query in (0..QUERIES).map(|i| i * texts.len() / QUERIES) {
        println!("\n  {}", shortened(texts[query]));
        let mut others: Vec<_> = (0..texts.len())
            .filter(|at| *at != query)
            .map(|at| (cosine(&vectors[query], &vectors[at]), at))
            .collect();
        others.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (score, at) in others.into_iter().take(NEIGHBOURS) {
            println!("    {score:.2}  {}", shortened(texts[at]));
        }
    }
    Ok(())
}

/// Of unit vectors.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn shortened(text: &str) -> String {
    let cut: String = text.chars().take(100).collect();
    if cut.len() < text.len() { format!("{cut}…") } else { cut }
}

/// Rows of a two-dimensional little-endian f32 array (NumPy format 1.0).
fn read_npy(path: &Path) -> anyhow::Result<Vec<Vec<f32>>> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    anyhow::ensure!(
        bytes.starts_with(b"\x93NUMPY\x01\x00"),
        "{}: no NumPy file of version 1.0",
        path.display()
    );
    let length =
        bytes.get(8..10).map(|b| usize::from(u16::from_le_bytes([b[0], b[1]]))).context("truncated")?;
    let header = std::str::from_utf8(bytes.get(10..10 + length).context("truncated")?)?;
    anyhow::ensure!(header.contains("'<f4'"), "not f32: {header}");
    let shape = header.split_once('(').and_then(|(_, rest)| rest.split_once(')')).context("no shape")?.0;
    let columns: usize = shape.split(',').nth(1).context("not two-dimensional")?.trim().parse()?;
    let values: Vec<f32> =
        bytes[10 + length..].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    Ok(values.chunks_exact(columns).map(<[f32]>::to_vec).collect())
}
