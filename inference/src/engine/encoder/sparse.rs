//! Sparse vectors, as SPLADE models make them (Formal et al. 2021): of the scores that a text's tokens give those of the vocabulary.
//!
//! The element of a token of the vocabulary is log(1 + its largest score), and zero if no score is above zero. A pass on a device
//! ends with the largest scores; the rest is done here, on the host.

use std::path::Path;

use serde::Deserialize;
use vramq_schemas::{Input, Output, Params, Sparse};

use crate::engine::{InvalidInput, Item, OutputMax, SparseItem};

use super::LoadError;
use super::config::{required, unsupported};
use super::tokens::{PROMPT_NAME, Tokens};

/// The parameter of a job that says how many elements of a vector are wanted at most, as sentence-transformers calls it.
const ELEMENTS_MAX: &str = "max_active_dims";

/// How the scores of a vocabulary become a sparse vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SparseConfig {
    /// log(1 + log(1 + score)) rather than log(1 + score): the `log1p_relu` of sentence-transformers.
    logarithm_twice: bool,
    /// How many elements a vector has at most, where a job does not say.
    elements_max: Option<u32>,
    vocabulary: usize,
}

/// What the file of the module `SpladePooling` says.
#[derive(Deserialize)]
struct File {
    pooling_strategy: Option<String>,
    activation_function: Option<String>,
    embedding_dimension: Option<usize>,
    /// The same, as versions before 6 write it.
    word_embedding_dimension: Option<usize>,
}

impl SparseConfig {
    /// Reads the file of the module `SpladePooling`, for a vocabulary of so many tokens.
    ///
    /// # Errors
    /// Names what in it is missing, malformed, or not supported.
    pub fn read(path: &Path, vocabulary: usize, elements_max: Option<u32>) -> Result<Self, LoadError> {
        let file: File = required(path)?;
        let refuse = |found: String, takes: &str| Err(unsupported(path, found, takes));
        let width = file.embedding_dimension.or(file.word_embedding_dimension);
        if let Some(width) = width.filter(|width| *width != vocabulary) {
            return refuse(format!("a width of {width}"), &vocabulary.to_string());
        }
        if let Some(pooling) = file.pooling_strategy.filter(|pooling| pooling != "max") {
            return refuse(format!("the pooling strategy `{pooling}`"), "`max`");
        }
        let logarithm_twice = match file.activation_function.as_deref() {
            None | Some("relu") => false,
            Some("log1p_relu") => true,
            Some(other) => {
                return refuse(format!("the activation function `{other}`"), "`relu`, `log1p_relu`");
            }
        };
        Ok(Self { logarithm_twice, elements_max, vocabulary })
    }

    /// The most elements that a job wants. Its own parameter overrides the model's, as in sentence-transformers.
    fn elements_max(&self, params: &Params) -> Result<Option<u32>, InvalidInput> {
        let mut elements_max = self.elements_max;
        for (key, value) in &params.0 {
            match key.as_str() {
                PROMPT_NAME => {}
                ELEMENTS_MAX => {
                    let wanted = value.as_u64().and_then(|number| u32::try_from(number).ok());
                    elements_max = wanted.filter(|number| *number > 0);
                    if elements_max.is_none() {
                        let error = format!("params.{ELEMENTS_MAX} is {value}; use a number from 1");
                        return Err(InvalidInput(error));
                    }
                }
                _ => {
                    return Err(InvalidInput(format!(
                        "params.{key} is unknown; there are `{ELEMENTS_MAX}` and, for models with prompts, `{PROMPT_NAME}`"
                    )));
                }
            }
        }
        Ok(elements_max)
    }

    /// The most that an output takes.
    pub fn output_max(&self, params: &Params) -> OutputMax {
        // Parameters that cannot be read are refused by `check`.
        let wanted = self.elements_max(params).ok().flatten();
        let elements = wanted.map_or(self.vocabulary, |wanted| self.vocabulary.min(wanted as usize));
        OutputMax::Sparse { elements: elements as u64 }
    }

    /// Whether inputs are texts, and parameters known.
    ///
    /// # Errors
    /// Names the first input that is not a text.
    pub fn check(&self, tokens: &Tokens, inputs: &[Input], params: &Params) -> Result<(), InvalidInput> {
        self.elements_max(params)?;
        tokens.check_texts(inputs, params)
    }

    /// Texts as items, in order.
    ///
    /// # Errors
    /// Names the first input that is not a text.
    pub fn items(
        &self,
        tokens: &Tokens,
        inputs: &[Input],
        params: &Params,
    ) -> Result<Vec<Item>, InvalidInput> {
        let elements_max = self.elements_max(params)?;
        tokens.items_of(inputs, params, |ids| Item::Sparse(SparseItem { ids, elements_max }))
    }

    /// The output of an item, of the largest scores of all tokens of the vocabulary, which are zero or above.
    ///
    /// # Errors
    /// A score is infinite or not a number.
    pub fn output(&self, item: &Item, scores: &[f32]) -> Result<Output, String> {
        let elements_max = match item {
            Item::Sparse(SparseItem { elements_max, .. }) => *elements_max,
            // `Outputs::sequence` has refused it.
            _ => None,
        };
        // NaN differs from zero, so it is kept and found below.
        let is_element = |(_, score): &(u32, f32)| *score != 0.0;
        let all = (0..).zip(scores.iter().copied()).filter(is_element);
        // Counted first, because a growing list would take up to twice the memory.
        let mut elements: Vec<(u32, f32)> = Vec::with_capacity(all.clone().count());
        elements.extend(all);
        if let Some(most) = elements_max.map(|most| most as usize).filter(|most| *most < elements.len()) {
            elements.select_nth_unstable_by(most, |a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            elements.truncate(most);
            elements.sort_unstable_by_key(|(index, _)| *index);
        }
        let (indices, values) = elements.into_iter().map(|(index, score)| (index, self.value(score))).unzip();
        Sparse::new(indices, values).map(Output::Sparse)
    }

    fn value(&self, score: f32) -> f32 {
        let value = score.ln_1p();
        if self.logarithm_twice { value.ln_1p() } else { value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(logarithm_twice: bool, elements_max: Option<u32>) -> SparseConfig {
        SparseConfig { logarithm_twice, elements_max, vocabulary: 5 }
    }

    fn item(elements_max: Option<u32>) -> Item {
        Item::Sparse(SparseItem { ids: [1].into(), elements_max })
    }

    fn elements(config: &SparseConfig, most: Option<u32>, scores: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let Ok(Output::Sparse(sparse)) = config.output(&item(most), scores) else { panic!("no vector") };
        (sparse.indices().to_vec(), sparse.values().to_vec())
    }

    #[test]
    fn elements_are_logarithms_of_scores_above_zero() {
        let scores = [0.0, 1.0, 0.0, 0.5, 3.0];
        let (indices, values) = elements(&config(false, None), None, &scores);
        assert_eq!(indices, [1, 3, 4]);
        let (_, twice) = elements(&config(true, None), None, &scores);
        for ((value, twice), score) in values.iter().zip(&twice).zip([1.0_f32, 0.5, 3.0]) {
            let expected = (1.0 + score).ln();
            assert!((value - expected).abs() < 1e-6, "{value}, not {expected}");
            assert!((twice - (1.0 + expected).ln()).abs() < 1e-6, "{twice} of {expected}");
        }
    }

    #[test]
    fn the_largest_elements_stay_in_their_order() {
        let scores = [2.0, 1.0, 4.0, 1.0, 3.0];
        for (most, expected) in
            [(1, vec![2]), (3, vec![0, 2, 4]), (4, vec![0, 1, 2, 4]), (9, vec![0, 1, 2, 3, 4])]
        {
            assert_eq!(elements(&config(false, None), Some(most), &scores).0, expected);
        }
    }

    #[test]
    fn a_score_that_is_not_finite_fails_the_pass() {
        for bad in [f32::NAN, f32::INFINITY] {
            let failed = config(false, None).output(&item(None), &[0.0, bad]);
            assert!(matches!(&failed, Err(why) if why.contains("at index 1")), "{failed:?}");
        }
    }

    #[test]
    fn a_job_may_want_fewer_elements() {
        let with = |key: &str, value: serde_json::Value| {
            let mut params = Params::default();
            params.0.insert(key.to_owned(), value);
            params
        };
        let of_model = config(false, Some(3));
        assert_eq!(of_model.elements_max(&Params::default()), Ok(Some(3)));
        let four = with(ELEMENTS_MAX, 4.into());
        assert_eq!(of_model.elements_max(&four), Ok(Some(4)));
        assert_eq!(of_model.output_max(&four), OutputMax::Sparse { elements: 4 });
        let many = with(ELEMENTS_MAX, 400.into());
        assert_eq!(of_model.output_max(&many), OutputMax::Sparse { elements: 5 });
        for params in
            [with(ELEMENTS_MAX, 0.into()), with(ELEMENTS_MAX, "4".into()), with("dtype", "f16".into())]
        {
            assert!(of_model.elements_max(&params).is_err(), "{params:?}");
        }
    }
}
