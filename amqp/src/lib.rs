//! What worker and producer both need besides lapin: to know which publish a returned message belongs to.

mod confirms;

pub use confirms::{Confirms, Verdict};
