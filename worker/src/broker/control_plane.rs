//! The control plane: heartbeats, withdrawals, commands and their answers, and the look for deleted exchanges and queues, each handled by a
//! task of its own for one session.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use vramq_core::event::Withdrawn;

use super::aux_channel::AuxChannel;
use super::commands::{self, CommandRequest};
use super::session::AuxParts;
use super::topology_watch::TopologyWatch;
use super::{heartbeats, withdrawals};
use crate::config::BrokerConfig;
use crate::model::Model;
use crate::observability::status_reporter::StatusReporter;
use crate::publishers::PublisherRules;

/// How long the last answers and the last heartbeat may take. Nothing depends on them.
const SHUTDOWN_MAX: Duration = Duration::from_millis(500);

/// A request from an operator or a caller.
#[derive(Debug)]
pub enum ControlRequest {
    /// An operator's command.
    Command(CommandRequest),
    /// A caller's request to run no further pass of its job.
    Withdrawal(Withdrawn),
}

/// The tasks. They end with the session.
#[derive(Debug)]
pub struct ControlPlane {
    commands: mpsc::Receiver<CommandRequest>,
    withdrawals: mpsc::Receiver<Withdrawn>,
    over: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl ControlPlane {
    /// Without `channels` there are no heartbeats, withdrawals or commands. Answers to commands go only to queues that `rules` permit.
    pub fn open(
        channels: Option<AuxParts<AuxChannel>>,
        (broker, models): (BrokerConfig, Vec<Arc<Model>>),
        rules: Arc<PublisherRules>,
        reporter: Arc<StatusReporter>,
    ) -> Self {
        let (sender, received) = commands::channel();
        let (withdrawn, withdrawals) = withdrawals::channel();
        let (over, is_over) = watch::channel(false);
        let mut tasks = JoinSet::new();
        if let Some(channels) = channels {
            tasks.spawn(heartbeats::send(channels.heartbeats, Arc::clone(&reporter), is_over.clone()));
            let (declared, declared_again) = watch::channel(());
            let topology = TopologyWatch::new(channels.topology, broker, models);
            tasks.spawn(topology.run(declared, is_over.clone()));
            let bindings = declared_again.clone();
            tasks.spawn(withdrawals::receive(channels.withdrawals, withdrawn, bindings, is_over.clone()));
            if let Some(control) = channels.control {
                let (answers, outgoing) = commands::answers();
                tasks.spawn(commands::publish_answers(control.answers, outgoing, is_over.clone()));
                let to_loop = (sender, answers);
                tasks.spawn(commands::receive(
                    control.commands,
                    rules,
                    reporter,
                    to_loop,
                    declared_again,
                    is_over,
                ));
            }
        }
        Self { commands: received, withdrawals, over, tasks }
    }

    /// The next command or withdrawal. Cancel-safe.
    pub async fn next(&mut self) -> ControlRequest {
        tokio::select! {
            Some(request) = self.commands.recv() => ControlRequest::Command(request),
            Some(withdrawn) = self.withdrawals.recv() => ControlRequest::Withdrawal(withdrawn),
            // No more requests come: there are no channels, or the connection is closed, which other code notices.
            else => std::future::pending().await,
        }
    }

    /// Publishes the last answers and the last heartbeat.
    pub async fn shutdown(mut self) {
        self.over.send_replace(true);
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(SHUTDOWN_MAX, ended).await;
    }
}
