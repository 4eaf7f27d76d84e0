//! [`MODEL`] as an example of docs/model-examples.

use anyhow::Result;
use tempfile::TempDir;
use vramq_tests::programs::{root, setting};
use vramq_tests::test_env::{MODEL, TestEnv};

/// An example, and how a worker is to serve it.
pub(crate) struct Example<'a> {
    /// A variable with the Python that has what the example imports.
    pub(crate) python: &'a str,
    pub(crate) program: &'a str,
    /// Lines of the model's table.
    pub(crate) settings: &'a str,
    /// Lines of its environment.
    pub(crate) variables: &'a str,
}

impl Example<'_> {
    /// Gives workers of the test a configuration with it, in a folder that they need as long as they run.
    pub(crate) fn configure(&self, env: &mut TestEnv) -> Result<TempDir> {
        let folder = tempfile::tempdir()?;
        let repository = root().canonicalize()?;
        let Self { python, program, settings, variables } = self;
        let text = format!(
            "[model.{MODEL}]\nengine = \"process\"\ncommand = [{:?}, {program:?}]\nfolder = {:?}\n{settings}\n\
             [model.{MODEL}.env]\nPYTHONPATH = {:?}\n{variables}\n",
            setting(python)?,
            repository.join("docs/model-examples"),
            repository.join("python"),
        );
        let config = folder.path().join("worker.toml");
        std::fs::write(&config, text)?;
        env.set_environment("VRAMQ_CONFIG", config);
        Ok(folder)
    }
}
