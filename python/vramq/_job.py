"""A job in flight: what is known of it, who waits for it, and the slot that it has."""

import asyncio
import math
from collections import OrderedDict

from . import _wire
from .errors import Forgotten, JobTimeout, Withdrawn


class AsyncJob:
    """A job that the broker has. `await job` is `await job.result()`."""

    def __init__(self, pending):
        self._pending = pending
        self.id, self.model = pending.id, pending.model

    @property
    def done(self):
        return self._pending.future.done()

    @property
    def items_done(self):
        """How many items are answered."""
        return self._pending.assembly.done

    async def result(self, timeout=None):
        """The outputs, in the order of the inputs.

        With `timeout` (seconds) it raises TimeoutError when that has passed, and the job goes on. Raises JobFailed,
        JobTimeout, ReplyQueueLost, InvalidReply, Withdrawn, Forgotten, Disconnected or ClientClosed when the job has ended without
        them.
        """
        try:
            # Shielded: a caller who stops waiting does not end the job for others.
            return await asyncio.wait_for(asyncio.shield(self._pending.future), timeout)
        except JobTimeout:
            raise
        except asyncio.TimeoutError:
            # Before Python 3.11 asyncio has a class of its own.
            raise TimeoutError(f"job {self.id!r} has no result after {timeout:g} s") from None

    def __await__(self):
        return self.result().__await__()

    async def progress(self):
        """Yields (items answered, items) when parts have come, until the job has ended."""
        pending, seen = self._pending, 0
        while True:
            if pending.assembly.done > seen:
                seen = pending.assembly.done
                yield seen, pending.assembly.items
            elif pending.future.done():
                return
            else:
                pending.changed.clear()
                await pending.changed.wait()

    def withdraw(self):
        """Takes the job back, unless it has ended: workers start no further pass for it, and it leaves no dead letter."""
        self._pending.withdraw()
        self._pending.fail(Withdrawn(f"job {self.id!r} was withdrawn"))

    def forget(self):
        """Stops waiting for the job: its replies are dropped. The job itself still runs, and has its id until then."""
        self._pending.forget()


class Pending:
    """A job from the call that makes it until its last reply. `future` ends with the Result, or with why there is none."""

    def __init__(self, job_id, model, items, timeout, on_progress=None, key=None, withdrawals=None, secret=None):
        loop = asyncio.get_running_loop()
        # The routing key: the model's name, unless its workers have another.
        self.key = model if key is None else _wire.checked_name(key, "key")
        self.id, self.model, self.assembly = job_id, model, _wire.Assembly(items)
        # For messages.
        self.destination = f"model {model!r}" if self.key == model else f"model {model!r} with key {self.key!r}"
        self.future, self.changed = loop.create_future(), asyncio.Event()
        self.confirmed, self.timeout, self.on_progress = False, timeout, on_progress
        # Whether the broker may have it: from an earlier attempt to publish it, and from the present one.
        self._was_sent, self.may_have_sent = False, lambda: False
        # What withdraws it, None if this client does not; and whether its caller has given up on it.
        self.secret, self._withdrawals, self._is_withdrawn = secret, withdrawals, False
        # Whether its replies still come although nobody waits for them, and the time of the event loop until when.
        self.is_forgotten, self.ends_at = False, math.inf if timeout is None else loop.time() + timeout
        timer = None if timeout is None else loop.call_at(self.ends_at, self._expire)
        self.future.add_done_callback(lambda _: self._end(timer))

    def _expire(self):
        # Nobody waits for it any more.
        self.withdraw()
        self.fail(JobTimeout(self.timeout, self.assembly.done, self.assembly.items))

    def _end(self, timer):
        if timer is not None:
            timer.cancel()
        self.changed.set()

    def withdraw(self):
        """Takes the job back if it has not ended, as soon as the broker may have it. The caller ends it next."""
        if not self.future.done():
            self._is_withdrawn = True
            if self._was_sent or self.may_have_sent():
                self._publish_withdrawal()

    def has_sent(self):
        """The broker may have it from now on."""
        self._was_sent = True
        if self._is_withdrawn:
            self._publish_withdrawal()

    def _publish_withdrawal(self):
        if self.secret is not None:
            secret, self.secret = self.secret, None
            self._withdrawals.add(self.id, secret)

    def forget(self):
        self.is_forgotten = not self.future.done()
        self.fail(Forgotten(f"job {self.id!r} was forgotten"))

    def fail(self, error):
        if not self.future.done():
            self.future.set_exception(error)
            # Marks the error as seen: asyncio would log it if the caller never asks for the result.
            self.future.exception()

    def report(self, progress):
        """Calls the caller's function; what it raises must not end the consumer of replies, so asyncio logs it."""
        if progress is not None and self.on_progress is not None:
            asyncio.get_running_loop().call_soon(self.on_progress, progress.item, progress.fraction, progress.note)


class Slots:
    """Bounds the jobs in flight. Jobs get their slots in the order in which they ask."""

    def __init__(self, count):
        if count < 1:
            raise ValueError(f"jobs_in_flight is {count}, and has to be at least 1")
        self.count = count
        self._holders, self._waiting = set(), OrderedDict()

    async def take(self, pending):
        """Returns when the job has its slot, or has ended without one. A job that ends gives its slot back."""
        pending.future.add_done_callback(lambda _: self._give_back(pending))
        if len(self._holders) < self.count and not self._waiting:
            self._holders.add(pending)
            return
        turn = self._waiting[pending] = asyncio.get_running_loop().create_future()
        await asyncio.wait({turn, pending.future}, return_when=asyncio.FIRST_COMPLETED)

    def has(self, pending):
        return pending in self._holders

    def _give_back(self, pending):
        self._holders.discard(pending)
        self._waiting.pop(pending, None)
        while self._waiting and len(self._holders) < self.count:
            following, turn = self._waiting.popitem(last=False)
            if not following.future.done():
                self._holders.add(following)
                turn.set_result(None)
