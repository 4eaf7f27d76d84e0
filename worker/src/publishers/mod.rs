//! Rules for publishers: which queues `reply_to` may name, and to which caller's share a job's passes count. Pure.

pub mod direct_address;
pub mod reply_to;

use vramq_schemas::TENANT_BYTES_MAX;
use vramq_schemas::output_name::tenant_of;

/// A worker's rules for publishers; by default they may name any queue, and no user may name tenants.
#[derive(Clone, Debug, Default)]
pub struct PublisherRules {
    /// Patterns of which one must match `reply_to`; `None` allows any queue.
    pub reply_allow: Option<Vec<Pattern>>,
    /// Users that publish for others and name them, as gateways do.
    pub tenant_users: Vec<String>,
    /// Queues that this worker takes jobs from, besides those named by vramq. A reply to one would come back as a job.
    pub job_queues: Vec<String>,
}

impl PublisherRules {
    /// Why a job's `reply_to` must not get replies, if so.
    pub fn reply_to_fault(&self, reply_to: &str) -> Option<String> {
        if let Some(fault) = reply_to::fault(reply_to) {
            return Some(format!("reply_to names `{reply_to}`, {fault}"));
        }
        if self.job_queues.iter().any(|queue| queue == reply_to) {
            return Some(format!("reply_to names `{reply_to}`, which is not a queue for replies"));
        }
        let allowed = self.reply_allow.as_ref()?;
        // An empty `reply_to` means the model's own reply queue, which the operator has chosen.
        if reply_to.is_empty() || allowed.iter().any(|pattern| pattern.matches(reply_to)) {
            return None;
        }
        Some(format!("reply_to names `{reply_to}`, to which this worker's `reply.allow` permits no replies"))
    }

    /// The caller whose share a job takes: its user or, if that user publishes for others, the tenant that the job names.
    pub fn caller(&self, user: Option<String>, tenant: Option<String>) -> Option<String> {
        let user = user?;
        let tenant = tenant.filter(|tenant| tenant.len() <= TENANT_BYTES_MAX);
        match tenant {
            Some(tenant) if self.tenant_users.contains(&user) => Some(tenant_of(&user, &tenant)),
            _ => Some(user),
        }
    }
}

/// A pattern for queues' names, in which `*` stands for any run of characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(String);

impl Pattern {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn matches(&self, name: &str) -> bool {
        let Some((start, rest)) = self.0.split_once('*') else { return self.0 == name };
        let Some(mut left) = name.strip_prefix(start) else { return false };
        let mut between: Vec<_> = rest.split('*').collect();
        // `rest` has at least one piece, which is the end of the pattern.
        let end = between.pop().unwrap_or_default();
        for piece in between {
            // The leftmost match leaves the most text for the other pieces.
            match left.find(piece) {
                Some(at) => left = &left[at + piece.len()..],
                None => return false,
            }
        }
        left.ends_with(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(allow: &[&str]) -> PublisherRules {
        let reply_allow = Some(allow.iter().map(|text| Pattern::new(*text)).collect());
        PublisherRules {
            reply_allow,
            tenant_users: vec!["gateway".to_owned()],
            job_queues: vec!["team-a.jobs".to_owned()],
        }
    }

    #[test]
    fn a_star_stands_for_any_run_of_characters() {
        for (pattern, matching, others) in [
            ("replies", &["replies"][..], &["replies.a", "a.replies", ""][..]),
            (
                "vramq.replies.*",
                &["vramq.replies.", "vramq.replies.a.b"],
                &["vramq.replies", "x.vramq.replies.a"],
            ),
            ("*", &["", "a"], &[]),
            ("a*b*c", &["abc", "a--b--b--c", "abcbc"], &["ab", "abcd", "acb", "bc"]),
            ("*.team-a", &["x.team-a", ".team-a"], &["x.team-a.y", "team-a"]),
            // The start and the end may not share characters.
            ("ab*ba", &["abba", "ab-ba"], &["aba"]),
            ("ä*ö", &["äö", "ä*ö"], &["ä"]),
        ] {
            let pattern = Pattern::new(pattern);
            assert!(matching.iter().all(|name| pattern.matches(name)), "{pattern:?} {matching:?}");
            assert!(!others.iter().any(|name| pattern.matches(name)), "{pattern:?} {others:?}");
        }
    }

    #[test]
    fn a_reply_to_that_no_pattern_matches_is_a_fault() {
        let rules = rules(&["vramq.replies.*", "team-*"]);
        for allowed in ["vramq.replies.a", "team-7", ""] {
            assert_eq!(rules.reply_to_fault(allowed), None, "{allowed}");
        }
        let fault = rules.reply_to_fault("payroll").unwrap();
        assert!(fault.contains("`payroll`") && fault.contains("`reply.allow`"), "{fault}");
        assert_eq!(PublisherRules::default().reply_to_fault("payroll"), None);
        // No pattern permits a queue whose messages would come back as jobs.
        assert!(self::rules(&["*"]).reply_to_fault("vramq.jobs.m").is_some());
        assert!(self::rules(&["*"]).reply_to_fault("team-a.jobs").is_some());
        assert!(self::rules(&[]).reply_to_fault("vramq.replies.a").is_some());
    }

    #[test]
    fn only_users_that_publish_for_others_name_tenants() {
        let rules = rules(&[]);
        let caller = |user: Option<&str>, tenant: Option<&str>| {
            rules.caller(user.map(str::to_owned), tenant.map(str::to_owned))
        };
        assert_eq!(caller(Some("gateway"), Some("acme")).as_deref(), Some("gateway/acme"));
        assert_eq!(caller(Some("gateway"), None).as_deref(), Some("gateway"));
        assert_eq!(caller(Some("bob"), Some("acme")).as_deref(), Some("bob"));
        assert_eq!(caller(None, Some("acme")), None);
        assert_eq!(caller(Some("gateway"), Some(&"x".repeat(129))).as_deref(), Some("gateway"));
    }
}
