//! Checks the frames that a program sends for the running pass, and collects its outputs. No I/O, except for outputs in files.

use std::path::Path;

use vramq_schemas::Output;

use super::frame::Frame;
use super::outputs::PassOutputs;
use super::protocol::{FailureKind, FromModel, OomReport};

/// A pass under way: what came so far, and what may come next.
#[derive(Clone, Debug)]
pub struct Transcript {
    pass: u64,
    items: usize,
    /// The number of outputs so far, and the index of the next one's item.
    finished: usize,
    outputs: PassOutputs,
    /// The first item with an invalid output, and the reason. Later outputs are dropped, because items are answered in order.
    invalid: Option<(usize, String)>,
}

/// What a frame means.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Output {
        item: usize,
        output: Output,
    },
    /// An event to be ignored. The pass goes on to its end.
    Ignored,
    Progress {
        item: usize,
        fraction: f64,
        note: String,
    },
    End(End),
}

/// How a model ended a pass.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    Done {
        peak: Option<u64>,
    },
    OutOfMemory {
        item: Option<usize>,
        report: OomReport,
    },
    Failed {
        kind: FailureKind,
        item: Option<usize>,
        detail: String,
    },
    /// A disk has no room for what the program wrote.
    DiskFull {
        detail: String,
    },
}

/// A frame that the protocol does not allow here. The connection cannot be used any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("protocol fault: {0}")]
pub struct Fault(pub String);

impl Transcript {
    pub fn new(pass: u64, items: usize) -> Self {
        Self { pass, items, finished: 0, outputs: PassOutputs::default(), invalid: None }
    }

    /// Items that have their outputs: a run from the start.
    pub fn finished(&self) -> usize {
        self.finished
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// See [`Fault`].
    pub fn read(&mut self, frame: Frame<FromModel>, scratch: &Path) -> Result<Step, Fault> {
        let Frame { message, blobs } = frame;
        if !blobs.is_empty() && !matches!(message, FromModel::Output { .. }) {
            return Err(Fault("blobs in a frame that is not an output".to_owned()));
        }
        match message {
            FromModel::Output { pass, item, output } => {
                self.check_pass(Some(pass))?;
                let output = self.outputs.read(&output, blobs, scratch);
                self.output(item, output)
            }
            FromModel::Progress { pass, item, fraction, note } => {
                self.check_pass(Some(pass))?;
                self.check_item(Some(item))?;
                if !(0.0..=1.0).contains(&fraction) {
                    return Err(Fault(format!("progress of {fraction}; it is from 0 to 1")));
                }
                Ok(Step::Progress { item, fraction, note })
            }
            FromModel::Done { pass, peak } => {
                self.check_pass(Some(pass))?;
                if self.finished < self.items {
                    let Self { finished, items, .. } = self;
                    return Err(Fault(format!(
                        "done after {finished} outputs for {items} items; item {finished} has none"
                    )));
                }
                Ok(Step::End(match self.invalid.take() {
                    Some((item, detail)) => {
                        End::Failed { kind: FailureKind::Output, item: Some(item), detail }
                    }
                    None => End::Done { peak },
                }))
            }
            FromModel::Oom { pass, item, memory } => {
                self.check_pass(pass)?;
                self.check_item(item)?;
                Ok(Step::End(End::OutOfMemory { item, report: memory }))
            }
            FromModel::Failed { pass, item, kind, detail, disk_full } => {
                self.check_pass(pass)?;
                self.check_item(item)?;
                Ok(Step::End(if disk_full && kind == FailureKind::Model {
                    End::DiskFull { detail }
                } else {
                    End::Failed { kind, item, detail }
                }))
            }
            FromModel::Ready { .. } | FromModel::Pong { .. } => {
                Err(Fault("`ready` or `pong` while a pass runs".to_owned()))
            }
        }
    }

    fn output(&mut self, item: usize, output: Result<Output, String>) -> Result<Step, Fault> {
        if item != self.finished || item >= self.items {
            let Self { finished, items, .. } = self;
            return Err(Fault(format!("an output for item {item}; item {finished} of {items} is next")));
        }
        self.finished += 1;
        match output {
            Ok(output) if self.invalid.is_none() => Ok(Step::Output { item, output }),
            Ok(_) => Ok(Step::Ignored),
            // The frame is well formed and the process is well, so it may run the next pass.
            Err(what) => {
                self.invalid.get_or_insert((item, what));
                Ok(Step::Ignored)
            }
        }
    }

    fn check_pass(&self, pass: Option<u64>) -> Result<(), Fault> {
        match pass {
            Some(pass) if pass == self.pass => Ok(()),
            Some(pass) => Err(Fault(format!("a frame of pass {pass}; pass {} runs", self.pass))),
            None => Err(Fault("a frame without `pass` while a pass runs".to_owned())),
        }
    }

    fn check_item(&self, item: Option<usize>) -> Result<(), Fault> {
        match item {
            Some(item) if item >= self.items => {
                Err(Fault(format!("item {item} of a pass of {}", self.items)))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::protocol::{OutputHeader, OutputKind};
    use serde_json::json;

    fn output(pass: u64, item: usize) -> Frame<FromModel> {
        let output = OutputHeader { kind: OutputKind::Json, dtype: None, media_type: None, file: None };
        Frame { message: FromModel::Output { pass, item, output }, blobs: vec![b"1".to_vec()] }
    }

    fn read(transcript: &mut Transcript, frame: impl Into<Frame<FromModel>>) -> Result<Step, Fault> {
        transcript.read(frame.into(), Path::new("/nowhere"))
    }

    #[test]
    fn outputs_come_in_the_order_of_the_items() {
        let mut pass = Transcript::new(1, 2);
        let step = read(&mut pass, output(1, 0)).unwrap();
        assert_eq!(step, Step::Output { item: 0, output: Output::Json(json!(1)) });
        assert!(read(&mut pass, output(1, 0)).unwrap_err().0.contains("item 1 of 2 is next"));
        assert_eq!(pass.finished(), 1);
        assert!(read(&mut Transcript::new(1, 2), output(1, 1)).is_err());
        read(&mut pass, output(1, 1)).unwrap();
        assert!(read(&mut pass, output(1, 2)).is_err());
        let done = FromModel::Done { pass: 1, peak: Some(7) };
        assert_eq!(read(&mut pass, done).unwrap(), Step::End(End::Done { peak: Some(7) }));
    }

    #[test]
    fn an_output_that_is_none_ends_the_pass_and_not_the_process() {
        let mut pass = Transcript::new(1, 3);
        read(&mut pass, output(1, 0)).unwrap();
        let invalid = Frame { blobs: vec![b"{".to_vec()], ..output(1, 1) };
        assert_eq!(read(&mut pass, invalid).unwrap(), Step::Ignored);
        assert_eq!(read(&mut pass, output(1, 2)).unwrap(), Step::Ignored);
        let end = read(&mut pass, FromModel::Done { pass: 1, peak: None }).unwrap();
        let Step::End(End::Failed { kind: FailureKind::Output, item: Some(1), detail }) = end else {
            panic!("{end:?}")
        };
        assert!(detail.contains("not JSON"), "{detail}");
    }

    #[test]
    fn a_full_disk_is_no_failure_of_the_model() {
        let end = |kind: &str| {
            let failed =
                json!({"type": "failed", "pass": 1, "kind": kind, "detail": "why", "disk_full": true});
            let failed: FromModel = serde_json::from_value(failed).unwrap();
            read(&mut Transcript::new(1, 2), failed).unwrap()
        };
        assert_eq!(end("model"), Step::End(End::DiskFull { detail: "why".to_owned() }));
        // The program says that the item is at fault.
        assert!(matches!(end("input"), Step::End(End::Failed { kind: FailureKind::Input, .. })));
    }

    #[test]
    fn done_too_early_names_the_item() {
        let mut pass = Transcript::new(1, 2);
        read(&mut pass, output(1, 0)).unwrap();
        let fault = read(&mut pass, FromModel::Done { pass: 1, peak: None }).unwrap_err();
        assert_eq!(fault.0, "done after 1 outputs for 2 items; item 1 has none");
    }

    #[test]
    fn frames_that_do_not_belong_here_are_faults() {
        let report = OomReport::default();
        let failed = |pass, item| FromModel::Failed {
            pass,
            item,
            kind: FailureKind::Model,
            detail: String::new(),
            disk_full: false,
        };
        for message in [
            FromModel::Done { pass: 2, peak: None },
            FromModel::Pong { number: 1, reserved: None },
            FromModel::Ready { version: 1, weights: 0, accepts: Default::default(), revision: None },
            FromModel::Oom { pass: None, item: None, memory: report.clone() },
            FromModel::Oom { pass: Some(1), item: Some(2), memory: report },
            failed(Some(0), None),
            failed(Some(1), Some(9)),
            FromModel::Progress { pass: 1, item: 0, fraction: 1.5, note: String::new() },
            FromModel::Progress { pass: 1, item: 2, fraction: 0.5, note: String::new() },
        ] {
            assert!(read(&mut Transcript::new(1, 2), message.clone()).is_err(), "{message:?}");
        }
        let blobs = vec![Vec::new()];
        let frame = Frame { message: FromModel::Pong { number: 1, reserved: None }, blobs };
        assert!(read(&mut Transcript::new(1, 2), frame).is_err());
    }
}
