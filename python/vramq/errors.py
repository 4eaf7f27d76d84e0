"""The errors of the clients. `retryable` says whether the same call can succeed later, unchanged; after Disconnected with a new client."""

from typing import Any, List

__all__ = [
    "ClientClosed", "ConnectError", "Disconnected", "DownloadError", "DuplicateId", "Forgotten", "InvalidJob", "InvalidReply",
    "JobError", "JobFailed", "JobTimeout", "NoEmbedding", "PublishError", "PublishRefused", "PublishTimeout", "QueueFull", "ReplyQueueLost",
    "Unroutable", "VramqError", "Withdrawn",
]


class VramqError(Exception):
    """The base of all errors of the clients."""

    retryable: bool = False

    def __reduce__(self):
        # A pool of processes sends an error to the process that waits for it. By default that calls the class with the text alone,
        # which fails for a class with more arguments, and the pool waits for ever or breaks.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind, args, state):
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConnectError(VramqError):
    """No connection to the broker. The text never holds the URL's credentials."""

    def __init__(self, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class ClientClosed(VramqError):
    """The client was closed."""


class PublishError(VramqError):
    """The job is not in its queue, or that is unknown (`PublishTimeout`)."""


class InvalidJob(PublishError, ValueError):
    """The job cannot be published as it is: no inputs, too many, too large, or an input of an unknown type."""


class DuplicateId(PublishError):
    """A job with this id is in flight already, or was forgotten and has not been answered."""


class Unroutable(PublishError):
    """No queue is bound for the model: no worker for it was ever started on this virtual host."""

    retryable = True


class QueueFull(PublishError):
    """The model's queue is at its length limit and rejects jobs."""

    retryable = True


class PublishRefused(PublishError):
    """The broker closed the channel over this job: no permission, no exchange, or a wrong `user_id`."""


class PublishTimeout(PublishError):
    """The broker did not confirm the job in time. The job may be in the queue anyway; one that `submit` sent is withdrawn."""

    retryable = True


class Disconnected(VramqError):
    """The connection was lost for longer than `reconnect_for`. The client has ended, and each further call of it raises this at once.

    If it is `retryable`, a new client may succeed. It is not if the broker refused the last attempt to reconnect.
    """

    def __init__(self, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class JobError(VramqError):
    """A published job has no complete result."""


class JobFailed(JobError):
    """A worker gave the job up.

    `reason` is the word of the wire contract ("out-of-memory", "invalid-input", …), `error` the text for people.
    `outputs` has one entry for every input: those that were answered before, and None.
    """

    def __init__(self, reason: str, error: str, outputs=()) -> None:
        super().__init__(f"{reason}: {error}")
        self.reason, self.error = reason, error
        self.outputs: List[Any] = list(outputs)


class JobTimeout(JobError, TimeoutError):
    """No complete reply in time. The client withdraws the job: workers start no further pass for it."""

    def __init__(self, seconds: float, items_done: int, items: int) -> None:
        super().__init__(f"no complete reply within {seconds:g} s: {items_done} of {items} items are answered")
        self.seconds, self.items_done, self.items = seconds, items_done, items


class ReplyQueueLost(JobError):
    """The reply queue was deleted or expired, and replies with it. The job may have run. The client withdraws it, so that it mostly does
    not run twice if it is submitted again."""


class Withdrawn(JobError):
    """The caller took the job back with `withdraw`."""


class Forgotten(JobError):
    """The caller stopped waiting for the job with `forget`."""


class InvalidReply(JobError):
    """A message in the reply queue names this job and is no reply of the contract."""


class NoEmbedding(VramqError, TypeError):
    """The outputs of `embed` or `Result.numpy()` are not all embeddings: the model makes something else."""


class DownloadError(VramqError):
    """What a reference stands for was not had, or is something else.

    `reason` is a word: "invalid-reference", or one of the wire contract's: "reference-denied", "reference-missing",
    "reference-mismatch", "too-large", "store-unavailable". After the last the same call can succeed later.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.retryable = reason, reason == "store-unavailable"
