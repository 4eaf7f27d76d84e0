"""Takes back jobs whose callers have given up on them: docs/wire.md of the project, "Withdrawals"."""

import asyncio
import datetime
import hashlib
import json
import logging
import secrets

import aio_pika
from aiormq.exceptions import AMQPError

from ._session import CLOSE_S, LOST, in_own_task

EXCHANGE = "vramq.withdrawals"
# The header of a job with the digest of its secret.
DIGEST = "vramq-withdrawal"
# Withdrawn jobs whose end is awaited; of more, the oldest are not repeated any more.
WITHDRAWN_MAX = 4096
# How often a withdrawal is repeated until its job has ended, and for how long: a worker that joins misses one for no longer than
# that, and a job that the broker itself removed never ends.
REPEAT_S, REPEAT_FOR_S = 5, 3600
# How long workers remember a withdrawal.
REMEMBERED_S = 3600
# How long closing waits for the ends of withdrawn jobs. A worker that is not busy answers within milliseconds; the ends of jobs that
# wait in a queue are not to be waited for.
ENDS_S = 1

_LOG = logging.getLogger("vramq")


def new_secret():
    return secrets.token_hex(32)


def digest_of(secret):
    return hashlib.sha256(secret.encode()).hexdigest()


class Withdrawals:
    """The jobs that were withdrawn and have not ended, and the task that publishes their withdrawals."""

    def __init__(self, session):
        """`session` is a function that gives the client's session, or None while there is none."""
        self._session = session
        # By the job's id: the secret, and the time of the event loop from when on.
        self._open, self._unsent = {}, set()
        self._task = self._changed = self._published = self._channel = self._exchange = self._of = None
        # The session in which the broker did not take the last attempt, and the error that the log has last.
        self._refused = self._logged = None
        self._is_closing = self._is_stopped = False

    def add(self, job_id, secret):
        """Withdraws a job until `ended` names it."""
        if self._is_stopped:
            return
        if len(self._open) >= WITHDRAWN_MAX:
            self.ended(next(iter(self._open)))
        loop = asyncio.get_running_loop()
        self._open[job_id] = secret, loop.time()
        self._unsent.add(job_id)
        if self._task is None or self._task.done():
            self._changed, self._published = asyncio.Event(), asyncio.Event()
            self._task = loop.create_task(self._run())
        self._published.clear()
        self._changed.set()

    def ended(self, job_id):
        """The job has ended: its withdrawal is not repeated any more."""
        self._unsent.discard(job_id)
        if self._open.pop(job_id, None) is not None:
            self._changed.set()

    async def close(self):
        """Waits until all are published and have ended, for a short time, and ends the task. Raises asyncio.TimeoutError if the broker
        does not take them."""
        self._is_closing = True
        try:
            if self._task is not None:
                self._changed.set()
                try:
                    await in_own_task(self._published.wait(), CLOSE_S, until=[self._task])
                except asyncio.TimeoutError:
                    # The task ends first if the broker refuses them.
                    if not self._task.done():
                        raise
                await asyncio.wait({self._task}, timeout=ENDS_S)
        finally:
            await self.stop()

    async def stop(self):
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self):
        """Publishes new withdrawals at once, and repeats all until their jobs have ended.

        After a refusal new ones wait for the next repeat: the broker closes the channel each time.
        """
        loop = asyncio.get_running_loop()
        repeat_at = loop.time() + REPEAT_S
        while self._open:
            self._changed.clear()
            repeats = loop.time() >= repeat_at
            if repeats:
                repeat_at = loop.time() + REPEAT_S
                for job_id in [job_id for job_id, (_, since) in self._open.items() if loop.time() - since > REPEAT_FOR_S]:
                    self.ended(job_id)
            session = self._session()
            if session is not None and (repeats or self._is_closing or session is not self._refused):
                await self._publish(session, repeats)
                if self._is_closing and session is self._refused:
                    return
            try:
                await asyncio.wait_for(self._changed.wait(), max(0, repeat_at - loop.time()))
            except asyncio.TimeoutError:
                pass

    async def _publish(self, session, repeats):
        """Publishes those that were not published yet; as a repeat and on a new channel all."""
        try:
            if session is not self._of:
                # On a channel of its own, which the broker closes if it refuses: jobs go on.
                self._channel = await in_own_task(session.connections[-1].channel(publisher_confirms=True), CLOSE_S)
                # Not declared: workers do that, and publishers need no permission but to write to it.
                self._exchange = await self._channel.get_exchange(EXCHANGE, ensure=False)
                self._of, repeats = session, True
            due = [job_id for job_id in self._open if repeats or job_id in self._unsent]
            publishing = [self._exchange.publish(self._message(job_id), routing_key="", mandatory=False) for job_id in due]
            await in_own_task(_all(publishing), CLOSE_S)
        except asyncio.TimeoutError:
            return  # The broker takes nothing at the moment: tried again.
        except (AMQPError, *LOST) as error:
            self._of, self._refused = None, session
            # With the connection lost they are published on the next one.
            if not session.lost.done() and str(error) != self._logged:
                self._logged = str(error)
                _LOG.warning("the broker does not take withdrawals of jobs, trying again: these jobs may run although their callers have "
                             "given up. The exchange %s is missing, or the client's user may not write to it: %s", EXCHANGE, error)
            return
        self._refused = None
        self._unsent.difference_update(due)
        if not self._unsent:
            self._published.set()

    def _message(self, job_id):
        secret, _ = self._open[job_id]
        body = json.dumps({"job": job_id, "secret": secret}).encode()
        lasts = datetime.timedelta(seconds=REMEMBERED_S)
        return aio_pika.Message(body, type="withdraw", content_type="application/json", expiration=lasts)


async def _all(work):
    await asyncio.gather(*work)
