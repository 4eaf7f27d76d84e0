//! Random weights of models, and the file that has them.

use serde_json::{Map, Value, json};

/// A tensor's name and its shape.
pub type Tensor = (String, Vec<usize>);

/// Draws weights: the same ones each time. models/lengths.py draws them by itself.
#[derive(Debug)]
pub struct Draw {
    state: u32,
}

impl Default for Draw {
    fn default() -> Self {
        Self { state: 7 }
    }
}

impl Draw {
    /// The elements of the next tensor. Products are about as large as their inputs, and norms multiply by about one.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Vec<f32> {
        let (around, size) = match *shape {
            [_] if name.to_lowercase().ends_with("norm.weight") => (1.0, 0.2),
            [_, inner] => (0.0, (3.0 / inner as f32).sqrt()),
            _ => (0.0, 0.2),
        };
        (0..shape.iter().product()).map(|_| around + size * self.number()).collect()
    }

    /// From -1 to 1: any sequence without a short period.
    fn number(&mut self) -> f32 {
        self.state = self.state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.state >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// A file of tensors in f32.
pub fn safetensors(tensors: impl IntoIterator<Item = (Tensor, Vec<f32>)>) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for ((name, shape), elements) in tensors {
        let start = data.len();
        data.extend(elements.iter().flat_map(|element| element.to_le_bytes()));
        let place = json!({"dtype": "F32", "shape": shape, "data_offsets": [start, data.len()]});
        header.insert(name, place);
    }
    let header = Value::Object(header).to_string();
    let length = header.len() as u64;
    [&length.to_le_bytes(), header.as_bytes(), &data].concat()
}

/// The tensors of such a file, whatever their types are.
///
/// # Errors
/// It is no such file.
pub fn tensors(file: &[u8]) -> anyhow::Result<Vec<Tensor>> {
    let (length, rest) = file.split_first_chunk().ok_or_else(|| anyhow::anyhow!("no length"))?;
    let header = rest.get(..u64::from_le_bytes(*length) as usize).unwrap_or_default();
    let header: Map<String, Value> = serde_json::from_slice(header)?;
    let of = |(name, place): (String, Value)| Ok((name, serde_json::from_value(place["shape"].clone())?));
    header.into_iter().filter(|(name, _)| name != "__metadata__").map(of).collect()
}
