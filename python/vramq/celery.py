"""Call sites of Celery, on vramq: `.delay()`, `.apply_async()` and `AsyncResult`. docs/celery.md of the project has an example.

    from vramq.celery import App

    app = App("amqp://guest:guest@localhost:5672/%2f")
    embed = app.task("minilm")                  # the model's name, instead of a function
    result = embed.delay(["a text", "another"])
    vectors = result.get(timeout=60)

Celery itself is not needed, and nothing here talks to a Celery worker.
"""

import os
import threading
import weakref

from .client import Client
from .errors import VramqError

__all__ = ["App", "AsyncResult", "Task"]


class App:
    """Where tasks are published. Connects at the first call, once in each process, so that it survives a fork.

    Options are those of `vramq.Client`.
    """

    def __init__(self, url, **options):
        self._url, self._options = url, options
        self._client, self._pid, self._lock = None, None, threading.Lock()
        self._results = weakref.WeakValueDictionary()

    @property
    def client(self):
        """The client, for features that Celery does not have."""
        with self._lock:
            if self._client is None or self._pid != os.getpid():
                self._client, self._pid = Client(self._url, **self._options), os.getpid()
            return self._client

    def task(self, model, *, inputs=None, result=None, params=None, **options):
        """A task that is run by the workers of `model`.

        `inputs` makes the list of inputs out of the call's arguments, `result` the return value out of the `vramq.Result`.
        Without them a task takes one argument, a list of inputs or a single input, and returns a list of plain values or a
        single one. `params` go to the model; `options` are those of `Client.submit` (timeout, priority, expiration, …).
        """
        return Task(self, model, inputs, result, params, options)

    def AsyncResult(self, task_id):  # noqa: N802  (Celery's name)
        """The result of a task that this process published and still holds. Replies come to the process that asked."""
        try:
            return self._results[task_id]
        except KeyError:
            raise LookupError(
                f"task {task_id} was not published by this process, or its result was dropped. Replies come to the "
                "process that published the job; to read them elsewhere, publish with `client.publish(reply_to=…)`"
            ) from None

    def close(self):
        with self._lock:
            if self._client is not None and self._pid == os.getpid():
                self._client.close()
            self._client = None


class Task:
    """A model that is called like a Celery task."""

    # Options of apply_async that have a counterpart.
    _OPTIONS = {"task_id": "id", "priority": "priority", "expires": "expiration", "headers": "headers"}

    def __init__(self, app, model, inputs, result, params, options):
        self.app, self.name = app, model
        self._inputs, self._result, self._params, self._options = inputs, result, params, options

    def delay(self, *args, **kwargs):
        """Publishes the task; returns an AsyncResult once the broker has confirmed it."""
        return self.apply_async(args, kwargs)

    def apply_async(self, args=(), kwargs=None, **options):
        """As `delay`, with `task_id`, `priority`, `expires` (seconds) and `headers`. Other options of Celery raise TypeError."""
        unknown = sorted(set(options) - set(self._OPTIONS))
        if unknown:
            raise TypeError(f"apply_async({', '.join(unknown)}=…) has no counterpart in vramq: see docs/celery.md")
        inputs, single = self._pack(args, kwargs or {})
        renamed = {self._OPTIONS[name]: value for name, value in options.items() if value is not None}
        job = self.app.client.submit(self.name, inputs, params=self._params, **{**self._options, **renamed})
        result = AsyncResult(job, self._result or (_first if single else _plain))
        self.app._results[result.id] = result
        return result

    def __call__(self, *args, **kwargs):
        """Publishes the task and waits for its result."""
        return self.delay(*args, **kwargs).get()

    def _pack(self, args, kwargs):
        if self._inputs is not None:
            return list(self._inputs(*args, **kwargs)), False
        if kwargs or len(args) != 1:
            raise TypeError(f"task {self.name!r} takes one argument; give `inputs=` to app.task for others")
        single = not isinstance(args[0], (list, tuple))
        return ([args[0]] if single else list(args[0])), single

    def __repr__(self):
        return f"<vramq.celery.Task {self.name}>"


class AsyncResult:
    """The result of a task, as Celery has it."""

    def __init__(self, job, result):
        self._job, self._convert = job, result
        self.id = self.task_id = job.id

    def get(self, timeout=None, propagate=True, **_):
        """The return value. Raises TimeoutError after `timeout` seconds, and the task goes on.

        If the task has failed it raises why (`vramq.JobFailed` and others), or returns that with `propagate=False`.
        """
        try:
            return self._convert(self._job.result(timeout))
        except VramqError as error:
            if propagate:
                raise
            return error

    wait = get

    def ready(self):
        """Whether the task has ended, one way or the other."""
        return self._job.done

    def successful(self):
        return self.state == "SUCCESS"

    def failed(self):
        return self.state == "FAILURE"

    @property
    def state(self):
        """PENDING, SUCCESS or FAILURE."""
        if not self._job.done:
            return "PENDING"
        try:
            self._job.result()
        except VramqError:
            return "FAILURE"
        return "SUCCESS"

    status = state

    @property
    def result(self):
        """The return value, or the exception; None while the task has not ended."""
        return self.get(propagate=False) if self._job.done else None

    def forget(self):
        """Drops the result. The task itself still runs."""
        self._job.forget()

    def __repr__(self):
        return f"<vramq.celery.AsyncResult {self.id}>"


def _plain(result):
    return result.plain()


def _first(result):
    return result.plain()[0]
