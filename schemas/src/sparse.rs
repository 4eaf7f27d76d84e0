//! Sparse vectors: the few elements that are not zero, by their indices.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserialize, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde::{Deserializer, Serialize};

use crate::notation::ELEMENTS_MAX;
use crate::reading::Text;

/// A vector of which most elements are zero: the ascending indices of the other elements, and their finite values.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Sparse {
    indices: Vec<u32>,
    values: Vec<f32>,
}

const KEYS: [&str; 2] = ["indices", "values"];

impl Sparse {
    /// A vector with these elements.
    ///
    /// # Errors
    /// There are not as many indices as values, the indices do not ascend, or a value is infinite or not a number.
    pub fn new(indices: Vec<u32>, values: Vec<f32>) -> Result<Self, String> {
        if indices.len() != values.len() {
            return Err(format!("a sparse vector has {} indices and {} values", indices.len(), values.len()));
        }
        if let Some(at) = indices.windows(2).position(|pair| pair[0] >= pair[1]) {
            let (first, second) = (indices[at], indices[at + 1]);
            return Err(format!("the indices of a sparse vector do not ascend: {first}, {second}"));
        }
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(format!("a sparse vector has the value {} at index {}", values[at], indices[at])),
            None => Ok(Self { indices, values }),
        }
    }

    /// How many elements it has that are not zero.
    pub fn len(&self) -> usize {
        self.indices.len()
    }

    pub fn is_empty(&self) -> bool {
        self.indices.is_empty()
    }

    /// In ascending order.
    pub fn indices(&self) -> &[u32] {
        &self.indices
    }

    /// The value at each of the indices.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The indices as little-endian u32, and the values as little-endian f32.
    pub(crate) fn to_le_bytes(&self) -> (Vec<u8>, Vec<u8>) {
        (
            self.indices.iter().flat_map(|index| index.to_le_bytes()).collect(),
            self.values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        )
    }

    pub(crate) fn from_le_bytes(indices: &[u8], values: &[u8]) -> Result<Self, String> {
        let ((indices, more_indices), (values, more_values)) = (indices.as_chunks(), values.as_chunks());
        if !more_indices.is_empty() || !more_values.is_empty() {
            return Err(
                "the indices or the values of a sparse vector are not a whole number of 4-byte elements"
                    .to_owned(),
            );
        }
        let indices = indices.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        Self::new(indices, values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

/// Reads `{"indices": […], "values": […]}`, the form in encodings that name their fields.
pub(crate) struct SparseFields;

impl<'de> DeserializeSeed<'de> for SparseFields {
    type Value = Sparse;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Sparse, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for SparseFields {
    type Value = Sparse;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a sparse vector with the keys `indices` and `values`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Sparse, A::Error> {
        let (mut indices, mut values) = (None, None);
        while let Some(key) = map.next_key_seed(Text)? {
            match key.as_str() {
                "indices" => indices = Some(map.next_value_seed(Elements::<u32>(PhantomData))?),
                "values" => values = Some(map.next_value_seed(Elements::<f32>(PhantomData))?),
                _ => return Err(de::Error::unknown_field(&key, &KEYS)),
            }
        }
        match (indices, values) {
            (Some(indices), Some(values)) => Sparse::new(indices, values).map_err(de::Error::custom),
            _ => Err(de::Error::custom("a sparse vector has `indices` and `values`")),
        }
    }
}

/// Reads a list of numbers.
struct Elements<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Elements<T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Elements<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {ELEMENTS_MAX} numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = seq.next_element()? {
            if elements.len() == ELEMENTS_MAX {
                return Err(de::Error::invalid_length(elements.len() + 1, &self));
            }
            elements.push(element);
        }
        // What a list that doubles has left over would add up over the vectors of a body.
        elements.shrink_to_fit();
        Ok(elements)
    }
}
