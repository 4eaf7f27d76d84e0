//! Prepares further inputs of a job for passes (an encoder tokenises them). CPU work.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::vec;

use vramq_core::rejection::Rejection;
use vramq_schemas::{Input, Params, Reason};

use crate::engine::{Engine, Item};

/// How many inputs are prepared at a time. That keeps an engine's threads busy, and as tokens, so many texts of 512 tokens take half a MiB.
const INPUTS_AT_A_TIME: usize = 256;

/// Inputs in their order. Each is removed once it is prepared.
#[derive(Debug)]
pub struct Unprepared {
    inputs: vec::IntoIter<Input>,
    /// Index within the job of the first of them.
    next: usize,
    params: Params,
}

impl Unprepared {
    /// The inputs of a job from the index `first` on.
    pub fn new(mut inputs: Vec<Input>, first: usize, params: Params) -> Self {
        inputs.drain(..first.min(inputs.len()));
        Self { inputs: inputs.into_iter(), next: first, params }
    }

    pub fn len(&self) -> usize {
        self.inputs.as_slice().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Prepares the next items until their costs reach `cost`, or all that are left.
    ///
    /// # Errors
    /// Why the job can never run.
    pub fn prepare(&mut self, engine: &dyn Engine, cost: usize) -> Result<Vec<Item>, Rejection> {
        // A library that panics on an input must not end this worker, nor the next one that receives the job.
        catch_unwind(AssertUnwindSafe(|| self.prepare_until(engine, cost))).unwrap_or_else(|_| {
            Err(Rejection::new(Reason::EngineFailed, "preparing the job panicked; see the worker's log"))
        })
    }

    fn prepare_until(&mut self, engine: &dyn Engine, cost: usize) -> Result<Vec<Item>, Rejection> {
        let at_a_time = if engine.prepares_in_pieces() { INPUTS_AT_A_TIME } else { usize::MAX };
        let (mut items, mut sum) = (Vec::new(), 0_usize);
        while sum < cost && !self.is_empty() {
            let count = self.len().min(at_a_time);
            let inputs = &self.inputs.as_slice()[..count];
            let prepared = engine.prepare(inputs, &self.params).map_err(|error| {
                let from = match self.next {
                    0 => String::new(),
                    next => format!("counted from item {next}: "),
                };
                Rejection::new(Reason::InvalidInput, format!("{from}{error}"))
            })?;
            if prepared.len() != count {
                let error = format!("the engine made {} items of {count} inputs", prepared.len());
                return Err(Rejection::new(Reason::EngineFailed, error));
            }
            sum = prepared.iter().fold(sum, |sum, item| sum.saturating_add(item.cost().max(1)));
            items.extend(prepared);
            self.inputs.by_ref().take(count).for_each(drop);
            self.next += count;
        }
        Ok(items)
    }
}

#[cfg(test)]
mod tests {
    use vramq_schemas::Output;

    use super::*;
    use crate::engine::{InvalidInput, PassError, PassShape};

    /// An engine that accepts any text except `bad`; an item costs ten.
    struct Texts {
        in_pieces: bool,
    }

    impl Engine for Texts {
        fn resident_bytes(&self) -> u64 {
            0
        }

        fn item_cost_max(&self) -> usize {
            10
        }

        fn pass_bytes(&self, _: PassShape) -> u64 {
            0
        }

        fn prepares_in_pieces(&self) -> bool {
            self.in_pieces
        }

        fn prepare(&self, inputs: &[Input], _: &Params) -> Result<Vec<Item>, InvalidInput> {
            if let Some(at) = inputs.iter().position(|input| *input == Input::Text("bad".into())) {
                return Err(InvalidInput(format!("inputs[{at}] is bad")));
            }
            let item = |_| Item::Tokens { ids: [7; 10].into(), format: Default::default() };
            Ok(inputs.iter().map(item).collect())
        }

        fn run(&self, _: &[Item]) -> Result<Vec<Output>, PassError> {
            Ok(Vec::new())
        }
    }

    fn unprepared(texts: &[&str], first: usize) -> Unprepared {
        let inputs = texts.iter().map(|text| Input::Text((*text).into())).collect();
        Unprepared::new(inputs, first, Params::default())
    }

    #[test]
    fn only_as_many_are_prepared_as_are_asked_for() {
        let mut rest = unprepared(&["a"; 1000], 10);
        let engine = Texts { in_pieces: true };
        assert_eq!(rest.len(), 990);
        assert_eq!(rest.prepare(&engine, 1).unwrap().len(), INPUTS_AT_A_TIME);
        assert_eq!(rest.prepare(&engine, 10 * INPUTS_AT_A_TIME + 1).unwrap().len(), 2 * INPUTS_AT_A_TIME);
        assert_eq!(rest.prepare(&engine, usize::MAX).unwrap().len(), 990 - 3 * INPUTS_AT_A_TIME);
        assert!(rest.is_empty() && rest.prepare(&engine, 1).unwrap().is_empty());
    }

    #[test]
    fn an_engine_that_must_see_all_inputs_does() {
        let mut rest = unprepared(&["a"; 1000], 0);
        assert_eq!(rest.prepare(&Texts { in_pieces: false }, 1).unwrap().len(), 1000);
    }

    #[test]
    fn an_input_that_cannot_be_prepared_is_named_by_its_place_in_the_job() {
        let mut texts = vec!["a"; 500];
        texts[400] = "bad";
        let mut rest = unprepared(&texts, 100);
        let engine = Texts { in_pieces: true };
        assert_eq!(rest.prepare(&engine, 10 * INPUTS_AT_A_TIME).unwrap().len(), INPUTS_AT_A_TIME);
        let rejection = rest.prepare(&engine, usize::MAX).unwrap_err();
        assert_eq!(rejection.reason, Reason::InvalidInput);
        // Inputs 100 to 355 succeed. The bad one is input 400, index 44 of the next batch.
        assert_eq!(rejection.error, "counted from item 356: inputs[44] is bad");
    }
}
