"""The blocking client: the asyncio client on a thread of its own. Any number of threads may use it.

    with vramq.Client("amqp://guest:guest@localhost:5672/%2f") as client:
        vectors = client.embed("minilm", ["a text", "another"])
"""

import asyncio
import functools
import os
import queue
import sys
import threading

from ._session import CLOSE_S
from .aio import AsyncClient
from .errors import ClientClosed

__all__ = ["Client", "Job"]


class Job:
    """A job that the broker has."""

    def __init__(self, client, job):
        self._client, self._job = client, job
        self.id, self.model = job.id, job.model

    @property
    def done(self):
        return self._job.done

    @property
    def items_done(self):
        """How many items are answered."""
        return self._job.items_done

    def result(self, timeout=None):
        """The outputs, in the order of the inputs. Raises as `AsyncJob.result`."""
        # Without the client: it may have been closed since.
        ended = self._job._pending.future
        return ended.result() if ended.done() else self._client._call(self._job.result(timeout))

    def progress(self):
        """Yields (items answered, items) when parts have come, until the job has ended."""
        steps = self._job.progress()
        while True:
            try:
                yield self._client._call(steps.__anext__())
            except StopAsyncIteration:
                return

    def withdraw(self):
        """Takes the job back, unless it has ended: workers start no further pass for it, and it leaves no dead letter."""

        async def withdraw():
            self._job.withdraw()

        try:
            self._client._call(withdraw())
        except ClientClosed:  # Which has withdrawn it, unless the interpreter ends.
            pass

    def forget(self):
        """Stops waiting for the job: its replies are dropped. The job itself still runs."""
        self._client._call_soon(self._job.forget)


class Client:
    """Publishes jobs to vramq workers and waits for their results. The options are those of `AsyncClient`.

    A process that forks (Celery, Gunicorn, multiprocessing) makes a client in each child: threads and connections do not
    survive a fork, so a client of the parent raises ClientClosed there. So does one that is used while the interpreter ends, as by a
    destructor: its thread runs no more. Until then, also in functions that `atexit` calls, it can be closed.
    """

    def __init__(self, url, **options):
        if sys.is_finalizing():
            # Before Python 3.12 a new thread would be waited for, and never run.
            raise ClientClosed("the interpreter ends, and runs no thread for a client")
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # The calls whose ends are awaited; and whether the loop has stopped. There is no lock: a signal handler may use the client while
        # the same thread is anywhere in it.
        self._calls, self._is_closed = set(), False
        self._thread = threading.Thread(target=self._run_loop, name="vramq-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._call(self._make(url, options))
        except BaseException:
            self._stop()
            raise

    @staticmethod
    async def _make(url, options):
        return await AsyncClient(url, **options).connect()

    @property
    def reply_queue(self):
        return self._client.reply_queue

    @property
    def reconnects(self):
        """How often the connection was lost and opened again."""
        return self._client.reconnects

    def submit(self, model, inputs, **options):
        """Publishes a job; returns a Job once the broker has confirmed it. Options and errors as `AsyncClient.submit`.

        `on_progress` is called on the client's thread: it must be quick, and must not use the client. What it raises is logged.
        """
        return Job(self, self._call(self._client.submit(model, inputs, **_surviving(options))))

    def run(self, model, inputs, **options):
        """`submit`, and the Result."""
        return self._call(self._client.run(model, inputs, **_surviving(options)))

    def embed(self, model, texts, **options):
        """The embeddings of many texts as one NumPy array, as `AsyncClient.embed`."""
        return self._call(self._client.embed(model, texts, **_surviving(options)))

    def publish(self, model, inputs, **options):
        """Publishes a job whose replies go elsewhere, as `AsyncClient.publish`; returns its id."""
        return self._call(self._client.publish(model, inputs, **options))

    def close(self):
        """Withdraws the jobs that are in flight, which fail with ClientClosed, deletes the reply queue and closes the connections. It takes
        some seconds at most, as `AsyncClient.close`."""
        try:
            self._call(self._client.close())
        except ClientClosed:  # It was closed already, or is the parent's, or the interpreter ends.
            return
        self._stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _call(self, work):
        call = _Call(work)
        self._calls.add(call)
        try:
            if self._pid != os.getpid():
                raise ClientClosed("the client belongs to the process that this one was forked from")
            if sys.is_finalizing():
                # Python has stopped the thread, wherever it was: nobody would answer.
                raise ClientClosed("the client has ended with the interpreter")
            if threading.current_thread() is self._thread:
                raise RuntimeError("the blocking client cannot be used from its own thread")
            if self._is_closed or not self._give(call.begin):
                raise ClientClosed("the client was closed")
            return call.result()
        except BaseException:  # Of this thread, such as KeyboardInterrupt; or the result.
            if self._is_closed or self._pid != os.getpid() or sys.is_finalizing() or not self._give(call.cancel):
                call.cancel()
            raise
        finally:
            self._calls.discard(call)

    def _call_soon(self, function):
        if self._pid == os.getpid():
            self._give(function)

    def _give(self, function):
        """Has the loop call this, unless it has been closed."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            return False
        return True

    def _run_loop(self):
        """The thread. Whatever ends the loop, nobody waits for it from then on."""
        try:
            self._loop.run_forever()
        finally:
            self._is_closed = True
            try:
                self._loop.run_until_complete(_cancel_others())
            finally:
                self._loop.close()
                for call in list(self._calls):
                    call.ended.put(None)

    def _stop(self):
        self._give(self._loop.stop)
        self._thread.join()


class _Call:
    """Something that the loop does for a thread that waits."""

    def __init__(self, work):
        self._work, self._task = work, None
        # The task when it is done, None if there is none. Unlike a future it may be waited for, and filled, while a signal handler has
        # interrupted its owner anywhere.
        self.ended = queue.SimpleQueue()

    def begin(self):
        self._task = asyncio.ensure_future(_as_coroutine(self._work))
        self._task.add_done_callback(self.ended.put)

    def cancel(self):
        if self._task is not None:
            self._task.cancel()
        elif asyncio.iscoroutine(self._work):
            self._work.close()

    def result(self):
        task = self.ended.get()
        if task is None or task.cancelled():  # Another thread has closed the client meanwhile.
            raise ClientClosed("the client was closed")
        return task.result()


def _surviving(options):
    """The options, with an `on_progress` that cannot end the client's thread."""
    on_progress = options.get("on_progress")
    if not callable(on_progress):
        return options

    @functools.wraps(on_progress, updated=())
    def report(*progress):
        try:
            on_progress(*progress)
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio would end the loop with these; it logs all others.
            raise RuntimeError(f"on_progress raised {error!r}") from error

    return {**options, "on_progress": report}


async def _as_coroutine(work):
    return await work


async def _cancel_others():
    """Ends what is left of the loop's tasks, so that none is destroyed while it waits."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_S)
