//! Cuts a history that breaks a rule down to a shorter one that breaks the same rule.

use super::plan::Plan;
use super::trace::Detail;
use super::world::run;

/// The shortest plan found: with fewer faults, callers and workers, and cut off after the violation. Random choices depend on everything
/// before, so a cut may change the history; cuts that do not lead to the same rule are undone.
pub fn shrink(plan: Plan) -> Plan {
    let Some(rule) = rule_of(&plan) else { return plan };
    let mut best = plan;
    loop {
        let before = size(&best);
        for cut in cuts(&best) {
            if size(&cut) < size(&best) && rule_of(&cut) == Some(rule) {
                best = cut;
            }
        }
        if size(&best) >= before {
            return best;
        }
    }
}

fn rule_of(plan: &Plan) -> Option<&'static str> {
    run(plan.clone(), Detail::None).violation.map(|violation| violation.rule)
}

fn size(plan: &Plan) -> (usize, usize, usize, usize) {
    let jobs = plan.callers.iter().map(|caller| caller.jobs_max).sum();
    (
        plan.workers.len() + plan.callers.len(),
        plan.faults.len(),
        jobs,
        plan.withdrawn_percent
            + plan.referring_percent
            + plan.commanded_permille
            + usize::from(plan.leaked_by_pass > 0)
            + usize::from(plan.reply_outputs_max.is_some())
            + plan.sharing.size()
            + plan.odds.size(),
    )
}

/// Every plan that lacks one thing.
fn cuts(plan: &Plan) -> Vec<Plan> {
    let mut cuts = Vec::new();
    let mut cut = |change: &dyn Fn(&mut Plan)| {
        let mut shorter = plan.clone();
        change(&mut shorter);
        cuts.push(shorter);
    };
    // The largest cuts first.
    if let Some(violation) = run(plan.clone(), Detail::None).violation {
        cut(&|plan| plan.faults.retain(|fault| fault.at <= violation.at));
    }
    for at in (0..plan.workers.len()).filter(|_| plan.workers.len() > 1) {
        cut(&|plan| {
            plan.workers.remove(at);
        });
    }
    for at in (0..plan.callers.len()).filter(|_| plan.callers.len() > 1) {
        cut(&|plan| {
            plan.callers.remove(at);
        });
    }
    cut(&|plan| plan.faults.clear());
    cut(&|plan| plan.withdrawn_percent = 0);
    cut(&|plan| plan.referring_percent = 0);
    cut(&|plan| plan.commanded_permille = 0);
    cut(&|plan| plan.leaked_by_pass = 0);
    cut(&|plan| plan.reply_outputs_max = None);
    cuts.push(plan.clone().plain());
    let mut cut = |change: &dyn Fn(&mut Plan)| {
        let mut shorter = plan.clone();
        change(&mut shorter);
        cuts.push(shorter);
    };
    for at in 0..plan.faults.len() {
        cut(&|plan| {
            plan.faults.remove(at);
        });
    }
    for at in 0..plan.callers.len() {
        cut(&|plan| plan.callers[at].jobs_max /= 2);
        cut(&|plan| plan.callers[at].jobs_max = plan.callers[at].jobs_max * 9 / 10);
    }
    cuts
}
