//! Names of exchanges and queues, built once, and the topology that a session declares.

use vramq_schemas::topology::{
    DEAD_EXCHANGE, DELAYS_MS, JOBS_EXCHANGE, RETRY_EXCHANGE, bulk_key, bulk_queue, dead_queue, delay_key,
    delay_queue, jobs_queue, quarantine_key, suspects_queue,
};

use super::broker::{Command, ExchangeKind, Name, Overflow, QueueKind, QueueOptions};
use super::plan::Plan;

/// As the worker declares it (`worker/src/broker/queue_arguments.rs`).
const DELIVERY_LIMIT: i64 = 20;
const NO_DELIVERY_LIMIT: i64 = i32::MAX as i64;
const CLASSIC_PRIORITY_MAX: u8 = 9;

/// The routing key of the workers with larger devices, and the jobs that their queue takes.
pub const LARGER_KEY: &str = "larger";
const LARGER_MAX: u32 = 10;

/// Replies that a caller leaves unread before its queue is full.
const REPLIES_MAX: u32 = 25;

#[derive(Debug)]
pub struct ModelNames {
    pub key: Name,
    pub jobs: Name,
    /// The further queues that its jobs come from, too.
    pub further: Vec<Name>,
    pub bulk: Name,
    pub bulk_key: Name,
    pub suspects: Name,
    pub suspects_key: Name,
    pub dead: Name,
    pub delays: Vec<Delay>,
}

/// A delay queue of a model.
#[derive(Debug)]
pub struct Delay {
    pub ms: u64,
    pub queue: Name,
    pub key: Name,
}

/// Every name that a history uses.
#[derive(Debug)]
pub struct Names {
    pub models: Vec<ModelNames>,
    pub replies: Vec<Name>,
    pub jobs_exchange: Name,
    pub retry_exchange: Name,
    pub dead_exchange: Name,
    pub default_exchange: Name,
    pub nowhere: Name,
    /// The queue of the workers with larger devices; its routing key is `larger`.
    pub larger: Name,
}

impl ModelNames {
    /// One of the queues that its jobs come from, by its place: 0 is its own.
    pub fn queue(&self, at: usize) -> &Name {
        at.checked_sub(1).and_then(|at| self.further.get(at)).unwrap_or(&self.jobs)
    }

    /// All queues that its jobs come from, its own first.
    pub fn queues(&self) -> impl Iterator<Item = &Name> {
        std::iter::once(&self.jobs).chain(&self.further)
    }
}

impl Names {
    /// Of the models, each with so many further queues, and of the callers.
    pub fn new(further: &[usize], callers: usize) -> Self {
        let model = |(at, further): (usize, &usize)| {
            let key = format!("model-{at}");
            ModelNames {
                jobs: jobs_queue(&key).into(),
                further: (1..=*further).map(|queue| format!("team-{queue}.{key}").into()).collect(),
                bulk: bulk_queue(&key).into(),
                bulk_key: bulk_key(&key).into(),
                suspects: suspects_queue(&key).into(),
                suspects_key: quarantine_key(&key).into(),
                delays: DELAYS_MS
                    .iter()
                    .map(|ms| Delay {
                        ms: *ms,
                        queue: delay_queue(&key, *ms).into(),
                        key: delay_key(&key, *ms).into(),
                    })
                    .collect(),
                dead: dead_queue(&key).into(),
                key: key.into(),
            }
        };
        Self {
            models: further.iter().enumerate().map(model).collect(),
            replies: (0..callers).map(|at| format!("replies.{at}").into()).collect(),
            jobs_exchange: JOBS_EXCHANGE.into(),
            retry_exchange: RETRY_EXCHANGE.into(),
            dead_exchange: DEAD_EXCHANGE.into(),
            default_exchange: "".into(),
            nowhere: "nowhere".into(),
            larger: jobs_queue(LARGER_KEY).into(),
        }
    }

    /// The routing key of a model's delay queue.
    pub fn delay_key(&self, model: usize, ms: u64) -> Name {
        let found = self.models[model].delays.iter().find(|delay| delay.ms == ms);
        found.map_or_else(|| self.nowhere.clone(), |delay| delay.key.clone())
    }

    /// The declaration of a further queue, the same for its owner and for workers.
    pub fn further(&self, plan: &Plan, model: usize, queue: usize) -> Command {
        let of = &self.models[model];
        declare(of.queue(queue), jobs_options(plan, self, &of.key))
    }

    /// The declarations of a worker at the start of a session, without further queues.
    pub fn topology(&self, plan: &Plan) -> Vec<Command> {
        let exchange = |name: &Name, kind| Command::DeclareExchange { name: name.clone(), kind };
        let mut commands = vec![
            exchange(&self.jobs_exchange, ExchangeKind::Direct),
            exchange(&self.retry_exchange, ExchangeKind::Direct),
            exchange(&self.dead_exchange, ExchangeKind::Direct),
        ];
        if plan.odds.has_larger {
            let options = QueueOptions {
                kind: plan.queues,
                max_length: Some(LARGER_MAX),
                overflow: Overflow::RejectPublish,
                ..QueueOptions::default()
            };
            commands.push(declare(&self.larger, options));
            commands.push(bind(&self.larger, &self.retry_exchange, &LARGER_KEY.into()));
        }
        for model in &self.models {
            commands.push(declare(&model.dead, typed(plan, NO_DELIVERY_LIMIT)));
            commands.push(declare(&model.jobs, jobs_options(plan, self, &model.key)));
            let suspects = QueueOptions {
                max_length: None,
                max_priority: None,
                delivery_limit: typed(plan, NO_DELIVERY_LIMIT).delivery_limit,
                ..jobs_options(plan, self, &model.key)
            };
            commands.push(declare(&model.suspects, suspects));
            let bulk = QueueOptions { max_length: None, ..jobs_options(plan, self, &model.key) };
            commands.push(declare(&model.bulk, bulk));
            commands.push(bind(&model.jobs, &self.jobs_exchange, &model.key));
            commands.push(bind(&model.jobs, &self.retry_exchange, &model.key));
            commands.push(bind(&model.bulk, &self.retry_exchange, &model.bulk_key));
            commands.push(bind(&model.suspects, &self.retry_exchange, &model.suspects_key));
            for delay in &model.delays {
                commands.push(declare(&delay.queue, delay_options(delay.ms, self, &model.key)));
                commands.push(bind(&delay.queue, &self.retry_exchange, &delay.key));
            }
            commands.push(bind(&model.dead, &self.dead_exchange, &model.key));
        }
        commands
    }

    /// What a caller declares for its replies.
    pub fn replies(&self, plan: &Plan, caller: usize) -> Command {
        let options = QueueOptions {
            kind: plan.queues,
            max_length: Some(REPLIES_MAX),
            overflow: Overflow::RejectPublish,
            ..QueueOptions::default()
        };
        declare(&self.replies[caller], options)
    }
}

fn declare(name: &Name, options: QueueOptions) -> Command {
    Command::DeclareQueue { name: name.clone(), options: Box::new(options) }
}

fn bind(queue: &Name, exchange: &Name, routing_key: &Name) -> Command {
    Command::Bind { queue: queue.clone(), exchange: exchange.clone(), routing_key: routing_key.clone() }
}

fn typed(plan: &Plan, limit: i64) -> QueueOptions {
    let delivery_limit = (plan.queues == QueueKind::Quorum).then_some(limit);
    QueueOptions { kind: plan.queues, delivery_limit, ..QueueOptions::default() }
}

fn jobs_options(plan: &Plan, names: &Names, key: &Name) -> QueueOptions {
    let quorum = plan.queues == QueueKind::Quorum;
    QueueOptions {
        max_length: Some(plan.jobs_max),
        overflow: Overflow::RejectPublish,
        dead_letter_exchange: Some(names.dead_exchange.clone()),
        dead_letter_routing_key: Some(key.clone()),
        dead_letter_at_least_once: quorum,
        max_priority: (!quorum).then_some(CLASSIC_PRIORITY_MAX),
        ..typed(plan, DELIVERY_LIMIT)
    }
}

fn delay_options(ms: u64, names: &Names, key: &Name) -> QueueOptions {
    QueueOptions {
        kind: QueueKind::Quorum,
        message_ttl: Some(ms),
        dead_letter_exchange: Some(names.retry_exchange.clone()),
        dead_letter_routing_key: Some(key.clone()),
        dead_letter_at_least_once: true,
        overflow: Overflow::RejectPublish,
        ..QueueOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::agenda::HOUR;

    #[test]
    fn nothing_that_a_quorum_queue_dead_letters_is_lost_on_the_way() {
        let mut plan = Plan::new(1, HOUR);
        plan.queues = QueueKind::Quorum;
        let topology = Names::new(&[0], 0).topology(&plan);
        let dead_lettering = topology.iter().filter_map(|command| match command {
            Command::DeclareQueue { name, options } => {
                options.dead_letter_exchange.is_some().then_some((name, options))
            }
            _ => None,
        });
        let mut queues = 0;
        for (name, options) in dead_lettering {
            queues += 1;
            assert!(options.dead_letters_at_least_once(), "{name}: {options:?}");
        }
        // Of jobs, large jobs and quarantined ones, and one for each delay.
        assert_eq!(queues, 3 + DELAYS_MS.len());
    }
}
