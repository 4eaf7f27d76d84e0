//! Vectors: element type, format, bytes.

use half::f16;
use serde::{Deserialize, Serialize};

use crate::params::Params;

/// A vector, in the format that the job asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    pub values: Values,
    /// In JSON: base64 of the little-endian bytes, rather than numbers.
    pub base64: bool,
}

/// A vector's elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    F32(Vec<f32>),
    F16(Vec<f16>),
}

/// The type of a vector's elements on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    #[default]
    F32,
    F16,
}

/// How a job wants its vectors: the `params` `dtype` (`f32`, `f16`), `encoding` (`numbers`, `base64`) and `dimensions`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EmbeddingFormat {
    pub dtype: Dtype,
    pub base64: bool,
    /// Keep this many first elements, and scale them to length 1: for models that were trained for that.
    pub dimensions: Option<u32>,
}

impl EmbeddingFormat {
    /// Reads the format from a job's params, which hold nothing else.
    ///
    /// # Errors
    /// Names the first unknown key or value, with what is allowed.
    pub fn from_params(params: &Params) -> Result<Self, String> {
        let mut format = Self::default();
        for (key, value) in &params.0 {
            match (key.as_str(), value.as_str()) {
                ("dtype", Some("f32")) => format.dtype = Dtype::F32,
                ("dtype", Some("f16")) => format.dtype = Dtype::F16,
                ("dtype", _) => return Err(format!(r#"params.dtype is {value}; use "f32" or "f16""#)),
                ("encoding", Some("numbers")) => format.base64 = false,
                ("encoding", Some("base64")) => format.base64 = true,
                ("encoding", _) => {
                    return Err(format!(r#"params.encoding is {value}; use "numbers" or "base64""#));
                }
                ("dimensions", _) => {
                    let wanted = value.as_u64().and_then(|number| u32::try_from(number).ok());
                    format.dimensions = match wanted.filter(|number| *number > 0) {
                        Some(number) => Some(number),
                        None => return Err(format!("params.dimensions is {value}; use a number from 1")),
                    };
                }
                _ => {
                    return Err(format!(
                        "params.{key} is unknown; there are `dtype`, `encoding`, `dimensions` and, for models with prompts, \
                         `prompt_name`"
                    ));
                }
            }
        }
        Ok(format)
    }

    /// A vector in this format; f16 rounds to nearest even.
    pub fn embedding(self, mut values: Vec<f32>) -> Embedding {
        if let Some(dimensions) = self.dimensions {
            shorten(&mut values, dimensions as usize);
        }
        let values = match self.dtype {
            Dtype::F32 => Values::F32(values),
            Dtype::F16 => Values::F16(values.into_iter().map(f16::from_f32).collect()),
        };
        Embedding { values, base64: self.base64 }
    }
}

/// The first elements of a vector, of length 1 again.
fn shorten(values: &mut Vec<f32>, dimensions: usize) {
    values.truncate(dimensions);
    let norm = values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if norm > 0.0 {
        values.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
}

impl Values {
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
        }
    }

    pub fn len(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::F16(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as f32, exact.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(v) => v.clone(),
            Self::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// The index of the first element that is infinite or not a number. No reader of a vector expects one.
    pub fn first_not_finite(&self) -> Option<usize> {
        match self {
            Self::F32(v) => v.iter().position(|x| !x.is_finite()),
            Self::F16(v) => v.iter().position(|x| !x.is_finite()),
        }
    }

    pub(crate) fn to_le_bytes(&self) -> Vec<u8> {
        match self {
            Self::F32(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::F16(v) => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    pub(crate) fn from_le_bytes(dtype: Dtype, bytes: &[u8]) -> Result<Self, String> {
        let size = match dtype {
            Dtype::F32 => 4,
            Dtype::F16 => 2,
        };
        if !bytes.len().is_multiple_of(size) {
            return Err(format!(
                "an embedding of {} bytes is not a whole number of {size}-byte elements",
                bytes.len()
            ));
        }
        Ok(match dtype {
            Dtype::F32 => Self::F32(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            Dtype::F16 => Self::F16(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b)).collect()),
        })
    }
}
