//! A process model with the interface of all models: what its inputs cost, and how much device memory its passes take.

use std::sync::Arc;

use vramq_core::device::UNKNOWN_COST;
use vramq_core::settings::UNKNOWN_BYTES;
use vramq_schemas::status::ProcessStatus;
use vramq_schemas::{Input, Output, Params};

use super::config::Mode;
use super::cost::{Costs, Unit};
use super::need::Need;
use super::pool::Pool;
use super::protocol::ItemKind;
use super::rule::{self, Consequence};
use crate::engine::{Engine, InvalidInput, Item, PassError, PassShape, ProgramInput, ProgramItem};

/// The largest cost of a pass if neither the configuration nor the device limits it. Eight such passes still fit a `usize`.
const PASS_COST_MAX: usize = usize::MAX >> 8;

/// A model that runs in processes of its own.
#[derive(Debug)]
pub struct ProcessModel {
    pool: Arc<Pool>,
}

impl ProcessModel {
    pub fn new(pool: Arc<Pool>) -> Self {
        Self { pool }
    }

    /// The most cost of a pass on a device with so many bytes for passes. Callers and jobs share passes by it.
    pub fn pass_cost_max(pool: &Pool, budget: u64) -> usize {
        let config = pool.config();
        match (config.vram.per, config.vram.declared) {
            (Unit::Items, _) => config.items_max,
            (_, Some(declared)) if declared.bytes_per_unit > 0.0 => {
                let most = budget as f64 / declared.bytes_per_unit;
                // A float as a number: saturating.
                (most as usize).clamp(1, PASS_COST_MAX)
            }
            _ => PASS_COST_MAX,
        }
    }

    /// An input as an item with its cost.
    fn item(&self, at: usize, input: &Input, params: &Arc<Params>) -> Result<Item, InvalidInput> {
        let item = ProgramInput::from(input.clone());
        if let Some(why) = self.pool.accepts().refusal(&item) {
            return Err(InvalidInput(format!("input {at} {why}")));
        }
        let (config, costs) = (self.pool.config(), Costs::new(&item));
        let cost = match rule::decide(&config.rules, &costs) {
            Some(Consequence::Refuse(reason)) => {
                return Err(InvalidInput(format!("input {at} is refused: {reason}")));
            }
            // A pass whose need is unknown has the whole device.
            Some(Consequence::Exclusive) => UNKNOWN_COST,
            // Such a rule has moved the job here, and it moves no further.
            Some(Consequence::To(_)) | None => costs.of(config.vram.per).map_or(UNKNOWN_COST, whole),
        };
        Ok(Item::Program(Box::new(ProgramItem { item, params: Arc::clone(params), cost })))
    }
}

/// A cost as a whole number, at least 1.
fn whole(cost: f64) -> usize {
    (cost.ceil() as usize).clamp(1, UNKNOWN_COST)
}

impl Engine for ProcessModel {
    fn resident_bytes(&self) -> u64 {
        self.pool.status().resident_bytes()
    }

    fn item_cost_max(&self) -> usize {
        1
    }

    fn revision(&self) -> Option<String> {
        Some(self.pool.revision())
    }

    fn moves_to(&self, inputs: &[Input]) -> Option<String> {
        let rules = &self.pool.config().rules;
        if !rules.iter().any(|rule| matches!(rule.then, Consequence::To(_))) {
            return None;
        }
        inputs.iter().find_map(|input| {
            let costs = Costs::new(&ProgramInput::from(input.clone()));
            match rule::decide(rules, &costs) {
                Some(Consequence::To(key)) => Some(key.clone()),
                _ => None,
            }
        })
    }

    /// A program that names references among what it accepts reads them itself; one that accepts all gets the bytes.
    fn takes_references(&self) -> bool {
        self.pool.accepts().names(ItemKind::Uri)
    }

    fn processes(&self) -> Vec<ProcessStatus> {
        self.pool.status().processes()
    }

    fn pass_bytes(&self, shape: PassShape) -> u64 {
        let config = self.pool.config();
        if shape.items > config.items_max || shape.longest >= UNKNOWN_COST {
            return UNKNOWN_BYTES;
        }
        let cost = match config.mode {
            Mode::Warm => shape.cost,
            // One item at a time.
            Mode::Once(_) => shape.longest,
        };
        match self.pool.need_of(cost as f64) {
            Need::Bytes(bytes) => bytes,
            Need::Unknown => UNKNOWN_BYTES,
        }
    }

    fn prepare(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        let params = Arc::new(params.clone());
        inputs.iter().enumerate().map(|(at, input)| self.item(at, input, &params)).collect()
    }

    fn run(&self, _: &[Item]) -> Result<Vec<Output>, PassError> {
        Err(PassError::Failed(
            "a process model does not run on the device's thread: a fault of the worker".to_owned(),
        ))
    }
}
