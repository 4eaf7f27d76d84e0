//! The configuration of a model that is a program of the user.

use toml::{Table, Value};
use vramq_inference::process::config::Fault;
use vramq_inference::process::rule::Consequence;
use vramq_inference::process::{Place, ProcessConfig};
use vramq_schemas::topology::check_model_name;

use super::EngineConfig;
use super::section::Section;

/// Keys whose values are not texts. A flag or an environment variable gives them as text.
const NOT_TEXTS: [&str; 14] = [
    "command",
    "env",
    "vram",
    "rule",
    "revision_files",
    "instances",
    "idle_s",
    "items_max",
    "load_s",
    "item_s",
    "kill_s",
    "withheld_s",
    "recycle_after",
    "host_memory_mib",
];

/// The same within the table `vram`. All values of `env` are texts.
const NOT_TEXTS_OF_VRAM: [&str; 3] = ["base_mib", "mib_per_unit", "learn"];

/// The keys of a program that have one value.
pub(super) fn plain_keys() -> impl Iterator<Item = &'static str> {
    NOT_TEXTS.into_iter().filter(|key| !["env", "vram", "rule"].contains(key))
}

/// Reads the rest of a model's section, without the keys that every model has.
pub(super) fn engine(name: &str, key: &str, section: Section, place: &Place) -> Option<EngineConfig> {
    let faults = section.faults();
    let mut table = section.into_rest();
    NOT_TEXTS.into_iter().for_each(|key| as_toml(&mut table, key));
    if let Some(Value::Table(vram)) = table.get_mut("vram") {
        NOT_TEXTS_OF_VRAM.into_iter().for_each(|key| as_toml(vram, key));
    }
    match ProcessConfig::read_for_any_machine(name, table, place) {
        Ok((config, absent)) => {
            for Fault { key, what } in absent {
                faults.add_absent(key, what);
            }
            for (at, rule) in config.rules.iter().enumerate() {
                let Consequence::To(to) = &rule.then else { continue };
                let fault = |what: String| faults.add(format!("model.{name}.rule[{at}].to"), what);
                if to == key {
                    fault("is the model's own key: its jobs are there already".to_owned());
                } else if let Err(error) = check_model_name(to) {
                    fault(error.to_string());
                }
            }
            Some(EngineConfig::Process(Box::new(config)))
        }
        Err(found) => {
            for Fault { key, what } in found {
                faults.add(key, what);
            }
            None
        }
    }
}

/// Replaces a string that is TOML of another type by its value.
fn as_toml(table: &mut Table, key: &str) {
    let Some(Value::String(text)) = table.get(key) else { return };
    let Ok(mut parsed) = format!("value = {text}").parse::<Table>() else { return };
    if let Some(value) = parsed.remove("value") {
        table.insert(key.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, EngineConfig, Invalid};

    fn pairs(overrides: &[(&str, &str)]) -> Vec<(String, String)> {
        overrides.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_program_is_a_model_with_the_keys_of_every_model() {
        let file = "
            [model.thumbs]
            engine = 'process'
            command = ['/bin/sh', '-c', 'true']
            instances = 3
            larger = 'thumbs-large'
            slots_max = 9
            vram = { base_mib = 30, per = 'pixels', mib_per_unit = 0.006 }
            [model.e]
            engine = 'echo'";
        let config = Config::read(Some(file), &pairs(&[("model.thumbs.items_max", "4")])).unwrap();
        let model = config.models.iter().find(|model| model.name == "thumbs").unwrap();
        let EngineConfig::Process(process) = &model.engine else { panic!("{:?}", model.engine) };
        assert_eq!((process.items_max, model.slots_max.get()), (4, 9));
        assert_eq!(process.vram.base_bytes, Some(30 << 20));
        assert_eq!(model.larger.as_deref(), Some("thumbs-large"));
    }

    #[test]
    fn a_programs_tables_can_be_set_by_flags() {
        let flags = [
            ("model.a.v1.engine", "process"),
            ("model.a.v1.command", "['/bin/sh', '-c', 'true']"),
            ("model.a.v1.env.HF_HOME", "/models"),
            ("model.a.v1.env.THREADS", "2"),
            ("model.a.v1.vram.base_mib", "30"),
            ("model.a.v1.vram.per", "pixels"),
            ("model.a.v1.rule", "[{ when = 'pixels > 4e6', refuse = 'too large' }]"),
        ];
        let config = Config::read(None, &pairs(&flags)).unwrap();
        assert_eq!(config.models[0].name, "a.v1");
        let EngineConfig::Process(process) = &config.models[0].engine else { panic!("{config:?}") };
        let env: Vec<_> = process.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(env, [("HF_HOME", "/models"), ("THREADS", "2")]);
        assert_eq!((process.vram.base_bytes, process.rules.len()), (Some(30 << 20), 1));
    }

    #[test]
    fn faults_of_programs_come_with_all_others() {
        let file = "
            [model.a]
            engine = 'process'
            command = ['python3', 'serve.py']
            pass_tokens = 3
            load_s = 'soon'
            rule = [{ when = 'pixels > 4e6', to = 'q' }]
            [model.b]
            engine = 'process'
            command = ['/no/such/program']
            slots_max = 0
            [model.c]
            engine = 'process'
            command = ['/bin/sh']
            rule = [{ when = 'pixels > 4e6', to = 'c' }, { when = 'bytes > 1', to = 'large' }]";
        let Invalid(faults) = Config::read(Some(file), &[]).unwrap_err();
        let keys: Vec<_> = faults.iter().map(|fault| fault.key.as_str()).collect();
        for key in [
            "model.a.command",
            "model.a.pass_tokens",
            "model.a.load_s",
            "model.b.command",
            "model.b.slots_max",
            "model.c.rule[0].to",
        ] {
            assert!(keys.contains(&key), "{key} is not in {keys:?}");
        }
        assert!(!keys.contains(&"model.c.rule[1].to"), "{keys:?}");
    }
}
