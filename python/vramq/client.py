"""The blocking client: the asyncio client on a thread of its own. Any number of threads may use it.

    with vramq.Client("amqp://guest:guest@localhost:5672/%2f") as client:
        vectors = client.embed("minilm", ["a text", "another"])
"""

import asyncio
import concurrent.futures
import contextlib
import os
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
        except ClientClosed:  # Which has withdrawn it.
            pass

    def forget(self):
        """Stops waiting for the job: its replies are dropped. The job itself still runs."""
        self._client._call_soon(self._job.forget)


class Client:
    """Publishes jobs to vramq workers and waits for their results. The options are those of `AsyncClient`.

    A process that forks (Celery, Gunicorn, multiprocessing) makes a client in each child: threads and connections do not
    survive a fork, so a client of the parent raises ClientClosed there.
    """

    def __init__(self, url, **options):
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # Whoever gives the loop something to do holds it, so that nothing is given to a loop that has stopped.
        self._giving, self._is_closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._loop.run_forever, name="vramq-client", daemon=True)
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

        `on_progress` is called on the client's thread: it must be quick, and must not use the client.
        """
        return Job(self, self._call(self._client.submit(model, inputs, **options)))

    def run(self, model, inputs, **options):
        """`submit`, and the Result."""
        return self._call(self._client.run(model, inputs, **options))

    def embed(self, model, texts, **options):
        """The embeddings of many texts as one NumPy array, as `AsyncClient.embed`."""
        return self._call(self._client.embed(model, texts, **options))

    def publish(self, model, inputs, **options):
        """Publishes a job whose replies go elsewhere, as `AsyncClient.publish`; returns its id."""
        return self._call(self._client.publish(model, inputs, **options))

    def close(self):
        """Withdraws the jobs that are in flight, which fail with ClientClosed, deletes the reply queue and closes the connections. It takes
        some seconds at most, as `AsyncClient.close`."""
        try:
            self._call(self._client.close())
        except ClientClosed:  # It was closed already, or is the parent's.
            return
        self._stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _call(self, work):
        try:
            with self._given():
                if threading.current_thread() is self._thread:
                    raise RuntimeError("the blocking client cannot be used from its own thread")
                future = asyncio.run_coroutine_threadsafe(_as_coroutine(work), self._loop)
        except BaseException:
            if asyncio.iscoroutine(work):
                work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # Another thread has closed the client meanwhile.
            raise ClientClosed("the client was closed") from None
        except BaseException:  # Of this thread, such as KeyboardInterrupt; or the result.
            future.cancel()
            raise

    def _call_soon(self, function):
        try:
            with self._given():
                self._loop.call_soon_threadsafe(function)
        except ClientClosed:
            pass

    @contextlib.contextmanager
    def _given(self):
        # In a child of a fork before the lock, which another thread of the parent may have held.
        if self._pid != os.getpid():
            raise ClientClosed("the client belongs to the process that this one was forked from")
        with self._giving:
            if self._is_closed:
                raise ClientClosed("the client was closed")
            yield

    def _stop(self):
        with self._giving:
            first, self._is_closed = not self._is_closed, True
        if first:
            # What was given before has begun by now, and ends here.
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if first:
            self._loop.close()


async def _as_coroutine(work):
    return await work


async def _cancel_others():
    """Ends what is left of the loop's tasks, so that none is destroyed while it waits."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_S)
