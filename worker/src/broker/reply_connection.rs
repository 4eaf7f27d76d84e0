//! The session's publishing connection, for replies that have channels of their own: first replies, and progress.

use std::sync::Arc;

use lapin::options::ConfirmSelectOptions;
use lapin::{Channel, Connection};
use vramq_amqp::{ConfirmedPublisher, MatchBy, Transfer};

use super::aux_channel::AuxChannelState;
use super::opening::is_channel_too_many;

/// Opens channels for replies beside those that each session has. Clones share the connection.
#[derive(Clone, Debug)]
pub(super) struct ReplyConnection {
    pub(super) connection: Arc<Connection>,
    /// Learns if the broker ends the connection over such a channel.
    pub(super) aux_state: Arc<AuxChannelState>,
    pub(super) confirm_s: u32,
    /// Counts what all channels of the connection publish.
    pub(super) transfer: Transfer,
}

impl ReplyConnection {
    /// Opens a channel; `None` if the connection allows no more. Without `confirm_s` the caller watches how long a confirm takes.
    ///
    /// # Errors
    /// The connection is closed, perhaps over this channel.
    pub(super) async fn open_channel(
        &self,
        confirm_s: Option<u32>,
    ) -> lapin::Result<Option<ConfirmedPublisher>> {
        let Some(channel) = self.channel_in_confirm_mode().await? else { return Ok(None) };
        let transfer = self.transfer.clone();
        let publisher = ConfirmedPublisher::beside_others(channel, MatchBy::PublishSeq, confirm_s, transfer);
        if self.is_blocked() {
            publisher.blocked();
        }
        Ok(Some(publisher))
    }

    async fn channel_in_confirm_mode(&self) -> lapin::Result<Option<Channel>> {
        let opened = async {
            let channel = self.connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok::<_, lapin::Error>(channel)
        };
        match opened.await {
            Ok(channel) => Ok(Some(channel)),
            // lapin refused to open the channel, so the connection is not affected.
            Err(error) if matches!(error.kind(), lapin::ErrorKind::ChannelsLimitReached) => Ok(None),
            Err(error) => {
                if is_channel_too_many(&error) {
                    self.aux_state.refuse_first_replies(&error);
                }
                Err(error)
            }
        }
    }

    /// Whether the broker blocks publishers.
    pub(super) fn is_blocked(&self) -> bool {
        self.connection.status().blocked()
    }
}
