//! The engine that returns each input as its output, a JSON value as its text: for trying and measuring the message path.

use vramq_schemas::{Input, Output, Params};

use super::{Engine, InvalidInput, Item, OutputMax, PassError, PassShape, shape_of};
use crate::device::any::AnyDevice;

/// What a pass takes of the device per item, so that slots, permits and running out are real.
const BYTES_PER_ITEM: u64 = 1024;

#[derive(Debug)]
pub struct Echo {
    device: AnyDevice,
}

impl Echo {
    pub fn new(device: AnyDevice) -> Self {
        Self { device }
    }
}

impl Engine for Echo {
    fn resident_bytes(&self) -> u64 {
        0
    }

    fn item_cost_max(&self) -> usize {
        1
    }

    fn pass_bytes(&self, shape: PassShape) -> u64 {
        shape.items as u64 * BYTES_PER_ITEM
    }

    fn takes_inputs_as_they_come(&self) -> bool {
        true
    }

    fn output_max(&self, input: &Input, _: &Params) -> Option<OutputMax> {
        Some(match input {
            Input::Text(text) => OutputMax::Text(text.len() as u64),
            Input::Bytes(bytes) => OutputMax::Bytes(bytes.len() as u64),
            Input::Uri(uri) => OutputMax::Uri(uri.len() as u64),
            Input::Json(value) => OutputMax::Bytes(value.as_str().len() as u64),
        })
    }

    fn check(&self, _: &[Input], params: &Params) -> Result<(), InvalidInput> {
        match params.0.keys().next() {
            Some(key) => Err(InvalidInput(format!("params.{key} is unknown; echo has no params"))),
            None => Ok(()),
        }
    }

    fn prepares_in_pieces(&self) -> bool {
        true
    }

    fn prepare(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        self.check(inputs, params)?;
        Ok(inputs.iter().cloned().map(Item::Plain).collect())
    }

    fn run(&self, items: &[Item]) -> Result<Vec<Output>, PassError> {
        let bytes = self.pass_bytes(shape_of(items));
        let _arena = self.device.alloc_arena(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        Ok(items
            .iter()
            .map(|item| match item {
                Item::Plain(Input::Text(text)) => Output::Json(text.clone().into()),
                Item::Plain(Input::Bytes(bytes)) => {
                    Output::Bytes { media_type: "application/octet-stream".to_owned(), bytes: bytes.clone() }
                }
                Item::Plain(Input::Uri(uri)) => Output::Uri(uri.clone()),
                // The value's own text. Parsing it would change its digits and order, and could take a hundred times as much
                // memory.
                Item::Plain(Input::Json(value)) => {
                    Output::Bytes { media_type: "application/json".to_owned(), bytes: value.as_str().into() }
                }
                Item::Tokens { .. } | Item::Sparse(_) | Item::Scored(_) => Output::Json(item.cost().into()),
                Item::Program(item) => Output::Json(item.cost.into()),
            })
            .collect())
    }
}
