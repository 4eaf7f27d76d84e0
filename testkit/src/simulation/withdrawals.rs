//! Callers that withdraw their jobs, and hostile ones that try to withdraw those of other callers. Withdrawals do not pass through the
//! model of the broker: each worker with a session gets each of them, sometimes late, twice, or not at all.

use super::agenda::{Claim, Happening, Life, MILLI, Micros, SECOND};
use super::env::Env;
use super::ledger::{JobNumber, Letter};
use super::plan::Style;
use super::random::Random;
use super::world::World;

/// Callers repeat a withdrawal so often until the job has ended.
const REPEATED_EVERY: Micros = 5 * SECOND;

/// A caller that has waited for ten minutes gives up.
const REPEATS_MAX: u32 = 120;

/// How many recent jobs of other callers a hostile caller knows by their ids.
const KNOWN_IDS: usize = 10;

/// For a job that is being published: decides whether its caller withdraws it, and whether a hostile caller tries to.
pub fn decide(env: &mut Env, letter: Letter, style: Style) {
    let percent = env.plan.withdrawn_percent;
    if percent == 0 {
        return;
    }
    let (job, now) = (env.ledger.letter(letter).job.0, env.now);
    let r = &mut env.withdrawing;
    if r.chance(percent) {
        // Some callers die after their first withdrawal.
        let repeats = if r.chance(10) { 0 } else { REPEATS_MAX };
        let at = now + wait(r);
        env.agenda.at(at, Happening::Withdraw { claim: Claim { job, secret_of: Some(job) }, repeats });
    }
    if style == Style::Hostile && r.chance(percent) {
        let target = job.saturating_sub(1 + r.below(KNOWN_IDS));
        let secret_of = r.chance(50).then_some(job);
        let at = now + wait(r);
        if target != job {
            let claim = Claim { job: target, secret_of };
            env.agenda.at(at, Happening::Withdraw { claim, repeats: 0 });
        }
    }
}

/// How long after its publish a job is withdrawn: before the broker has it, while it waits or runs, or between attempts.
fn wait(r: &mut Random) -> Micros {
    let most = match r.below(10) {
        0 => return 0,
        1..=3 => 20 * MILLI,
        4..=6 => SECOND,
        7 | 8 => 10 * SECOND,
        _ => 120 * SECOND,
    };
    r.bits() % most
}

impl World {
    /// A withdrawal goes to all workers, and again while its job has not ended.
    pub(super) fn withdraw(&mut self, claim: Claim, repeats: u32) {
        let env = &mut self.env;
        let job = JobNumber(claim.job);
        if claim.secret_of == Some(claim.job) {
            if !env.ledger.job(job).is_awaited() {
                return;
            }
            env.ledger.withdraw(job);
        }
        let sessions = self.workers.iter().flatten();
        let sessions: Vec<(Life, u32)> =
            sessions.filter_map(|shell| Some((shell.life(), shell.session_number()?))).collect();
        for (life, session) in sessions {
            let times = match env.withdrawing.below(20) {
                0 | 1 => 0,
                2 => 2,
                _ => 1,
            };
            for _ in 0..times {
                let latency = if env.withdrawing.chance(5) { 5 * SECOND } else { 3 * MILLI };
                let at = env.now + env.withdrawing.bits() % latency;
                env.agenda.at(at, Happening::Withdrawal { life, session, claim });
            }
        }
        if let Some(repeats) = repeats.checked_sub(1) {
            env.agenda.at(env.now + REPEATED_EVERY, Happening::Withdraw { claim, repeats });
        }
    }
}
