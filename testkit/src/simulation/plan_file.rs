//! Plans in files. The meaning of a seed changes with the generator of plans. A plan in a file stays the same history, as long as the world
//! draws everything that the plan does not contain (the jobs of callers, durations) from the plan's seed as before.

use std::path::Path;
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::plan::Plan;

/// The saved plan of a history that broke a rule.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// The broken rule. If the plan has a deliberate fault, the history still breaks this rule.
    pub broke: String,
    /// What was wrong: the rule's text, or what was found out later.
    pub what: String,
    pub plan: Plan,
}

impl PlanFile {
    /// # Errors
    /// The file cannot be read, or is not a plan in the current format.
    pub fn read(path: &Path) -> io::Result<Self> {
        let text = fs::read_to_string(path).map_err(|error| naming(path, &error))?;
        serde_json::from_str(&text).map_err(|error| naming(path, &error.into()))
    }

    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        fs::write(path, text + "\n").map_err(|error| naming(path, &error))
    }
}

fn naming(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::Sabotage;
    use crate::simulation::agenda::HOUR;

    #[test]
    fn a_plan_is_the_same_after_its_way_through_a_file() {
        let folder = std::env::temp_dir();
        for seed in 0..50 {
            let plan = Plan { sabotage: Some(Sabotage::PartSkipped), ..Plan::new(seed, HOUR) };
            let file = PlanFile { broke: "a rule".to_owned(), what: "nothing".to_owned(), plan };
            let path = folder.join(format!("vramq-plan-{}-{seed}.json", std::process::id()));
            file.write(&path).unwrap();
            let read = PlanFile::read(&path);
            fs::remove_file(&path).unwrap();
            assert_eq!(read.unwrap(), file);
        }
    }

    #[test]
    fn a_file_that_is_no_plan_is_named() {
        let error = PlanFile::read(Path::new("no/such/plan.json")).unwrap_err();
        assert!(error.to_string().starts_with("no/such/plan.json: "), "{error}");
    }
}
