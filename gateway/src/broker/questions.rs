//! Questions of requests to the broker, and their order.

use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::timeout;
use vramq_amqp::Depth;

use super::dead_letters::Letters;

/// How long the broker may take to answer a question.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// The most waiting questions of each turn. Further requests wait for a place, at most for [`ANSWER_WITHIN`]; their number is bounded by
/// the connections.
pub(super) const QUESTIONS_MAX: usize = 256;

/// What a request wants to know.
#[derive(Debug)]
pub(super) enum Question {
    Depth {
        model: String,
        answer: oneshot::Sender<Depth>,
    },
    Queue {
        name: String,
        answer: oneshot::Sender<Depth>,
    },
    /// The permit is held while letters are read and put back, also if the caller leaves.
    DeadLetters {
        model: String,
        only_reader: OwnedSemaphorePermit,
        answer: oneshot::Sender<Result<Letters, String>>,
    },
}

/// When a question is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    First,
    /// Only when no other question waits. Requests can name any model, and counting the queues of unknown ones must delay nobody.
    Last,
}

/// Why the broker was not asked, or did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the broker does not answer")]
pub struct NoAnswer;

/// Asks questions.
#[derive(Debug)]
pub(super) struct Asker {
    first: mpsc::Sender<Question>,
    last: mpsc::Sender<Question>,
}

/// The questions that wait for their answers.
#[derive(Debug)]
pub(super) struct Questions {
    first: mpsc::Receiver<Question>,
    last: mpsc::Receiver<Question>,
}

pub(super) fn channel() -> (Asker, Questions) {
    let (to_first, first) = mpsc::channel(QUESTIONS_MAX);
    let (to_last, last) = mpsc::channel(QUESTIONS_MAX);
    (Asker { first: to_first, last: to_last }, Questions { first, last })
}

impl Question {
    /// Whether its caller has left: it hung up, or waited for [`ANSWER_WITHIN`].
    fn is_abandoned(&self) -> bool {
        match self {
            Self::Depth { answer, .. } | Self::Queue { answer, .. } => answer.is_closed(),
            Self::DeadLetters { answer, .. } => answer.is_closed(),
        }
    }
}

impl Asker {
    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// There is none in time.
    pub(super) async fn ask<T>(
        &self,
        turn: Turn,
        question: impl FnOnce(oneshot::Sender<T>) -> Question,
    ) -> Result<T, NoAnswer> {
        let questions = match turn {
            Turn::First => &self.first,
            Turn::Last => &self.last,
        };
        let (answer, answered) = oneshot::channel();
        let question = question(answer);
        let answer = async {
            questions.send(question).await.map_err(|_| NoAnswer)?;
            answered.await.map_err(|_| NoAnswer)
        };
        timeout(ANSWER_WITHIN, answer).await.unwrap_or(Err(NoAnswer))
    }
}

impl Questions {
    /// The next question whose caller still waits. Counting queues for callers that have left would only delay the others.
    ///
    /// Cancel safe: it drops nothing but questions of callers that have left.
    pub(super) async fn next(&mut self) -> Option<Question> {
        loop {
            let question = tokio::select! {
                biased;
                Some(question) = self.first.recv() => question,
                Some(question) = self.last.recv() => question,
                else => return None,
            };
            if !question.is_abandoned() {
                return Some(question);
            }
        }
    }

    /// Drops the waiting questions; their callers get an error.
    pub(super) fn clear(&mut self) {
        while self.first.try_recv().is_ok() || self.last.try_recv().is_ok() {}
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.first.len() + self.last.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn questions_of_callers_who_have_hung_up_are_dropped() {
        let (asker, mut questions) = channel();
        let depth = |model: &str| {
            let (answer, answered) = oneshot::channel();
            (Question::Depth { model: model.to_owned(), answer }, answered)
        };
        let (letters, of_letters) = oneshot::channel();
        let ((gone, of_gone), (waits, _waiting)) = (depth("gone"), depth("waits"));
        let only_reader = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let letters = Question::DeadLetters { model: "gone".to_owned(), only_reader, answer: letters };
        for question in [gone, letters] {
            asker.first.send(question).await.unwrap();
        }
        asker.last.send(waits).await.unwrap();
        drop((of_gone, of_letters));
        let next = questions.next().await;
        assert!(matches!(&next, Some(Question::Depth { model, .. }) if model == "waits"), "{next:?}");
        drop(asker);
        assert!(questions.next().await.is_none());
    }

    #[tokio::test]
    async fn questions_that_are_dropped_have_no_answer() {
        let (asker, mut questions) = channel();
        let asking = tokio::spawn(async move {
            let ask = |turn| asker.ask(turn, |answer| Question::Queue { name: String::new(), answer });
            tokio::join!(ask(Turn::First), ask(Turn::Last))
        });
        let both_asked = async {
            while questions.len() < 2 {
                tokio::task::yield_now().await;
            }
        };
        timeout(ANSWER_WITHIN, both_asked).await.expect("two questions");
        questions.clear();
        assert_eq!(asking.await.unwrap(), (Err(NoAnswer), Err(NoAnswer)));
    }
}
