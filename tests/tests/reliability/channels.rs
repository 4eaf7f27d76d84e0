//! Channels that the broker closes: it closes the channel of a client that asks for a queue that is not there.

use anyhow::{Context as _, Result, ensure};
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties};
use vramq_tests::on_one_setup;
use vramq_tests::test_env::TestEnv;

on_one_setup!(a_number_that_is_given_again_has_no_old_error);

/// The client library gives the numbers of closed channels again, here each second one.
async fn a_number_that_is_given_again_has_no_old_error(env: &mut TestEnv) -> Result<()> {
    let url = format!("{}?channel_max=2", env.url);
    let connection = Connection::connect(&url, ConnectionProperties::default()).await?;
    for round in 0..4 {
        let asking = connection.create_channel().await.with_context(|| format!("round {round}"))?;
        ensure!(!is_there(&asking).await, "there is such a queue");
        let channel = connection.create_channel().await.with_context(|| format!("round {round}"))?;
        channel.confirm_select(Default::default()).await?;
        channel.close(200, "OK".into()).await?;
    }
    Ok(connection.close(200, "OK".into()).await?)
}

async fn is_there(channel: &Channel) -> bool {
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    channel.queue_declare("vramq.test.missing".into(), passive, FieldTable::default()).await.is_ok()
}
