//! Removes what is old, for as long as the gateway runs: jobs in memory, stored results, uploads.

use std::time::Duration;

use tokio::time::interval;

use crate::app::App;

/// How often old results and uploads are removed.
const SWEEP_EVERY: Duration = Duration::from_secs(30);

/// Begins a task for each place, so that one that hangs holds up only its own sweeps.
pub(super) fn begin(app: &App) {
    tokio::spawn(sweep_jobs(app.clone()));
    tokio::spawn(sweep_results(app.clone()));
    tokio::spawn(sweep_files(app.clone()));
}

async fn sweep_jobs(app: App) {
    let mut ticks = interval(SWEEP_EVERY);
    loop {
        ticks.tick().await;
        app.jobs.sweep();
    }
}

async fn sweep_results(app: App) {
    let Some(results) = &app.results else { return };
    let mut ticks = interval(SWEEP_EVERY);
    loop {
        ticks.tick().await;
        results.storage().check_folder().await;
        if results.storage().is_to_be_swept()
            && let Err(error) = results.sweep().await
        {
            results.storage().sweep_again();
            tracing::warn!(%error, "cannot list the stored results: listing them again at the next sweep");
        }
    }
}

async fn sweep_files(app: App) {
    let Some(files) = &app.files else { return };
    let mut ticks = interval(SWEEP_EVERY);
    loop {
        ticks.tick().await;
        files.storage().check_folder().await;
        if files.storage().is_to_be_swept()
            && let Err(error) = files.sweep().await
        {
            files.storage().sweep_again();
            tracing::warn!(%error, "cannot list the uploads: listing them again at the next sweep");
        }
    }
}
