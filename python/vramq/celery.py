"""Call sites of Celery, on vramq: `.delay()`, `.apply_async()` and `AsyncResult`. docs/celery.md of the project has an example.

    from vramq.celery import App

    app = App("amqp://guest:guest@localhost:5672/%2f")
    embed = app.task("minilm")                  # the model's name, instead of a function
    result = embed.delay(["a text", "another"])
    vectors = result.get(timeout=60)

Celery itself is not needed, and nothing here talks to a Celery worker.
"""

import datetime
import os
import sys
import threading
import weakref
from collections import OrderedDict

from .client import Client
from .errors import ClientClosed, VramqError, Withdrawn

__all__ = ["App", "AsyncResult", "Task"]

# Results that `AsyncResult(id)` finds although the caller kept only their ids: as many as jobs are in flight by default. Each costs its
# outputs until it is asked for.
RESULTS_MAX = 1024

# Options of Celery's `get` about how it waits. They change nothing here.
_WAITING = {"interval", "no_ack", "follow_parents", "disable_sync_subtasks"}

_NO_WORKFLOWS = "chains, groups and chords stay with Celery, whose tasks may call this one"
_NO_SETTINGS = "what concerns callers are options of App(…), and of app.task; workers have a configuration of their own"
_NO_DISCOVERY = "a task is the name of a model: app.task(MODEL), or app.send_task(MODEL, …)"
_NO_CONTROL = "take a task back with its result's `revoke`; operators have `vramq status`, `vramq control` and `vramq dlq`"
# What an app, a task or a result of Celery has and this one has not, with what to do instead.
_ABSENT = {
    **dict.fromkeys(("s", "si", "signature", "subtask", "map", "starmap", "chunks"), _NO_WORKFLOWS),
    **dict.fromkeys(("then", "children", "parent", "graph", "collect"), _NO_WORKFLOWS),
    **dict.fromkeys(("run", "apply"), "the model runs on a worker: call the task, or use `delay`"),
    "retry": "workers retry what can be tried again",
    **dict.fromkeys(("conf", "config_from_object", "config_from_envvar", "config_from_cmdline", "add_defaults"), _NO_SETTINGS),
    **dict.fromkeys(("tasks", "autodiscover_tasks", "register_task"), _NO_DISCOVERY),
    **dict.fromkeys(("control", "events"), _NO_CONTROL),
    **dict.fromkeys(("add_periodic_task", "on_after_configure", "on_after_finalize"), "beat stays with Celery, whose tasks may call this one"),
    **dict.fromkeys(("worker_main", "Worker", "start"), "the worker is a program of its own, `vramq-worker run`"),
    "backend": "replies come to the process that published the task; to read them elsewhere, publish with `client.publish(reply_to=…)`",
}


class _Celery:
    """Names what is missing, so that a call site that cannot stay says why."""

    def __getattr__(self, name):
        kind = f"vramq.celery.{type(self).__name__}"
        if name in _ABSENT:
            raise AttributeError(f"{kind} has no {name}: {_ABSENT[name]} (docs/celery.md)")
        raise AttributeError(f"{kind} has no {name}")


class App(_Celery):
    """Where tasks are published. Connects at the first call, once in each process, so that it survives a fork.

    Options are those of `vramq.Client`. After `Disconnected`, call `close`: the next task connects anew.
    """

    def __init__(self, url, **options):
        self._url, self._options = url, options
        self._begin()
        if hasattr(os, "register_at_fork"):
            app = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: app() and app()._begin())

    def _begin(self):
        """As a process begins: in the child of a fork with nothing of the parent's, whose other threads may have held the locks."""
        # A signal handler may publish while its thread holds a lock.
        self._client, self._lock, self._results = None, threading.RLock(), _Results()

    @property
    def client(self):
        """The client, for features that Celery does not have."""
        if sys.is_finalizing():
            # A thread that Python has stopped may hold the lock, and never give it back.
            raise ClientClosed("the interpreter ends, and runs no thread for a client")
        with self._lock:
            if self._client is None:
                made = Client(self._url, **self._options)
                if self._client is None:
                    self._client = made
                else:  # A signal handler was faster.
                    made.close()
            return self._client

    def task(self, model, *, inputs=None, result=None, params=None, **options):
        """A task that is run by the workers of `model`.

        `inputs` makes the list of inputs out of the call's arguments, `result` the return value out of the `vramq.Result`.
        Without them a task takes one argument, a list of inputs or a single input, and returns a list of plain values or a
        single one. `params` go to the model; `options` are those of `Client.submit` (timeout, priority, expiration, …).
        """
        if not isinstance(model, str):
            raise TypeError(f"app.task takes the name of a model, not {model!r}: it is not a decorator, because the task's code is on a worker")
        return Task(self, model, inputs, result, params, options)

    def send_task(self, name, args=None, kwargs=None, **options):
        """`task(name).apply_async(args, kwargs, …)`."""
        return self.task(name).apply_async(args, kwargs, **options)

    def AsyncResult(self, task_id):  # noqa: N802  (Celery's name)
        """The result of a task that this process published: one that the caller still holds, or one of the last 1,024 that `get` and
        `forget` have not taken. Replies come to the process that asked."""
        result = self._results.find(task_id)
        if result is None:
            raise LookupError(
                f"task {task_id} was not published by this process, or its result was taken or dropped. Replies come to the "
                "process that published the job; to read them elsewhere, publish with `client.publish(reply_to=…)`"
            )
        return result

    def close(self):
        if sys.is_finalizing():  # As in `client`. The connections end with the process.
            return
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                client.close()


class _Results:
    """The results of this process by id: all that somebody holds, and the last of those that nobody has taken yet."""

    def __init__(self):
        self._lock, self._known, self._untaken = threading.RLock(), weakref.WeakValueDictionary(), OrderedDict()

    def add(self, result):
        with self._lock:
            self._known[result.id] = self._untaken[result.id] = result
            if len(self._untaken) > RESULTS_MAX:
                self._untaken.popitem(last=False)

    def find(self, task_id):
        return self._known.get(task_id)

    def take(self, result):
        """From here on whoever asked for it holds it."""
        with self._lock:
            if self._untaken.get(result.id) is result:
                del self._untaken[result.id]


def _in_utc(expires):
    """A datetime without a zone is one of UTC, as Celery has it by default."""
    if isinstance(expires, datetime.datetime) and expires.tzinfo is None:
        return expires.replace(tzinfo=datetime.timezone.utc)
    return expires


class Task(_Celery):
    """A model that is called like a Celery task."""

    # Options of apply_async that have a counterpart.
    _OPTIONS = {"task_id": "id", "priority": "priority", "expires": "expiration", "headers": "headers"}

    def __init__(self, app, model, inputs, result, params, options):
        self.app, self.name = app, model
        self._inputs, self._result, self._params, self._options = inputs, result, params, options

    def delay(self, *args, **kwargs):
        """Publishes the task; returns an AsyncResult once the broker has confirmed it."""
        return self.apply_async(args, kwargs)

    def apply_async(self, args=None, kwargs=None, task_id=None, **options):
        """As `delay`, with `task_id`, `priority`, `expires` (seconds, a timedelta or a datetime) and `headers`. Other options of Celery raise TypeError, unless they
        are None."""
        given = {name: value for name, value in {**options, "task_id": task_id}.items() if value is not None}
        unknown = sorted(set(given) - set(self._OPTIONS))
        if unknown:
            raise TypeError(f"apply_async({', '.join(f'{name}=…' for name in unknown)}) has no counterpart in vramq: see docs/celery.md")
        if not isinstance(args, (list, tuple, type(None))):
            raise TypeError(f"apply_async takes the arguments as a list or a tuple, not as a {type(args).__name__}")
        inputs, single = self._pack(args or (), kwargs or {})
        if "expires" in given:
            given["expires"] = _in_utc(given["expires"])
        renamed = {self._OPTIONS[name]: value for name, value in given.items()}
        job = self.app.client.submit(self.name, inputs, params=self._params, **{**self._options, **renamed})
        result = AsyncResult._of(job, self._result or (_first if single else _plain), self.app._results.take)
        self.app._results.add(result)
        return result

    def AsyncResult(self, task_id):  # noqa: N802  (Celery's name)
        """As `App.AsyncResult`. Ids belong to the app: it also finds the results of the app's other tasks, as Celery does."""
        return self.app.AsyncResult(task_id)

    def __call__(self, *args, **kwargs):
        """Publishes the task and waits for its result."""
        return self.delay(*args, **kwargs).get()

    def _pack(self, args, kwargs):
        if self._inputs is not None:
            return self._inputs(*args, **kwargs), False
        if kwargs or len(args) != 1:
            raise TypeError(f"task {self.name!r} takes one argument; give `inputs=` to app.task for others")
        single = not isinstance(args[0], (list, tuple))
        return ([args[0]] if single else list(args[0])), single

    def __repr__(self):
        return f"<vramq.celery.Task {self.name}>"


class AsyncResult(_Celery):
    """The result of a task, as Celery has it."""

    def __init__(self, id, *_, **__):
        raise TypeError(
            f"vramq.celery.AsyncResult({id!r}) does not know the app that published the task: use app.AsyncResult({id!r}), in the process "
            "that published it (docs/celery.md)"
        )

    @classmethod
    def _of(cls, job, convert, take):
        self = cls.__new__(cls)
        self._job, self._convert, self._take = job, convert, take
        self.id = self.task_id = job.id
        return self

    def get(self, timeout=None, propagate=True, **options):
        """The return value. Raises TimeoutError after `timeout` seconds, and the task goes on.

        If the task has failed it raises why (`vramq.JobFailed` and others), or returns that with `propagate=False`. Celery's options
        about how to wait (`interval`, …) change nothing. Its callbacks raise TypeError, because nothing would call them.
        """
        unknown = sorted(name for name, value in options.items() if name not in _WAITING and value is not None)
        if unknown:
            raise TypeError(f"get({', '.join(f'{name}=…' for name in unknown)}) has no counterpart in vramq: see docs/celery.md")
        value = self._value(timeout, propagate)
        self._take(self)
        return value

    def _value(self, timeout, propagate):
        try:
            return self._convert(self._job.result(timeout))
        except VramqError as error:
            if propagate:
                self._take(self)
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
        """PENDING, SUCCESS, FAILURE or REVOKED."""
        if not self._job.done:
            return "PENDING"
        try:
            self._job.result()
        except Withdrawn:
            return "REVOKED"
        except VramqError:
            return "FAILURE"
        return "SUCCESS"

    status = state

    @property
    def result(self):
        """The return value, or the exception; None while the task has not ended."""
        return self._value(None, False) if self._job.done else None

    info = result

    def revoke(self, connection=None, terminate=False, signal=None, wait=False, timeout=None):
        """Takes the task back, unless it has ended. Workers start no further pass of it, and ask a program that runs it to stop, so that
        `terminate` makes no difference, nor does any other option. `get` raises `vramq.Withdrawn` from then on."""
        self._job.withdraw()

    def forget(self):
        """Drops the result. The task itself still runs."""
        self._take(self)
        self._job.forget()

    def __repr__(self):
        return f"<vramq.celery.AsyncResult {self.id}>"


def _plain(result):
    return result.plain()


def _first(result):
    return result.plain()[0]
