//! The configuration of the model that is tried.

use std::path::{Path, PathBuf};

use toml::Table;
use vramq_inference::process::{Place, ProcessConfig};

/// Keys of a model's section that are for the worker around it.
const OF_THE_WORKER: [&str; 13] = [
    "body_mib_max",
    "fetch_mib_max",
    "key",
    "larger",
    "name",
    "output_above_kib",
    "output_store",
    "output_url",
    "queues",
    "reply_mib_max",
    "reply_queue",
    "slots_max",
    "weight",
];

/// The model's configuration, or all that is wrong.
pub(crate) fn read(path: &Path, model: Option<&str>) -> Result<ProcessConfig, Vec<String>> {
    let one = |fault: String| vec![fault];
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| one(format!("read {shown}: {error}")))?;
    let table: Table = text.parse().map_err(|error| one(format!("{shown}: {error}")))?;
    let (name, table) = choose(&table, model).map_err(|fault| one(format!("{shown} {fault}")))?;
    let folder = std::path::absolute(path).ok().and_then(|path| path.parent().map(Path::to_owned));
    let place = Place { folder: folder.unwrap_or_else(|| PathBuf::from("/")), scratch: std::env::temp_dir() };
    let mut table = table.clone();
    OF_THE_WORKER.iter().for_each(|key| drop(table.remove(*key)));
    ProcessConfig::read(name, table, &place)
        .map_err(|faults| faults.iter().map(|fault| format!("{shown}: {fault}")).collect())
}

/// The model of this name, or the only one; of those that are programs.
fn choose<'a>(config: &'a Table, model: Option<&str>) -> Result<(&'a String, &'a Table), String> {
    let is_process = |table: &Table| table.get("engine").and_then(toml::Value::as_str) == Some("process");
    let models = config.get("model").and_then(toml::Value::as_table).into_iter().flatten();
    let tables = models.filter_map(|(name, value)| Some((name, value.as_table()?)));
    let programs: Vec<(&String, &Table)> = tables.filter(|(_, table)| is_process(table)).collect();
    let names = programs.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    match (model, &programs[..]) {
        (_, []) => Err("has no model with engine = \"process\"".to_owned()),
        (None, [only]) => Ok(*only),
        (None, _) => Err(format!("has several models with engine = \"process\"; name one of {names}")),
        (Some(model), programs) => {
            let found = programs.iter().find(|(name, _)| *name == model).copied();
            found.ok_or_else(|| format!("has no model `{model}` with engine = \"process\"; it has {names}"))
        }
    }
}
