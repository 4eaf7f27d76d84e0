//! Reply queues that take replies and confirm none.

use anyhow::Result;
use lapin::types::AMQPValue;
use vramq_tests::node::Node;
use vramq_tests::setup::Queue;
use vramq_tests::test_env::TestEnv;
use vramq_tests::wait::until;

/// What keeps reply queues from confirming.
pub(crate) enum Silence<'a> {
    /// The processes of classic queues are suspended. Of a quorum queue the publisher's channel would wait for it.
    Suspended(&'a Node, Vec<String>),
    /// Quorum queues have two members, and the node of one of them is dead. All other queues have one.
    NoMajority(Node),
}

impl<'a> Silence<'a> {
    /// Declares the queues. The queues of the workers are there: with one member each, they lose no majority.
    pub(crate) async fn declare(env: &TestEnv, node: &'a Node, queues: &[String]) -> Result<Self> {
        let mut arguments = env.setup.queue.arguments();
        if env.setup.queue == Queue::Classic {
            for queue in queues {
                env.client.declare_queue(queue, arguments.clone()).await?;
            }
            return Ok(Self::Suspended(node, queues.to_owned()));
        }
        let peer = node.start_peer().await?;
        // Their leader is at the node that lives. There they take messages, and have no majority that confirms them.
        arguments.insert("x-queue-leader-locator".into(), AMQPValue::LongString("client-local".into()));
        for queue in queues {
            env.client.declare_queue(queue, arguments.clone()).await?;
            until("a reply queue with two members", async || {
                let listed = env.vhost.queue(queue).await?;
                let members = listed["members"].as_array().map(Vec::len);
                Ok((members == Some(2)).then_some(()))
            })
            .await?;
        }
        Ok(Self::NoMajority(peer))
    }

    /// From now on the queues confirm nothing.
    pub(crate) async fn begin(&self, env: &TestEnv) -> Result<()> {
        match self {
            Self::Suspended(node, queues) => node.suspend(&env.vhost.name, queues).await,
            Self::NoMajority(peer) => peer.kill().await,
        }
    }

    pub(crate) async fn end(&self, env: &TestEnv) -> Result<()> {
        match self {
            Self::Suspended(node, queues) => node.resume(&env.vhost.name, queues).await,
            Self::NoMajority(peer) => peer.restart().await,
        }
    }
}
