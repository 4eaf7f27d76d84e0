//! Counts how the jobs of a run ended, and says how the run ends: by its messages and its exit code.

use std::io;

use super::input::InputError;
use super::job::{Failure, JobResult, JobTemplate};
use super::output::Results;
use crate::exit;
use crate::output::progress::Progress;
use crate::output::text::{counted, safe, safe_lines};
use crate::output::write_line;

/// Counts of a run.
#[derive(Default)]
pub(super) struct Totals {
    jobs_failed: u64,
    items_missing: u64,
    /// The first failure that every other job would have, too.
    fatal: Option<(u8, String)>,
}

impl Totals {
    /// Writes a job's outputs, and counts what is missing.
    pub(super) fn take(
        &mut self,
        answer: &JobResult,
        results: &mut Results,
        template: &JobTemplate,
        progress: &Progress,
    ) -> io::Result<()> {
        let JobResult { id, chunk, failure, outputs } = answer;
        if template.no_wait && failure.is_none() {
            write_line(id)?;
            return Ok(());
        }
        for (n, item) in chunk.items.iter().enumerate() {
            let output = outputs.get(n).and_then(Option::as_ref);
            self.items_missing += u64::from(output.is_none());
            results.write(chunk.first + n, item, output)?;
        }
        results.flush()?;
        let Some(failure) = failure else {
            return Ok(());
        };
        self.jobs_failed += 1;
        match failure {
            Failure::Job(problem) => {
                let last = chunk.first + chunk.items.len() - 1;
                // A program's traceback has several lines.
                let problem = safe_lines(problem, "    ");
                progress.say(&format!("job {id} (items {} to {last}): {problem}", chunk.first));
            }
            Failure::Fatal(code, problem) if self.fatal.is_none() => {
                self.fatal = Some((*code, problem.clone()));
            }
            Failure::Fatal(..) => {}
        }
        Ok(())
    }

    /// Completes the output, or says why the run ended early: `fault` is of the input. Returns the exit code.
    pub(super) fn finish(
        self,
        mut results: Results,
        fault: Option<InputError>,
        template: &JobTemplate,
        progress: &Progress,
    ) -> u8 {
        let what = if template.no_wait { "published" } else { "answered" };
        if let Some((code, problem)) = self.fatal {
            progress.clear();
            eprintln!("error: {}", safe(&problem));
            eprintln!("stopped: {} items {what}, {} not", progress.done(), self.items_missing);
            return end_early(results, code);
        }
        if let Some(fault) = fault {
            progress.clear();
            eprintln!("error: {fault}");
            eprintln!("stopped: {} items before it are {what}", progress.done());
            return end_early(results, fault.code());
        }
        if let Err(error) = results.flush() {
            return written_off(&error, results, progress);
        }
        if let Err(error) = results.finish() {
            progress.clear();
            eprintln!("error: write the output: {error}");
            return exit::FAILED;
        }
        progress.finish(what);
        if self.jobs_failed > 0 {
            let (jobs, items) = (counted(self.jobs_failed, "job"), counted(self.items_missing, "item"));
            eprintln!("{jobs} failed, {items} without an answer");
            return exit::FAILED;
        }
        exit::DONE
    }
}

/// Ends a run whose output cannot be written; its exit code.
pub(super) fn written_off(error: &io::Error, results: Results, progress: &Progress) -> u8 {
    progress.clear();
    if error.kind() == io::ErrorKind::BrokenPipe {
        return end_early(results, exit::BROKEN_PIPE);
    }
    eprintln!("error: write the output: {error}");
    end_early(results, exit::FAILED)
}

/// Leaves the output incomplete, and says where it is.
pub(super) fn end_early(results: Results, code: u8) -> u8 {
    if let Some((partial, is_whole)) = results.abandon() {
        let what = if is_whole { "what" } else { "a part of what" };
        eprintln!("{what} was answered is in {}", partial.display());
    }
    code
}
