//! `schemas/json` and the golden bytes, by validators of others. `schemas/tests/json_schema` compares them with the code.

use std::process::Command;

use anyhow::{Result, ensure};
use vramq_tests::programs::{root, setting};
use vramq_tests::setup::Failed;

#[test]
fn json_schemas_asyncapi_and_golden_bytes_fit_by_the_validators_of_others() -> Result<(), Failed> {
    Ok(fit()?)
}

fn fit() -> Result<()> {
    let mut command = Command::new(setting("VRAMQ_TEST_PYTHON")?);
    command.arg(root().join("tests/foreign/schemas.py")).arg(root().join("schemas"));
    let ended = command.arg(setting("VRAMQ_TEST_NODE_MODULES")?).output()?;
    ensure!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    Ok(())
}
