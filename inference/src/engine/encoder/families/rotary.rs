//! Rotary positions: reads their configuration, and computes the table with which attention rotates queries and keys.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::ConfigFile;
use crate::engine::encoder::LoadError;

/// A rotation of pairs of elements by a token's place (Su et al. 2021): element `i` of the first half of a head and
/// element `i` of the second half by the angle place · theta^(-2i / elements of a head).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::engine::encoder) struct Rotary {
    theta: f64,
    /// How many times longer texts are than those of the training: NTK-aware interpolation.
    stretch: f64,
}

/// What a configuration says: transformers 5 has all in one object, earlier ones beside each other.
#[derive(Deserialize)]
pub(super) struct RotaryConfig {
    rope_parameters: Option<Parameters>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Parameters>,
}

#[derive(Clone, Deserialize)]
pub(super) struct Parameters {
    rope_theta: Option<f64>,
    #[serde(flatten)]
    scaling: Scaling,
}

#[derive(Clone, Deserialize)]
struct Scaling {
    rope_type: Option<String>,
    /// Its older name. Some versions of transformers write both.
    #[serde(rename = "type")]
    older_type: Option<String>,
    factor: Option<f64>,
    /// GTE's own: the factor then depends on the element, by another formula.
    mixed_b: Option<f64>,
    /// What transformers ignores with the type `default`.
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl RotaryConfig {
    /// The rotation, with a family's own theta where the file does not say. `takes_ntk`: the family's published models
    /// are stretched.
    pub fn read(&self, file: &ConfigFile<'_>, theta: f64, takes_ntk: bool) -> Result<Rotary, LoadError> {
        let theta = self.rope_theta.unwrap_or(theta);
        // Where both are there, the older one counts alone, as in transformers. An empty object counts as none.
        let older = self.rope_scaling.as_ref().filter(|own| !own.is_empty());
        let rotary = match (older, &self.rope_parameters) {
            (Some(own), _) => Rotary::new(file, own.rope_theta.unwrap_or(theta), 1.0)?,
            (None, Some(own)) => own.read(file, theta)?,
            (None, None) => Rotary::new(file, theta, 1.0)?,
        };
        match older.map(|own| &own.scaling) {
            None => Ok(rotary),
            Some(scaling) => match (scaling.kind(), scaling.factor) {
                (None | Some("default"), None) => Ok(rotary),
                (Some("ntk"), Some(factor)) if takes_ntk && factor >= 1.0 && scaling.mixed_b.is_none() => {
                    Rotary::new(file, rotary.theta, factor)
                }
                (None | Some("default"), Some(factor)) => file.refuse(
                    format!("rotary positions with a factor of {factor} and without a type that takes one"),
                    "a factor with its type: transformers ignores one without, so remove it or name the type",
                ),
                (kind, _) => file.refuse(
                    format!("rotary positions of the type `{}`", kind.unwrap_or("(none)")),
                    if takes_ntk {
                        "`default`, `ntk` with a factor from 1 and without `mixed_b`"
                    } else {
                        "`default`"
                    },
                ),
            },
        }
    }
}

impl Scaling {
    fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.older_type.as_deref())
    }
}

impl Parameters {
    fn is_empty(&self) -> bool {
        let Scaling { rope_type, older_type, factor, mixed_b, others } = &self.scaling;
        let numbers = [self.rope_theta, *factor, *mixed_b];
        rope_type.is_none()
            && older_type.is_none()
            && numbers.iter().all(Option::is_none)
            && others.is_empty()
    }

    pub fn has_theta(&self) -> bool {
        self.rope_theta.is_some()
    }

    pub fn read(&self, file: &ConfigFile<'_>, theta: f64) -> Result<Rotary, LoadError> {
        match self.scaling.kind() {
            None | Some("default") => Rotary::new(file, self.rope_theta.unwrap_or(theta), 1.0),
            Some(other) => file.refuse(format!("rotary positions of the type `{other}`"), "`default`"),
        }
    }
}

impl Rotary {
    pub(super) fn new(file: &ConfigFile<'_>, theta: f64, stretch: f64) -> Result<Self, LoadError> {
        if [theta, stretch].iter().all(|number| number.is_finite() && *number > 0.0) {
            return Ok(Self { theta, stretch });
        }
        let found = format!("rotary positions with a theta of {theta} and a factor of {stretch}");
        file.refuse(found, "positive numbers")
    }

    /// A row for each position: the cosines of all pairs of a head, then their sines. Angles are in f32, as in the references. A
    /// stretched rotation multiplies theta by `stretch`, and divides its frequencies by stretch^(2 / elements of a head), as do
    /// GTE's own code and vLLM's `NTKScalingRotaryEmbedding`.
    pub fn table(&self, positions: usize, head: usize) -> Vec<f32> {
        let shorter = self.stretch.powf(2.0 / head as f64) as f32;
        let frequency = |at: usize| {
            let power = 2.0 * at as f32 / head as f32;
            1.0 / (self.theta * self.stretch).powf(f64::from(power)) as f32 / shorter
        };
        let frequencies: Vec<f32> = (0..head / 2).map(frequency).collect();
        let mut table = Vec::with_capacity(positions * head);
        for place in 0..positions {
            let angles = frequencies.iter().map(|frequency| f64::from(place as f32 * frequency));
            table.extend(angles.clone().map(|angle| angle.cos() as f32));
            table.extend(angles.map(|angle| angle.sin() as f32));
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_names_of_a_type_may_be_there() {
        let kind = |text: &str| {
            let scaling: Scaling = serde_json::from_str(text).unwrap();
            scaling.kind().map(str::to_owned)
        };
        assert_eq!(kind(r#"{"type": "ntk", "factor": 2.0}"#).as_deref(), Some("ntk"));
        assert_eq!(kind(r#"{"type": "ntk", "rope_type": "yarn"}"#).as_deref(), Some("yarn"));
        assert_eq!(kind("{}"), None);
    }

    #[test]
    fn a_rotation_has_cosines_and_sines_of_every_place() {
        let close = |rotary: Rotary, expected: [(f64, f64); 3]| {
            for (row, (fast, slow)) in rotary.table(3, 4).chunks(4).zip(expected) {
                for (found, exact) in row.iter().zip([fast.cos(), slow.cos(), fast.sin(), slow.sin()]) {
                    assert!((f64::from(*found) - exact).abs() < 1e-7, "{found}, not {exact}");
                }
            }
        };
        close(Rotary { theta: 10_000.0, stretch: 1.0 }, [(0.0, 0.0), (1.0, 0.01), (2.0, 0.02)]);
        // Both frequencies are divided by √4. The second one is divided by it again, because theta is four times as large.
        close(Rotary { theta: 10_000.0, stretch: 4.0 }, [(0.0, 0.0), (0.5, 0.0025), (1.0, 0.005)]);
    }
}
