//! What operators learn and say over the broker: heartbeats out, commands in, each by a task of its own for one session.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::amqp::aside::Aside;
use crate::amqp::commands::{self, Asked};
use crate::amqp::heartbeats;
use crate::heartbeat::Teller;

/// How long the last answers and the last heartbeat may take. Nothing hangs on them.
const FAREWELL_MAX: Duration = Duration::from_millis(500);

/// Both tasks. They end with the session.
#[derive(Debug)]
pub struct Operators {
    commands: mpsc::Receiver<Asked>,
    over: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Operators {
    /// Without channels beside the jobs' there are no operators.
    pub fn open(beside: Option<[Aside; 2]>, teller: Arc<Teller>) -> Self {
        let (sender, commands) = commands::room();
        let (over, is_over) = watch::channel(false);
        let mut tasks = JoinSet::new();
        if let Some([first, second]) = beside {
            tasks.spawn(heartbeats::send(first, Arc::clone(&teller), is_over.clone()));
            tasks.spawn(commands::take(second, teller, sender, is_over));
        }
        Self { commands, over, tasks }
    }

    /// The next command. Cancel-safe.
    pub async fn next(&mut self) -> Asked {
        match self.commands.recv().await {
            Some(asked) => asked,
            // Nobody takes any: there are no operators, or the connection is gone, which is heard from others.
            None => std::future::pending().await,
        }
    }

    /// Has the last answers and the last heartbeat sent.
    pub async fn farewell(mut self) {
        self.over.send_replace(true);
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(FAREWELL_MAX, ended).await;
    }
}
