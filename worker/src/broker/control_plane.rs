//! The control plane: heartbeats, commands and their answers, each handled by a task of its own for one session.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::aux_channel::AuxChannel;
use super::commands::{self, CommandRequest};
use super::heartbeats;
use super::publisher_rules::PublisherRules;
use super::session::AuxParts;
use crate::observability::status_reporter::StatusReporter;

/// How long the last answers and the last heartbeat may take. Nothing depends on them.
const SHUTDOWN_MAX: Duration = Duration::from_millis(500);

/// The tasks. They end with the session.
#[derive(Debug)]
pub struct ControlPlane {
    commands: mpsc::Receiver<CommandRequest>,
    over: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl ControlPlane {
    /// Without channels of its own there are neither heartbeats nor commands.
    /// Answers to commands go only where `rules` permit replies.
    pub fn open(
        channels: Option<AuxParts<AuxChannel>>,
        rules: Arc<PublisherRules>,
        reporter: Arc<StatusReporter>,
    ) -> Self {
        let (sender, received) = commands::channel();
        let (over, is_over) = watch::channel(false);
        let mut tasks = JoinSet::new();
        if let Some(channels) = channels {
            tasks.spawn(heartbeats::send(channels.heartbeats, Arc::clone(&reporter), is_over.clone()));
            if let Some(control) = channels.control {
                let (answers, outgoing) = commands::answers();
                tasks.spawn(commands::publish_answers(control.answers, outgoing, is_over.clone()));
                tasks.spawn(commands::receive(control.commands, rules, reporter, sender, answers, is_over));
            }
        }
        Self { commands: received, over, tasks }
    }

    /// The next command. Cancel-safe.
    pub async fn next(&mut self) -> CommandRequest {
        match self.commands.recv().await {
            Some(request) => request,
            // Nothing receives commands: they are switched off, there are no channels, or the connection is closed, which others
            // notice.
            None => std::future::pending().await,
        }
    }

    /// Has the last answers and the last heartbeat published.
    pub async fn shutdown(mut self) {
        self.over.send_replace(true);
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(SHUTDOWN_MAX, ended).await;
    }
}
