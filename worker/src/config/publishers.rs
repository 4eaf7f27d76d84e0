//! The configuration about publishers of jobs: `[reply]`, `[fairness]`, and how many have their own figures in `[metrics]`.

use super::section::Section;
use crate::publishers::{Pattern, PublisherRules};

/// Limited, because each delivery is compared with all of them.
const PATTERNS_MAX: usize = 64;
const TENANT_USERS_MAX: usize = 64;

/// The longest name of a queue or user.
const NAME_BYTES_MAX: usize = 255;

/// Each caller has about a dozen series on every worker. Metrics pages should not have more than ten thousand callers.
const CALLERS_DEFAULT: u32 = 100;
const CALLERS_MAX: u32 = 10_000;

pub(super) fn callers_max(mut metrics: Section) -> usize {
    let most = metrics.number("callers_max", 0..=CALLERS_MAX).unwrap_or(CALLERS_DEFAULT);
    metrics.finish();
    most as usize
}

pub(super) fn publishers(mut reply: Section, mut fairness: Section) -> PublisherRules {
    let allow = names(&mut reply, "allow", PATTERNS_MAX);
    let tenant_users = names(&mut fairness, "tenant_users", TENANT_USERS_MAX);
    reply.finish();
    fairness.finish();
    PublisherRules {
        reply_allow: allow.map(|patterns| patterns.into_iter().map(Pattern::new).collect()),
        tenant_users: tenant_users.unwrap_or_default(),
        ..PublisherRules::default()
    }
}

fn names(section: &mut Section, key: &'static str, most: usize) -> Option<Vec<String>> {
    let names = section.take::<Vec<String>>(key)?;
    if names.len() > most {
        section.fault(key, format!("has {} entries; it may have {most}", names.len()));
    }
    if names.iter().any(|name| name.len() > NAME_BYTES_MAX) {
        section.fault(key, format!("has an entry of more than {NAME_BYTES_MAX} bytes"));
    }
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Invalid};

    const MODEL: &str = "[model.m]\nengine = 'echo'\n";

    #[test]
    fn lists_come_from_a_file_or_as_one_text() {
        let file = format!("{MODEL}[reply]\nallow = ['vramq.replies.*', 'team-*']\n");
        let overrides = [("fairness.tenant_users".to_owned(), "gateway, edge".to_owned())];
        let rules = Config::read(Some(&file), &overrides).unwrap().publishers;
        assert_eq!(rules.reply_to_fault("team-1"), None);
        assert!(rules.reply_to_fault("payroll").is_some());
        assert_eq!(rules.tenant_users, ["gateway", "edge"]);
        let default = Config::read(Some(MODEL), &[]).unwrap().publishers;
        assert!(default.reply_allow.is_none() && default.tenant_users.is_empty());
        let nothing = Config::read(Some(MODEL), &[("reply.allow".to_owned(), String::new())]).unwrap();
        assert_eq!(nothing.publishers.reply_allow, Some(Vec::new()));
    }

    #[test]
    fn callers_with_figures_of_their_own_have_a_default_and_a_bound() {
        let most = |value: &str| {
            let overrides = [("metrics.callers_max".to_owned(), value.to_owned())];
            Config::read(Some(MODEL), &overrides).map(|config| config.callers_max)
        };
        assert_eq!(Config::read(Some(MODEL), &[]).unwrap().callers_max, 100);
        assert_eq!([most("0"), most("10000")], [Ok(0), Ok(10_000)]);
        for wrong in ["10001", "-1", "all"] {
            let Invalid(faults) = most(wrong).unwrap_err();
            assert!(faults.len() == 1 && faults[0].key == "metrics.callers_max", "{wrong}: {faults:?}");
        }
    }

    #[test]
    fn wrong_lists_are_faults() {
        let long = "x".repeat(256);
        for (text, key) in [
            ("[reply]\nallow = 7".to_owned(), "reply.allow"),
            ("[reply]\nallow = ['a', 7]".to_owned(), "reply.allow"),
            ("[reply]\nallow = ['']".to_owned(), "reply.allow"),
            ("[reply]\nallows = ['a']".to_owned(), "reply.allows"),
            (format!("[reply]\nallow = ['{long}']"), "reply.allow"),
            (format!("[fairness]\ntenant_users = {:?}", vec!["u"; 65]), "fairness.tenant_users"),
        ] {
            let Invalid(faults) = Config::read(Some(&format!("{MODEL}{text}")), &[]).unwrap_err();
            assert!(faults.len() == 1 && faults[0].key == key, "{text}: {faults:?}");
        }
    }
}
