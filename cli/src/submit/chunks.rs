//! Groups the items of the input into jobs, on a thread that reads ahead.

use tokio::sync::mpsc;
use vramq_schemas::BODY_BYTES_MAX;

use super::input::{InputError, Item};

/// A job is closed when its texts reach this many bytes, whatever their number.
const JOB_BYTES: usize = BODY_BYTES_MAX / 16;

/// Jobs read ahead of those in flight.
const READ_AHEAD: usize = 8;

/// The items of one job, and where in the input they stand.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) first: usize,
    pub(super) items: Vec<Item>,
}

/// The items of all jobs, in order.
#[derive(Debug)]
pub(super) struct Chunks(mpsc::Receiver<Result<Option<Chunk>, InputError>>);

impl Chunks {
    /// Reads the items on a thread of its own, at most a few jobs ahead of the receiver; a fault ends the input.
    pub(super) fn of(
        items: impl Iterator<Item = Result<Item, InputError>> + Send + 'static,
        job_items: usize,
    ) -> Self {
        let (sender, receiver) = mpsc::channel(READ_AHEAD);
        // A thread of its own, because a read from a terminal may never return.
        std::thread::spawn(move || {
            let mut chunk = Chunk { first: 0, items: Vec::new() };
            let mut bytes = 0;
            for item in items {
                let fault = match item {
                    Ok(item) => {
                        bytes += item.text().len();
                        chunk.items.push(item);
                        None
                    }
                    Err(fault) => Some(fault),
                };
                if chunk.items.len() == job_items || bytes >= JOB_BYTES || fault.is_some() {
                    bytes = 0;
                    let next = Chunk {
                        first: chunk.first + chunk.items.len(),
                        items: Vec::with_capacity(job_items.min(1024)),
                    };
                    let full = std::mem::replace(&mut chunk, next);
                    if !full.items.is_empty() && sender.blocking_send(Ok(Some(full))).is_err() {
                        return;
                    }
                }
                if let Some(fault) = fault {
                    // An `Err`: the command is ending.
                    let _ = sender.blocking_send(Err(fault));
                    return;
                }
            }
            if !chunk.items.is_empty() && sender.blocking_send(Ok(Some(chunk))).is_err() {
                return;
            }
            let _ = sender.blocking_send(Ok(None));
        });
        Self(receiver)
    }

    /// The next chunk; `None` at the end of the input. Not to be called again after that, or after an error.
    ///
    /// Cancel safety: no chunk is lost.
    ///
    /// # Errors
    /// The input cannot be read, or the thread that reads it has panicked.
    pub(super) async fn next(&mut self) -> Result<Option<Chunk>, InputError> {
        // The thread says that the input has ended. One that panics does not.
        self.0.recv().await.unwrap_or(Err(InputError::EndedEarly))
    }
}

#[cfg(test)]
mod tests {
    use vramq_schemas::Input;

    use super::*;
    use crate::exit;

    fn items(texts: Vec<String>) -> impl Iterator<Item = Result<Item, InputError>> + Send + 'static {
        texts.into_iter().map(|text| Ok(Item { input: Input::Text(text), id: None }))
    }

    /// The first item and the number of items of each chunk, and how the input ends.
    async fn read(mut chunks: Chunks) -> (Vec<(usize, usize)>, Result<(), InputError>) {
        let mut seen = Vec::new();
        loop {
            match chunks.next().await {
                Ok(Some(chunk)) => seen.push((chunk.first, chunk.items.len())),
                Ok(None) => return (seen, Ok(())),
                Err(fault) => return (seen, Err(fault)),
            }
        }
    }

    #[tokio::test]
    async fn chunks_by_number_and_by_bytes() {
        let big = "x".repeat(JOB_BYTES);
        let mut texts = vec!["a".to_owned(); 5];
        texts.extend([big.clone(), big, "b".to_owned()]);
        let (seen, end) = read(Chunks::of(items(texts), 3)).await;
        assert_eq!(seen, [(0, 3), (3, 3), (6, 1), (7, 1)]);
        end.unwrap();
    }

    #[tokio::test]
    async fn a_thread_that_panics_is_no_end_of_the_input() {
        let texts = ["a", "b", "c"].map(str::to_owned).to_vec();
        let panics = std::iter::from_fn(|| panic!("as by a fault of this program"));
        let (seen, end) = read(Chunks::of(items(texts).chain(panics), 2)).await;
        assert_eq!(seen, [(0, 2)]);
        let fault = end.unwrap_err();
        assert!(matches!(fault, InputError::EndedEarly), "{fault}");
        assert_eq!(fault.code(), exit::FAILED);
    }
}
