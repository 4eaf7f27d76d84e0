//! Callers: publishers of jobs, good and hostile, and readers of replies and dead letters.

use std::collections::BTreeMap;
use std::sync::Arc;

use vramq_schemas::{Attempt, JobHeaders};

use super::Random;
use super::agenda::{Happening, MILLI, SECOND};
use super::broker::{ChannelId, Command, ConnectionId, DeathReason, Frame, Name, Properties};
use super::env::{Env, Owner, letter_of};
use super::ledger::{End, JobSpec, Letter, Nature, ReplyTo};
use super::plan::{CallerPlan, Style};
use super::withdrawals;

/// Somebody who publishes.
#[derive(Debug)]
struct Caller {
    plan: CallerPlan,
    random: Random,
    published: usize,
    last: Option<Letter>,
    is_deaf: bool,
}

/// All callers, and all readers.
#[derive(Debug)]
pub struct Callers {
    callers: Vec<Caller>,
    connection: Option<ConnectionId>,
    publisher: Option<ChannelId>,
    published: u64,
    confirms: BTreeMap<u64, (Letter, bool)>,
    reading: Option<ConnectionId>,
    reader: Option<ChannelId>,
}

impl Callers {
    pub fn new(env: &mut Env) -> Self {
        let seed = env.plan.seed;
        let caller = |plan: &CallerPlan| Caller {
            plan: *plan,
            random: Random::new(seed ^ (plan.number as u64 + 1).wrapping_mul(0x9e37_79b9)),
            published: 0,
            last: None,
            is_deaf: false,
        };
        let callers: Vec<_> = env.plan.callers.iter().map(caller).collect();
        for at in 0..callers.len() {
            env.agenda.at(SECOND, Happening::Publish { caller: at });
        }
        let (connection, publisher, reading, reader) = (None, None, None, None);
        Self { callers, connection, publisher, published: 0, confirms: BTreeMap::new(), reading, reader }
    }

    /// Connects, unless the broker is down.
    pub fn connect(&mut self, env: &mut Env) {
        if env.broker_is_down {
            return;
        }
        if !self.connection.is_some_and(|connection| env.broker.is_connected(connection)) {
            let connection = env.connect(Owner::Publishers);
            self.connection = Some(connection);
            self.publisher = env.open_channel(connection);
            (self.published, self.confirms) = (0, BTreeMap::new());
            if let Some(channel) = self.publisher {
                env.send(channel, Command::ConfirmSelect);
            }
        }
        if !self.reading.is_some_and(|connection| env.broker.is_connected(connection)) {
            let connection = env.connect(Owner::Readers);
            self.reading = Some(connection);
            self.reader = env.open_channel(connection);
            for at in 0..self.callers.len() {
                self.listen(env, at);
            }
            self.listen_larger(env, true);
            for model in 0..env.names.models.len() {
                self.consume(env, env.names.models[model].dead.clone());
            }
        }
    }

    fn consume(&self, env: &mut Env, queue: Name) {
        if let Some(channel) = self.reader {
            env.send(channel, Command::Consume { tag: queue.clone(), queue, no_ack: true, priority: 0 });
        }
    }

    /// Reads a model's dead letters, after their queue was declared again.
    pub fn read_dead(&self, env: &mut Env, model: usize) {
        let queue = env.names.models[model].dead.clone();
        self.consume(env, queue);
    }

    /// Workers with larger devices take jobs, or stop doing so.
    pub fn listen_larger(&self, env: &mut Env, takes: bool) {
        let queue = env.names.larger.clone();
        if !env.plan.odds.has_larger {
            return;
        }
        if let Some(channel) = self.reader {
            // A consumer twice on one channel would be an error.
            env.send(channel, Command::Cancel { tag: queue.clone() });
        }
        if takes {
            self.consume(env, queue);
        }
    }

    fn listen(&self, env: &mut Env, caller: usize) {
        let Caller { plan, is_deaf, .. } = &self.callers[caller];
        let declare = env.names.replies(&env.plan, plan.number);
        env.administer([declare]);
        if !is_deaf {
            let queue = env.names.replies[plan.number].clone();
            self.consume(env, queue);
        }
    }

    pub fn set_deaf(&mut self, env: &mut Env, at: usize, deaf: bool) {
        let Some(caller) = self.callers.get_mut(at) else { return };
        caller.is_deaf = deaf;
        let tag = env.names.replies[caller.plan.number].clone();
        if let Some(channel) = self.reader {
            // A consumer twice on one channel would be an error: first none, then one.
            env.send(channel, Command::Cancel { tag });
        }
        if !deaf {
            self.listen(env, at);
        }
    }

    /// Deletes or restores a caller's reply queue. Its replies were already read, because it lacks a consumer only for a moment.
    pub fn delete_replies(&mut self, env: &mut Env, at: usize, deleted: bool) {
        let Some(caller) = self.callers.get_mut(at) else { return };
        let name = env.names.replies[caller.plan.number].clone();
        if deleted {
            caller.is_deaf = true;
            env.delete_if_empty(&name);
        } else {
            self.set_deaf(env, at, false);
        }
    }

    /// A caller's turn to publish.
    pub fn publish(&mut self, env: &mut Env, at: usize) {
        let busy = env.plan.busy;
        let Some(caller) = self.callers.get_mut(at) else { return };
        // Jobs that kill or hang need the remaining time to end.
        if caller.published >= caller.plan.jobs_max || env.now > busy * 8 / 10 {
            return;
        }
        let (jobs, pause) = caller.next_turn(env.plan.large_at_once);
        env.agenda.at(env.now + pause.max(MILLI), Happening::Publish { caller: at });
        self.connect(env);
        for _ in 0..jobs {
            let letter = self.callers[at].next_job(env);
            withdrawals::decide(env, letter, self.callers[at].plan.style);
            self.send(env, letter);
        }
    }

    /// A caller publishes many small jobs at once.
    pub fn flood(&mut self, env: &mut Env, at: usize, jobs: usize) {
        let Some(CallerPlan { number, model, .. }) = self.callers.get(at).map(|caller| caller.plan) else {
            return;
        };
        env.ledger.flooded(model, env.plan.sharing.queue_of(number));
        self.connect(env);
        for _ in 0..jobs {
            let spec = self.callers[at].small_job(env);
            let letter = env.ledger.publish(spec);
            self.send(env, letter);
        }
    }

    /// Publishes a job to its queue: through the model's exchange to its own queue, or to a further queue as its owner binds it.
    fn send(&mut self, env: &mut Env, letter: Letter) {
        let Some(channel) = self.publisher else { return };
        let spec = &env.ledger.job(env.ledger.letter(letter).job).spec;
        let names = &env.names.models[spec.model];
        let properties = Properties { expiration: spec.ttl_ms, persistent: true, ..Properties::default() };
        let (exchange, key) = match spec.queue {
            0 => (env.names.jobs_exchange.clone(), names.key.clone()),
            further => (env.names.default_exchange.clone(), names.queue(further).clone()),
        };
        if env.publish(channel, letter, exchange, key, properties) {
            self.published += 1;
            self.confirms.insert(self.published, (letter, false));
        }
    }

    /// A frame for those who publish or read.
    pub fn frame(&mut self, env: &mut Env, frame: Frame) {
        match frame {
            Frame::Deliver { tag, delivery } => {
                if let Some(letter) = letter_of(&delivery.message) {
                    if tag == env.names.larger {
                        let job = env.ledger.letter(letter).job;
                        return env.ledger.ended(job, End::Moved);
                    }
                    let death = delivery.message.deaths.first().map(|death| death.reason);
                    if death == Some(DeathReason::DeliveryLimit) {
                        let job = env.ledger.letter(letter).job.0;
                        env.ledger.fail("workers decide before the broker's delivery limit", || {
                            format!("job {job}")
                        });
                    }
                    env.read(letter, death.is_some());
                }
            }
            Frame::Return { message } => {
                let letter = letter_of(&message);
                let sent = self.confirms.values_mut().find(|(of, _)| Some(*of) == letter);
                if let Some((_, is_returned)) = sent {
                    *is_returned = true;
                }
            }
            Frame::Ack { tag, multiple } => {
                let first = if multiple { 0 } else { tag };
                let numbers: Vec<u64> = self.confirms.range(first..=tag).map(|(number, _)| *number).collect();
                for number in numbers {
                    if let Some((letter, false)) = self.confirms.remove(&number) {
                        env.ledger.accepted(letter);
                    }
                }
            }
            Frame::Nack { tag, .. } => drop(self.confirms.remove(&tag)),
            _ => {}
        }
    }
}

impl Caller {
    /// How many jobs now, and how long until the next turn.
    fn next_turn(&mut self, large_at_once: usize) -> (usize, u64) {
        let pause = self.plan.pause;
        let at_once = match self.plan.style {
            Style::Bursts => 40,
            Style::Bulk => large_at_once,
            Style::Steady | Style::Hostile => 1,
        };
        if at_once > 1 {
            let jobs = 1 + self.random.below(at_once);
            return (jobs, pause * jobs as u64);
        }
        (1, pause / 2 + self.random.bits() % pause.max(1))
    }

    /// Creates a job: a new one, or sometimes a copy of the last.
    fn next_job(&mut self, env: &mut Env) -> Letter {
        self.published += 1;
        if let Some(last) = self.last
            && self.random.chance(2)
        {
            return env.ledger.publish_twin(last);
        }
        let mut spec = self.spec(env);
        spec.refers = env.stores.chance(env.plan.referring_percent);
        let (odds, r) = (env.plan.odds, &mut env.rare);
        spec.is_unencodable = self.plan.style == Style::Hostile && r.chance(odds.unencodable_percent);
        spec.moves = r.chance(odds.moved_percent);
        spec.revision = r.chance(odds.revision_percent).then(|| u8::from(r.chance(50)));
        let letter = env.ledger.publish(spec);
        self.last = Some(letter);
        letter
    }

    /// A job that does no harm, of so many items.
    fn good_job(&mut self, env: &Env, items: usize) -> JobSpec {
        let r = &mut self.random;
        let CallerPlan { model, number, .. } = self.plan;
        let cost_max = env.plan.models[model].pass_cost_max;
        let costs: Arc<[usize]> = (0..items).map(|_| 1 + r.below(cost_max / 16)).collect();
        let published_ms = r.chance(80).then(|| env.unix_ms());
        JobSpec {
            model,
            queue: env.plan.sharing.queue_of(number),
            identity: env.plan.sharing.identity(number, env.ledger.jobs().len() as u64),
            costs,
            nature: Nature::Good,
            hunger_tenths: 10,
            reply_to: ReplyTo::Caller(number),
            headers: JobHeaders::default(),
            ttl_ms: None,
            published_ms,
            is_withdrawable: env.plan.withdrawn_percent > 0,
            refers: false,
            outputs_max: env.plan.reply_outputs_max,
            is_unencodable: false,
            moves: false,
            revision: None,
        }
    }

    fn small_job(&mut self, env: &Env) -> JobSpec {
        let items = 1 + self.random.below(4);
        self.good_job(env, items)
    }

    fn spec(&mut self, env: &Env) -> JobSpec {
        let items = match self.plan.style {
            Style::Bulk => 50 + self.random.below(300),
            _ => 1 + self.random.below(6),
        };
        let mut spec = self.good_job(env, items);
        let cost_max = env.plan.models[spec.model].pass_cost_max;
        let r = &mut self.random;
        if r.chance(6) {
            spec.hunger_tenths = 12 + r.below(120) as u64;
        }
        if r.chance(8) {
            spec.headers.batch_hint = Some(1 + r.below(8) as u32);
        }
        if r.chance(3) {
            spec.ttl_ms = Some(1_000 + r.below(60_000) as u64);
        }
        if self.plan.style == Style::Hostile {
            make_hostile(&mut spec, r, cost_max);
            if spec.nature == Nature::Hanging && env.plan.has_short_timeout() {
                spec.nature = Nature::Failing;
            }
        }
        spec
    }
}

/// Hostile and faulty messages.
fn make_hostile(spec: &mut JobSpec, r: &mut Random, cost_max: usize) {
    match r.below(14) {
        0 => spec.nature = Nature::Malformed,
        1 => spec.nature = Nature::Huge,
        2 => spec.nature = Nature::PoisonDecode,
        3 => spec.nature = Nature::PoisonPass,
        4 => spec.nature = Nature::Failing,
        5 => spec.nature = Nature::Invalid,
        6 if r.chance(50) => spec.nature = Nature::Hanging,
        6 => spec.nature = Nature::DeviceKiller,
        7 => spec.reply_to = ReplyTo::Nowhere,
        // Items that fit no device, and items that are as large as a pass.
        8 => spec.costs = [1_000_000].into(),
        9 => spec.costs = (0..8).map(|_| cost_max).collect(),
        10 => spec.ttl_ms = Some(1 + r.below(500) as u64),
        11 => spec.headers.items_done = r.below(4) as u32,
        12 => {
            spec.headers.crashes = r.below(8) as u32;
            spec.headers.delays = r.below(20) as u32;
            spec.headers.attempt = r.below(100) as u32;
        }
        _ => {
            spec.headers.exclusive = true;
            let forged = Attempt {
                outcome: "out-of-memory".to_owned(),
                items: 1 << r.below(6),
                item: 9,
                ..Attempt::default()
            };
            spec.headers.history = vec![forged];
        }
    }
}
