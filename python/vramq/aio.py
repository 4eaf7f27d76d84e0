"""The asyncio client: publishes jobs, puts their replies together, reconnects.

    async with vramq.AsyncClient("amqp://guest:guest@localhost:5672/%2f") as client:
        result = await client.run("minilm", ["a text", "another"])
        vectors = result.numpy()
"""

import asyncio
import inspect
import random
import time
import uuid
from collections.abc import Mapping

from aiormq.exceptions import AMQPError

from . import _wire
from ._job import AsyncJob, Pending, Slots
from ._message import checked_id, checked_timeout, job_message
from ._publish import Publisher
from ._session import CLOSE_S, LOST, Connector, in_own_task, user_of
from ._withdraw import DIGEST, Withdrawals, digest_of, new_secret
from .errors import (
    ClientClosed, ConnectError, Disconnected, DuplicateId, InvalidJob, InvalidReply, JobFailed, JobTimeout,
    PublishTimeout, ReplyQueueLost, VramqError,
)

__all__ = ["AsyncClient", "AsyncJob"]

# Jobs published or about to be. Each costs its body until the confirm and its outputs until the last reply.
JOBS_IN_FLIGHT = 1024
# Forgotten jobs whose ids are kept until their last replies; of more, the oldest are dropped.
FORGOTTEN_MAX = 4096
# Longer than a worker works on one job (24 minutes by default) after a long wait in the queue.
TIMEOUT_S = 3600
# Waits before attempts to reconnect, doubled from the first to the last, each with up to half of it as jitter. A connection that
# lasted for longer than the last starts with the first again.
BACKOFF_S = (0.1, 5.0)
# Texts per job of `embed`: what a worker's slot is sized for by default.
EMBED_ITEMS = 32


class AsyncClient:
    """Publishes jobs to vramq workers and awaits their results. Use it from one event loop.

    `url` is as in `amqp://user:password@host:5672/vhost`, or `amqps://…`; `host:5672,host:5672` names several hosts of a
    cluster, tried in turn. `ca` is a PEM file with the certificates of a private authority; `ssl_context` replaces it
    where more is wanted, such as a client certificate.

    Times are in seconds. `timeout` is for a job from `submit` to its last reply, None for no limit; a job whose time is up is
    withdrawn, as is one whose caller is cancelled, so that workers compute no result that nobody waits for. `reconnect_for` is how
    long a lost connection is tried before everything in flight fails; None: for ever. `reply_queue_expires` is how long
    the broker keeps the replies while this client is away.

    `encoding` is "json", or "msgpack", in which bytes and vectors travel as they are (the extra `vramq[msgpack]`).

    Jobs name the URL's user as `user_id`, and workers share passes between users. `anonymous=True` leaves it out: the broker
    refuses it where it knows the connection by another name, as with OAuth 2.
    """

    def __init__(self, url, *, timeout=TIMEOUT_S, jobs_in_flight=JOBS_IN_FLIGHT, connect_timeout=10.0, reconnect_for=None,
                 reply_queue_expires=600.0, ca=None, ssl_context=None, name=None, encoding="json", anonymous=False):
        self.timeout, self.reconnect_for = timeout, reconnect_for
        self._encoding = _wire.check_encoding(encoding)
        self._user = None if anonymous else user_of(url)
        self.reply_queue = f"vramq.replies.client.{uuid.uuid4()}"
        self.reconnects = self.strays = 0
        self._connector = Connector(
            url, name or f"vramq-python {uuid.uuid4().hex[:8]}", connect_timeout, ca, ssl_context,
            self.reply_queue, int(reply_queue_expires * 1000), self._take, self._lose_replies,
        )
        self._slots = Slots(jobs_in_flight)
        # All that have not ended; and by id those whose replies come here.
        self._pending, self._jobs = set(), {}
        # By id until when replies to forgotten jobs may come.
        self._forgotten = {}
        self._session = self._opened = self._publisher = None
        self._withdrawals = Withdrawals(lambda: self._session)
        self._keeper = self._ended = self._closing = None

    async def __aenter__(self):
        return await self.connect()

    async def __aexit__(self, *_):
        await self.close()

    async def connect(self):
        """Connects once; afterwards the client reconnects by itself. Raises ConnectError."""
        if self._ended is not None:
            raise self._ended
        if self._keeper is None:
            session = await self._connector.open()
            if self._keeper is not None or self._ended is not None:  # Somebody else was faster.
                await session.drop()
                return await self.connect()
            self._publisher = Publisher(self._session_for, self._connector.open_alone)
            self._opened = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.ensure_future(self._keep(session))
        return self

    async def close(self):
        """Withdraws the jobs that are in flight, which fail with ClientClosed, deletes the reply queue and closes the connections.

        It takes a second if workers do not say at once what became of the withdrawn jobs, and some three seconds if the broker does not
        answer. Without a connection no job is withdrawn.
        """
        if self._ended is None:
            for pending in self._pending:
                pending.withdraw()
        self._end(ClientClosed("the client was closed"))
        if self._keeper is None:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        # Whoever closes it as well, or stops waiting, does not disturb it.
        await asyncio.shield(self._closing)

    async def _close(self):
        session = self._session
        if session is not None and not session.lost.done():
            try:
                # Before the queue is gone: a withdrawal may come too late, and a reply without a queue is a dead letter.
                await self._withdrawals.close()
                await in_own_task(self._leave_replies(session), CLOSE_S)
            except asyncio.TimeoutError:  # First, because it may be an OSError.
                session.is_silent = True
            except (*LOST, AMQPError):
                pass  # The queue expires by itself.
        # It closes the connections.
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)

    async def _leave_replies(self, session):
        await session.stop_replies()
        await session.replies.queue_delete(self.reply_queue)

    async def submit(self, model, inputs, *, params=None, id=None, timeout=..., priority=None, expiration=None,
                     batch_hint=None, traceparent=None, app_id=None, headers=None, on_progress=None, key=None):
        """Publishes a job with its replies to this client; returns an AsyncJob once the broker has confirmed it.

        An input is a str, bytes, `vramq.Uri` or `vramq.Json`. `id` is a str of at most 255 bytes, an int or a `uuid.UUID`; a random one
        by default. `key` is the routing key of the job where the model's workers set
        one; by default it is the model's name. `app_id` names the application that publishes the job, as replies and dead
        letters repeat it. `on_progress(item, fraction, note)`, a plain function, is called while a model reports
        on an item; reports may be missing. A connection that is lost meanwhile is waited for, and the job is published
        again under the same id: then it may run twice, and its result is still returned once. Raises InvalidJob,
        DuplicateId, Unroutable, QueueFull, PublishRefused, PublishTimeout, Disconnected or ClientClosed.
        """
        inputs = _wire.input_list(inputs)
        job_id = checked_id(id)
        params = _wire.checked_params(params)
        timeout = checked_timeout(self.timeout if timeout is ... else timeout)
        if on_progress is not None:
            if not callable(on_progress):
                raise InvalidJob(f"on_progress is {on_progress!r}, and has to be a function")
            if _is_async(on_progress):
                raise TypeError(f"on_progress is {on_progress!r}, and has to be a plain function: nobody would await it")
            params = {**params, "progress": True}
        # A caller that names a digest has a secret of its own, and withdraws the job by itself.
        secret = None if isinstance(headers, Mapping) and DIGEST in headers else new_secret()
        message = self._message(model, inputs, params, job_id, self.reply_queue, priority=priority, expiration=expiration,
                                batch_hint=batch_hint, traceparent=traceparent, app_id=app_id, headers=headers,
                                digest=secret and digest_of(secret))
        self._check_is_new(job_id)
        pending = Pending(job_id, model, len(inputs), timeout, on_progress, key, self._withdrawals, secret)
        self._jobs[job_id] = pending
        pending.future.add_done_callback(lambda _: self._leave(pending))
        await self._publish(message, pending)
        return AsyncJob(pending)

    async def run(self, model, inputs, **options):
        """`submit`, and the Result. If the caller is cancelled, the job is withdrawn."""
        job = await self.submit(model, inputs, **options)
        try:
            return await job.result()
        finally:
            job.withdraw()

    async def embed(self, model, texts, *, dtype="f32", job_items=EMBED_ITEMS, **options):
        """The embeddings of many texts as one NumPy array, a row for each text.

        Texts are split into jobs of `job_items`; the worker runs several jobs in one pass. If a job fails, the error is
        raised and the other jobs are withdrawn.
        """
        texts = _wire.input_list(texts)
        if not texts:
            raise InvalidJob("no texts")
        if job_items < 1:
            raise ValueError(f"job_items is {job_items}, and has to be at least 1")
        # Before the jobs are run, not after.
        _wire.numpy_or_why()
        params = {"dtype": dtype, "encoding": "base64", **_wire.checked_params(options.pop("params", None))}
        chunks = [texts[at:at + job_items] for at in range(0, len(texts), job_items)]
        # A job whose turn has not come is not made yet: its time limit would run while the others have the slots.
        room = asyncio.Semaphore(self._slots.count)

        async def run(chunk):
            async with room:
                return await self.run(model, chunk, params=params, **options)

        tasks = [asyncio.ensure_future(run(chunk)) for chunk in chunks]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return _wire.stack([output for result in results for output in result.outputs])

    async def publish(self, model, inputs, *, params=None, id=None, reply_to=None, timeout=60.0, priority=None,
                      expiration=None, batch_hint=None, traceparent=None, app_id=None, headers=None, key=None):
        """Publishes a job whose replies go elsewhere: to `reply_to`, or to the model's own `vramq.replies.MODEL`.

        Returns the job's id once the broker has confirmed it. Raises as `submit`.
        """
        inputs = _wire.input_list(inputs)
        job_id = checked_id(id)
        message = self._message(model, inputs, _wire.checked_params(params), job_id, reply_to, priority=priority,
                                expiration=expiration, batch_hint=batch_hint, traceparent=traceparent, app_id=app_id, headers=headers)
        pending = Pending(job_id, model, len(inputs), checked_timeout(timeout), key=key)
        try:
            await self._publish(message, pending)
        finally:
            pending.future.cancel()
        return job_id

    def _check_is_new(self, job_id):
        # One that has ended may still be there, until the event loop has told everybody.
        earlier, now = self._jobs.get(job_id), asyncio.get_running_loop().time()
        if earlier is not None and not earlier.future.done():
            raise DuplicateId(f"job id {job_id!r} is already in flight")
        if self._forgotten.get(job_id, 0) > now or (earlier is not None and earlier.is_forgotten):
            raise DuplicateId(f"job id {job_id!r} is that of a job that was forgotten and has not been answered")

    def _leave(self, pending):
        """The job has ended here; a later one may have its id already."""
        if self._jobs.get(pending.id) is pending:
            del self._jobs[pending.id]
        if pending.is_forgotten:
            if len(self._forgotten) >= FORGOTTEN_MAX:
                del self._forgotten[next(iter(self._forgotten))]
            self._forgotten[pending.id] = pending.ends_at

    # Publishing.

    def _message(self, model, inputs, params, job_id, reply_to, **options):
        body = _wire.encode_job(model, inputs, params, self._encoding)
        return job_message(body, _wire.CONTENT_TYPES[self._encoding], job_id, reply_to, self._user, **options)

    async def _publish(self, message, pending):
        """Returns once the broker has the job. However else this ends, the job has ended, too."""
        self._pending.add(pending)
        pending.future.add_done_callback(lambda _: self._pending.discard(pending))
        try:
            if self._ended is not None:
                raise self._ended
            if self._keeper is None:
                raise ClientClosed("the client is not connected: use `async with`, or `await client.connect()`")
            await self._slots.take(pending)
            if not self._slots.has(pending) and isinstance(pending.future.exception(), JobTimeout):
                text = f"{self._slots.count} jobs are in flight, and this one had no slot within {pending.timeout:g} s"
                raise PublishTimeout(text)
            await self._publisher.publish(message, pending)
        except BaseException as error:
            # Who is cancelled does not want the job any more; one that the broker refuses is not there.
            if not isinstance(error, VramqError):
                pending.withdraw()
            pending.future.cancel()
            raise

    async def _session_for(self, pending):
        """The session, once there is one; None if the job ends first."""
        while not pending.future.done():
            if self._session is not None and not self._session.lost.done():
                return self._session
            await asyncio.wait({self._opened, pending.future}, return_when=asyncio.FIRST_COMPLETED)
        return None

    # The connection.

    async def _keep(self, session):
        """Keeps a session until the client ends."""
        wait, loop = BACKOFF_S[0], asyncio.get_running_loop()
        try:
            while True:
                self._session, opened_at = session, loop.time()
                self._opened.set_result(None)
                await session.lost
                if self._ended is not None:  # Closing has cancelled the consumer, and cancels this.
                    await loop.create_future()
                self._session, self._opened = None, loop.create_future()
                await session.drop()
                if loop.time() - opened_at > BACKOFF_S[1]:
                    wait = BACKOFF_S[0]
                session, wait = await self._reopen(wait)
                self.reconnects += 1
        except Exception as error:  # Whatever it is: nobody else would tell the callers that wait.
            is_refused = isinstance(error, ConnectError) and not error.retryable
            self._end(Disconnected(f"the connection to the broker is lost: {error}", not is_refused))
        finally:
            self._end(ClientClosed("the client's event loop has ended"))
            await self._withdrawals.stop()
            await session.drop()

    async def _reopen(self, wait):
        """A new session, and how long to wait before the one after it."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(wait * random.uniform(1, 1.5))
            wait = min(2 * wait, BACKOFF_S[1])
            try:
                return await self._connector.open(), wait
            except ConnectError:
                if self.reconnect_for is not None and time.monotonic() - since + wait > self.reconnect_for:
                    raise

    def _lose_replies(self):
        for pending in list(self._jobs.values()):
            if pending.confirmed:
                text = "the reply queue was lost, and with it any reply; the job itself may have run"
                pending.withdraw()
                pending.fail(ReplyQueueLost(text))

    def _end(self, error):
        if self._ended is None:
            self._ended = error
        for pending in list(self._pending):
            pending.fail(self._ended)

    # Replies.

    async def _take(self, message):
        """A reply from the queue: acknowledged after it was taken in; one that nobody awaits is dropped."""
        pending = self._jobs.get(message.correlation_id)
        if pending is None or pending.future.done():
            self._drop(message)
        else:
            self._take_for(pending, message)
        try:
            await message.ack()
        except (AMQPError, *LOST):
            pass  # The session is gone; the broker delivers it again, and its items are dropped as duplicates.

    def _drop(self, message):
        self.strays += 1
        if message.type in ("done", "failed"):
            self._forgotten.pop(message.correlation_id, None)
            self._withdrawals.ended(message.correlation_id)

    def _take_for(self, pending, message):
        try:
            reply = _wire.decode_reply(message.type, message.content_type, message.headers or {}, message.body)
            if isinstance(reply, _wire.Failure) and reply.reason == "withdrawn" and pending.secret is not None:
                # The end of an earlier job with this id: its caller gave up on it, and has submitted it again.
                return self._drop(message)
            if isinstance(reply, _wire.Failure):
                return pending.fail(JobFailed(reply.reason, reply.error, pending.assembly.outputs()))
            if not isinstance(reply, _wire.Part):
                return pending.report(reply)
            pending.assembly.add(reply)
        # Whatever it is: a message that is not acknowledged would come again, and its job would never end.
        except Exception as error:
            return pending.fail(InvalidReply(f"the reply to job {pending.id!r} cannot be read: {error}"))
        pending.changed.set()
        if pending.assembly.is_complete:
            pending.future.set_result(_wire.Result(pending.id, pending.model, pending.assembly))


def _is_async(function):
    function = inspect.unwrap(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
