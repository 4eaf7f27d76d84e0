//! Models with two kinds of layers: in some a token sees the whole text, in others a window. Reads the kind of each layer, and the
//! rotary positions of each kind.

use std::collections::HashMap;

use serde::Deserialize;

use super::rotary::Parameters;
use super::{Attention, ConfigFile, Rotary, Sees};
use crate::engine::encoder::LoadError;

/// What a configuration says of them, as transformers 5 writes it.
#[derive(Deserialize)]
pub(super) struct LayerKinds {
    /// The kind of each layer.
    layer_types: Option<Vec<String>>,
    /// The rotation of each kind.
    rope_parameters: Option<HashMap<String, Option<Parameters>>>,
    /// Changes all rotations; as transformers 4 writes it.
    rope_scaling: Option<Parameters>,
}

/// What configurations call the kinds.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// The attention of both kinds: of a layer that sees all, and of one that sees so many tokens on each side.
pub(super) fn attentions(apart: usize) -> [Attention; 2] {
    [Sees::All, Sees::Near(apart)].map(|sees| Attention { sees, rotary: Some((sees != Sees::All).into()) })
}

impl LayerKinds {
    /// Whether the file lists the kind of each layer.
    pub fn are_listed(&self) -> bool {
        self.layer_types.is_some()
    }

    /// The attention of each of so many layers; `None` where the file does not list them.
    ///
    /// # Errors
    /// It lists another number of them, or other kinds.
    pub fn attention(
        &self,
        file: &ConfigFile<'_>,
        layers: usize,
        kinds: [Attention; 2],
    ) -> Result<Option<Vec<Attention>>, LoadError> {
        let Some(types) = &self.layer_types else { return Ok(None) };
        if types.len() != layers {
            return file.refuse(format!("{} kinds of {layers} layers", types.len()), "a kind for each layer");
        }
        let kind = |name: &String| match KINDS.iter().position(|kind| kind == name) {
            Some(kind) => Ok(kinds[kind]),
            None => file.refuse(format!("layers of the type `{name}`"), &KINDS.join(", ")),
        };
        types.iter().map(kind).collect::<Result<_, _>>().map(Some)
    }

    /// The rotations of both kinds, with these thetas where the file does not say.
    ///
    /// # Errors
    /// Rotations that this engine does not have.
    pub fn rotary(&self, file: &ConfigFile<'_>, thetas: [f64; 2]) -> Result<Vec<Rotary>, LoadError> {
        if let Some(scaling) = &self.rope_scaling {
            scaling.read(file, thetas[0])?;
            if scaling.has_theta() {
                return file.refuse("rope_scaling.rope_theta".into(), "the theta of each kind of layers");
            }
        }
        let given = |kind: &str| self.rope_parameters.as_ref().and_then(|all| all.get(kind)?.as_ref());
        let of_kind = |(kind, theta)| match given(kind) {
            Some(parameters) => parameters.read(file, theta),
            None => Rotary::new(file, theta, 1.0),
        };
        KINDS.into_iter().zip(thetas).map(of_kind).collect()
    }
}
