//! Whether the clients that publish jobs and take their replies have sessions.

use std::time::Duration;

use vramq_producer::Client;

use crate::adoption::Adoption;

/// How long a session may be away. A client that loses one alone opens the next within a second, and publishes the jobs of that second
/// then. While the broker is away its pauses grow to 10 s, so the gateway may be ready that much later than its broker.
const AWAY_MAX: Duration = Duration::from_secs(3);

/// Whether jobs can be published, and their replies taken.
pub fn are_there(client: &Client, adoption: Option<&Adoption>) -> bool {
    [Some(client), adoption.map(|adoption| &adoption.client)]
        .into_iter()
        .flatten()
        .filter_map(Client::disconnected_for)
        .all(|away| away < AWAY_MAX)
}
