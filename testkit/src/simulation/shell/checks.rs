//! The invariants of one worker, checked at every step.

use vramq_core::action::PassOrder;
use vramq_core::device::PassShape;
use vramq_core::ids::JobKey;
use vramq_core::sizes::Size;
use vramq_schemas::headers::PASSES_PER_GROWTH;

use super::accounts::SUSPECT_AFTER;
use super::frames::bytes_of;
use super::intake::{CRASHES_MAX, of_programs};
use super::stored_job::{StoredJob, Withdrawn};
use super::{Bytes, Shell};
use crate::simulation::agenda::{MILLI, Micros, SECOND};
use crate::simulation::env::Env;
use crate::simulation::ledger::Kind;

/// The most passes of its model that a small job waits for, and for each other job: callers and jobs take turns.
const PASSES_PER_NEIGHBOUR: usize = 6;
const PASSES_BEFORE_SMALL: usize = 24;

/// How long a small job may wait although its executor is idle and there is memory. A health probe may wait for memory or for the passes in
/// flight, or an exclusive job may wait for a program. Passes of programs take up to half a minute.
const ROOM_UNUSED_MAX: Micros = 60 * SECOND;

/// The same for a job that has started. Its next items are prepared within milliseconds.
const NEXT_ITEM_MAX: Micros = 45 * SECOND;

impl Shell {
    /// After every event.
    pub(super) fn check(&mut self, env: &mut Env) {
        let who = self.life.worker;
        let (used, admitted) =
            (self.budget.used(), self.passes.values().map(|flight| flight.admitted).sum::<u64>());
        if used != admitted {
            env.ledger.fail("a permit comes back with its pass", || {
                format!("worker-{who}: permits of {used} bytes, and passes of {admitted}")
            });
        }
        let held = self.core.unacked();
        if self.session.is_some() && !self.is_closing && held != self.held() {
            let counted = self.held();
            env.ledger.fail("every delivery is settled once", || {
                format!("worker-{who} believes that it holds {held} jobs, and holds {counted}")
            });
        }
    }

    /// Checks that no due timer is left: the worker would otherwise be woken without end.
    pub(super) fn check_timers(&self, env: &mut Env) {
        let who = self.life.worker;
        if self.exit.is_none() && self.core.next_timer().is_some_and(|at| at <= env.clock().at) {
            env.ledger.fail("a timer that is due is taken", || format!("worker-{who}"));
        }
    }

    /// Checks that no timer is left after the session.
    pub(super) fn check_timers_of_session(&self, env: &mut Env) {
        if !self.core.is_draining() && self.core.next_timer().is_some() {
            let who = self.life.worker;
            env.ledger.fail("timers of jobs end with their session", || format!("worker-{who}"));
        }
    }

    /// Deliveries that are neither acknowledged nor given back.
    pub(super) fn held(&self) -> usize {
        self.jobs.len()
    }

    /// Checks that a pass is within the budget, alone if it must be, and of a size that has not failed.
    pub(super) fn check_run(&mut self, env: &mut Env, order: &PassOrder) {
        let mut jobs: Vec<JobKey> = order.items.iter().map(|(job, _)| *job).collect();
        jobs.sort_unstable();
        jobs.dedup();
        self.check_room(env, order);
        self.check_half_time(env, order);
        self.check_probe(env, order);
        self.check_limit(env, order);
        self.check_shortage(env, order);
        self.check_fullness(env, order, &jobs);
        self.check_sizes(env, order, &jobs);
        self.check_items(env, order);
        self.check_share(env, order, &jobs);
        self.check_shares(env, order, &jobs);
        self.check_caps(env, order);
    }

    /// Checks that the pass fits the budget, and that an exclusive one is alone.
    fn check_room(&mut self, env: &mut Env, order: &PassOrder) {
        let who = self.life.worker;
        let bytes = (self.models[order.model.0].pass_bytes)(order.shape);
        let (in_flight, limit) = (self.bytes_in_flight(), self.budget.limit());
        let ours = self.passes.len();
        if ours > 0 && in_flight + bytes > limit {
            env.ledger.fail("passes stay within the budget", || {
                format!("worker-{who}: {bytes} bytes beside {in_flight} of {limit}")
            });
        }
        if self.passes.values().any(|flight| flight.order.exclusive) || (order.exclusive && ours > 0) {
            env.ledger.fail("an exclusive pass is alone on its device", || {
                format!("worker-{who}: {ours} others in flight")
            });
        }
    }

    /// Checks that each job is in a pass whose size and kind its history allows.
    fn check_sizes(&mut self, env: &mut Env, order: &PassOrder, jobs: &[JobKey]) {
        let (who, items) = (self.life.worker, order.items.len());
        for job in jobs {
            let Some(stored) = self.jobs.get(job) else {
                env.ledger.fail("passes are of jobs that are held", || format!("worker-{who}: {job:?}"));
                continue;
            };
            if stored.withdrawn != Withdrawn::No {
                let number = stored.job.0;
                env.ledger.fail("a withdrawn job starts no pass", || {
                    format!("worker-{who}: a pass of job {number}")
                });
            }
            if stored.is_cancelled {
                let number = stored.job.0;
                env.ledger.fail("a cancelled job starts no pass", || {
                    format!("worker-{who}: a pass of job {number}")
                });
            }
            if stored.must_move {
                let number = stored.job.0;
                env.ledger
                    .fail("large jobs do not run among others", || format!("worker-{who}: job {number}"));
            }
            if stored.consumer.is_none() && jobs.len() > 1 {
                env.ledger.fail("quarantined jobs run alone", || {
                    format!("worker-{who}: a pass of {} jobs", jobs.len())
                });
            }
            let Kind::Job { headers: Some(headers), .. } = &env.ledger.letter(stored.letter).kind else {
                continue;
            };
            let fitted = stored.fitted;
            let is_forged = !env.ledger.job(stored.job).spec.headers.history.is_empty();
            let tried = headers
                .last_out_of_memory()
                .filter(|_| !is_forged)
                .map_or(u32::MAX, |last| last.items.max(2)) as usize;
            let hint = headers.batch_hint.unwrap_or(u32::MAX) as usize;
            let own = env.ledger.job(stored.job).spec.headers.batch_hint.unwrap_or(u32::MAX) as usize;
            let is_too_large = (fitted < PASSES_PER_GROWTH && items >= tried && items > hint)
                || (fitted == 0 && items > hint)
                || items > own;
            let crashes = headers.crashes;
            // The next death of a program dead-letters the job, so nothing else may cause that death, in none of its passes.
            let is_last_try =
                stored.consumer.is_some() && crashes.saturating_add(1) >= CRASHES_MAX && of_programs(headers);
            let asks_for_device = is_last_try || (headers.exclusive && fitted == 0);
            let (number, is_shared) = (stored.job.0, asks_for_device && !order.exclusive);
            if crashes >= SUSPECT_AFTER && jobs.len() > 1 {
                env.ledger.fail("a job that may crash workers runs alone, and not for ever", || {
                    format!(
                        "worker-{who}: job {number}, of {crashes} crashes, in a pass of {} jobs",
                        jobs.len()
                    )
                });
            }
            if is_too_large {
                env.ledger.fail("no size is tried again that failed", || {
                    format!("worker-{who}: {items} items with job {number}, whose hint is {hint} and which failed with {tried}")
                });
            }
            if is_shared {
                env.ledger
                    .fail("a job that asks for the device gets it", || format!("worker-{who}: job {number}"));
            }
        }
    }

    /// Checks that each item is prepared, not computed yet, and in no other pass.
    fn check_items(&mut self, env: &mut Env, order: &PassOrder) {
        let who = self.life.worker;
        for (job, item) in &order.items {
            let is_done =
                self.jobs.get(job).is_some_and(|stored| stored.outputs.get(item.0 as usize) == Some(&true));
            let is_running = self.passes_with(*job).any(|flight| flight.order.items.contains(&(*job, *item)));
            let is_prepared = self.jobs.get(job).is_some_and(|stored| item.0 < stored.prepared);
            if !is_prepared {
                env.ledger.fail("only items that are prepared run", || {
                    format!("worker-{who}: item {item} of {job:?}")
                });
            }
            if is_done || is_running {
                env.ledger.fail("an item is computed once", || {
                    format!("worker-{who}: item {item} of {job:?} is made again")
                });
            }
        }
    }

    /// Checks that a small job waits only for its share of passes, not for everyone else's work.
    fn check_share(&mut self, env: &mut Env, order: &PassOrder, jobs: &[JobKey]) {
        let turn = env.plan.models[order.model.0].pass_cost_max / 8;
        let most = PASSES_BEFORE_SMALL + PASSES_PER_NEIGHBOUR * self.jobs.len();
        let who = self.life.worker;
        let model = &self.models[order.model.0];
        let full = PassShape { items: 1, cost: model.pass_cost_max, longest: model.pass_cost_max };
        let limit = self.core.learned_limits().limit(&model.name, order.shape.longest);
        if self.budget.limit().min(limit) < (model.pass_bytes)(full) {
            // After a shortage of memory, passes are smaller and more numerous.
            return;
        }
        for (key, stored) in &mut self.jobs {
            let waits = stored.is_decoded && !stored.has_started && !stored.is_publishing;
            if stored.model != order.model || !waits || jobs.contains(key) {
                continue;
            }
            stored.passed_over += 1;
            // An exclusive pass waits for the passes in flight, and short passes start meanwhile.
            let Kind::Job { headers: Some(headers), .. } = &env.ledger.letter(stored.letter).kind else {
                continue;
            };
            // So does the last try of a job that may crash programs.
            if headers.exclusive
                || headers.crashes.saturating_add(stored.returns).saturating_add(1) >= CRASHES_MAX
            {
                continue;
            }
            let cost: usize = env.ledger.job(stored.job).spec.costs.iter().sum();
            let (passed_over, number) = (stored.passed_over, stored.job.0);
            if cost <= turn && passed_over > most {
                env.ledger.fail("a small job waits for its share only", || {
                    format!("worker-{who}: {passed_over} passes went before job {number}")
                });
            }
        }
    }

    /// Checks that the core's collections stay within their bounds.
    pub(super) fn check_sizes_of_core(&self, env: &mut Env) {
        let who = self.life.worker;
        // The model of a quorum queue may deliver after it confirmed the end of a consumer, whose slots other consumers have by then.
        let leases = || self.session.iter().flat_map(|session| &session.leases);
        let is_late =
            |job: &&StoredJob| job.consumer.is_some_and(|own| leases().all(|lease| lease.consumer != own));
        let late = self.jobs.values().filter(is_late).count();
        let most = |size: &Size| size.most + if size.what == "unacknowledged jobs" { late } else { 0 };
        if let Some(size) = self.core.sizes().find(|size| size.entries > most(size)) {
            env.ledger.fail("nothing grows without bound", || format!("worker-{who}: {size:?}"));
        }
    }

    /// Once a second: checks that no small job, and no next item of a started job, waits while the device's thread is idle and has memory.
    pub(super) fn check_room_is_used(&mut self, env: &mut Env) {
        let is_well = self.is_well(env.now) && self.passes.values().all(|flight| !flight.order.exclusive);
        let (who, free) = (self.life.worker, self.budget.available());
        let is_idle: Vec<bool> = self.models.iter().map(|model| !self.is_busy(model.executor)).collect();
        for stored in self.jobs.values_mut() {
            let model = &self.models[stored.model.0];
            let spec = &env.ledger.job(stored.job).spec;
            let left: usize = spec.costs.iter().skip(stored.next as usize).sum();
            let longest = spec.costs.iter().max().copied().unwrap_or(0);
            let cost = if stored.has_started { longest } else { left };
            let is_small = cost <= model.pass_cost_max / 8 && !spec.headers.exclusive;
            let is_whole = stored.outputs.iter().skip(stored.next as usize).all(|there| *there);
            let waits = stored.is_decoded && !stored.is_publishing && !stored.is_cancelled && !is_whole;
            let shape = PassShape { items: spec.costs.len(), cost, longest: cost };
            let has_room = is_idle[stored.model.0]
                && !env.plan.models[stored.model.0].concurrent
                && (model.pass_bytes)(shape) <= free;
            if !(is_well && is_small && waits && has_room && stored.withdrawn == Withdrawn::No) {
                stored.room_since = None;
                continue;
            }
            let since = *stored.room_since.get_or_insert(env.now);
            let most = if stored.has_started { NEXT_ITEM_MAX } else { ROOM_UNUSED_MAX };
            if env.now - since > most {
                let (number, seconds) = (stored.job.0, (env.now - since) / SECOND);
                return env.ledger.fail("room on the device is used", || {
                    format!("worker-{who}: job {number} could have been in a pass {seconds} s ago")
                });
            }
        }
    }

    /// A large job was requeued to make room. Checks that this costs at most a tenth of the consumed bytes.
    pub(super) fn handed_over(&mut self, env: &mut Env, job: JobKey) {
        let Some(stored) = self.jobs.get(&job) else { return };
        env.ledger.handed_over += 1;
        let had = stored.had_device / 1_000;
        if had + MILLI < env.plan.large_turn {
            let (number, had) = (stored.job.0, had / MILLI);
            env.ledger
                .fail("a large job has its turn", || format!("job {number} is handed over after {had} ms"));
        }
        self.bytes.handed_over += bytes_of(&env.ledger.job(stored.job).spec);
        let (who, Bytes { consumed, handed_over }) = (self.life.worker, self.bytes);
        if handed_over * 10 > consumed {
            env.ledger.fail("turns requeue a tenth of the bytes consumed at most", || {
                format!("worker-{who}: {handed_over} bytes of {consumed}")
            });
        }
    }

    /// Checks that a worker that reports a completed drain holds nothing.
    pub(super) fn check_drained(&self, env: &mut Env) {
        let (who, held) = (self.life.worker, self.held());
        if held > 0 {
            env.ledger.fail("a drain waits for the jobs", || format!("worker-{who} ends with {held} jobs"));
        }
    }

    /// After all jobs have ended: checks that the worker holds nothing and is ready for the next job.
    pub fn check_at_rest(&self, env: &mut Env) {
        let (who, status, unacked) = (self.life.worker, self.core.status(), self.core.unacked());
        if unacked > 0 || self.budget.used() > 0 || status.models.iter().any(|model| model.waiting > 0) {
            let used = self.budget.used();
            env.ledger.fail("nothing is held in the end", || {
                format!("worker-{who}: {unacked} jobs, {used} bytes; {status:?}")
            });
        }
        let is_ready = status.models.iter().all(|model| model.is_consuming) && self.consumes_all(env);
        if self.session.is_some() && status.reason.is_none() && !is_ready {
            env.ledger.fail("a worker that is well consumes", || format!("worker-{who}: {status:?}"));
        }
    }
}
