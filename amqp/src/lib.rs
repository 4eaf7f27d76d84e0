//! What worker and producer both need besides lapin: where the broker is, and which publish a returned message belongs to.

mod address;
mod confirms;

pub use address::{Address, ConnectError, InvalidAddress};
pub use confirms::{Confirms, Verdict};
