"""The asyncio client: publishes jobs, puts their replies together, reconnects.

    async with vramq.AsyncClient("amqp://guest:guest@localhost:5672/%2f") as client:
        result = await client.run("minilm", ["a text", "another"])
        vectors = result.numpy()
"""

import asyncio
import random
import time
import uuid

import aio_pika
from aiormq.exceptions import AMQPError, ChannelClosed, ChannelNotFoundEntity, DeliveryError
from aiormq.exceptions import PublishError as Returned

from . import _wire
from ._session import CLOSE_S, LOST, Connector, is_cancelled, user_of
from .errors import (
    ClientClosed, ConnectError, Disconnected, DuplicateId, Forgotten, InvalidJob, InvalidReply, JobFailed,
    JobTimeout, PublishRefused, PublishTimeout, QueueFull, ReplyQueueLost, Unroutable,
)

__all__ = ["AsyncClient", "AsyncJob"]

# Jobs published or about to be. Each costs its body until the confirm and its outputs until the last reply.
JOBS_IN_FLIGHT = 1024
# Longer than a worker works on one job (24 minutes by default) after a long wait in the queue.
TIMEOUT_S = 3600
# Waits between attempts to reconnect, doubled from the first to the last, each with up to half of it as jitter.
BACKOFF_S = (0.1, 5.0)
# Texts per job of `embed`: what a worker's slot is sized for by default.
EMBED_ITEMS = 32


class AsyncJob:
    """A job that the broker has. `await job` is `await job.result()`."""

    def __init__(self, client, pending):
        self._client, self._pending = client, pending
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
        JobTimeout, ReplyQueueLost, InvalidReply, Disconnected or ClientClosed when the job has ended without them.
        """
        # Shielded: a caller who stops waiting does not end the job for others.
        return await asyncio.wait_for(asyncio.shield(self._pending.future), timeout)

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

    def forget(self):
        """Stops waiting for the job: its replies are dropped. The job itself still runs."""
        self._pending.fail(Forgotten(f"job {self.id!r} was forgotten"))


class _Pending:
    def __init__(self, job_id, model, items, timeout, loop):
        self.id, self.model, self.assembly = job_id, model, _wire.Assembly(items)
        self.future, self.changed = loop.create_future(), asyncio.Event()
        self.confirmed, self.timeout, self.on_progress = False, timeout, None
        self.deadline = None if timeout is None else loop.time() + timeout
        self.timer = None if timeout is None else loop.call_later(timeout, self._expire)

    def _expire(self):
        self.fail(JobTimeout(self.timeout, self.assembly.done, self.assembly.items))

    def fail(self, error):
        if not self.future.done():
            self.future.set_exception(error)
            # Marks the error as seen: asyncio would log it if the caller never asks for the result.
            self.future.exception()

    def report(self, progress):
        """Calls the caller's function; what it raises must not end the consumer of replies, so asyncio logs it."""
        if progress is not None and self.on_progress is not None:
            asyncio.get_running_loop().call_soon(self.on_progress, progress.item, progress.fraction, progress.note)

    def left(self):
        return None if self.deadline is None else max(0.0, self.deadline - asyncio.get_running_loop().time())


class AsyncClient:
    """Publishes jobs to vramq workers and awaits their results. Use it from one event loop.

    `url` is as in `amqp://user:password@host:5672/vhost`, or `amqps://…`; `host:5672,host:5672` names several hosts of a
    cluster, tried in turn. `ca` is a PEM file with the certificates of a private authority; `ssl_context` replaces it
    where more is wanted, such as a client certificate.

    Times are in seconds. `timeout` is for a job from `submit` to its last reply, None for no limit. `reconnect_for` is how
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
        self._slots = asyncio.Semaphore(jobs_in_flight)
        self._jobs, self._session = {}, None
        self._opened = asyncio.Event()
        self._keeper, self._ended = None, None

    async def __aenter__(self):
        return await self.connect()

    async def __aexit__(self, *_):
        await self.close()

    async def connect(self):
        """Connects once; afterwards the client reconnects by itself. Raises ConnectError."""
        if self._keeper is None:
            session = await self._connector.open()
            self._keeper = asyncio.create_task(self._keep(session))
        return self

    async def close(self):
        """Deletes the reply queue and closes the connections. Jobs that are in flight fail with ClientClosed."""
        self._end(ClientClosed("the client was closed"))
        if self._keeper is None:
            return
        session = self._session
        if session is not None and not session.lost.done():
            try:
                await asyncio.wait_for(session.stop_replies(), CLOSE_S)
                await asyncio.wait_for(session.replies.queue_delete(self.reply_queue), CLOSE_S)
            except (*LOST, AMQPError, asyncio.TimeoutError):
                pass  # The queue expires by itself.
        # It closes the connections.
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)

    async def submit(self, model, inputs, *, params=None, id=None, timeout=..., priority=None, expiration=None,
                     batch_hint=None, traceparent=None, headers=None, on_progress=None):
        """Publishes a job with its replies to this client; returns an AsyncJob once the broker has confirmed it.

        An input is a str, bytes, `vramq.Uri` or `vramq.Json`. `on_progress(item, fraction, note)` is called while a model reports
        on an item; reports may be missing. A connection that is lost meanwhile is waited for, and the job is published
        again under the same id: then it may run twice, and its result is still returned once. Raises InvalidJob,
        DuplicateId, Unroutable, QueueFull, PublishRefused, PublishTimeout, Disconnected or ClientClosed.
        """
        inputs = list(inputs)
        if on_progress is not None:
            params = {**(params or {}), "progress": True}
        body = _wire.encode_job(model, inputs, params, self._encoding)
        job_id = _job_id(id)
        if job_id in self._jobs:
            raise DuplicateId(f"job id {job_id!r} is already in flight")
        await self._slots.acquire()
        try:
            if job_id in self._jobs:
                raise DuplicateId(f"job id {job_id!r} is already in flight")
            loop = asyncio.get_running_loop()
            pending = _Pending(job_id, model, len(inputs), self.timeout if timeout is ... else timeout, loop)
            pending.on_progress = on_progress
            self._jobs[job_id] = pending
        except BaseException:
            self._slots.release()
            raise
        pending.future.add_done_callback(lambda _: self._forget(pending))
        message = self._message(body, job_id, priority, expiration, batch_hint, traceparent, headers, self.reply_queue)
        try:
            await self._publish(message, model, pending)
        except BaseException:
            pending.future.cancel()
            raise
        return AsyncJob(self, pending)

    async def run(self, model, inputs, **options):
        """`submit`, and the Result."""
        return await (await self.submit(model, inputs, **options)).result()

    async def embed(self, model, texts, *, dtype="f32", job_items=EMBED_ITEMS, **options):
        """The embeddings of many texts as one NumPy array, a row for each text.

        Texts are split into jobs of `job_items`; the worker runs several jobs in one pass. If a job fails, the error is
        raised and the other jobs are forgotten.
        """
        texts = list(texts)
        if not texts:
            raise InvalidJob("no texts")
        params = {"dtype": dtype, "encoding": "base64", **options.pop("params", {})}
        chunks = [texts[at:at + job_items] for at in range(0, len(texts), job_items)]
        tasks = [asyncio.ensure_future(self.run(model, chunk, params=params, **options)) for chunk in chunks]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return _wire.stack([output for result in results for output in result.outputs])

    async def publish(self, model, inputs, *, params=None, id=None, reply_to=None, timeout=60.0, priority=None,
                      expiration=None, batch_hint=None, traceparent=None, headers=None):
        """Publishes a job whose replies go elsewhere: to `reply_to`, or to the model's own `vramq.replies.MODEL`.

        Returns the job's id once the broker has confirmed it. Raises as `submit`.
        """
        inputs = list(inputs)
        job_id = _job_id(id)
        body = _wire.encode_job(model, inputs, params, self._encoding)
        message = self._message(body, job_id, priority, expiration, batch_hint, traceparent, headers, reply_to)
        pending = _Pending(job_id, model, len(inputs), timeout, asyncio.get_running_loop())
        try:
            async with self._slots:
                await self._publish(message, model, pending)
        finally:
            pending.future.cancel()
            if pending.timer:
                pending.timer.cancel()
        return job_id

    # Publishing.

    def _message(self, body, job_id, priority, expiration, batch_hint, traceparent, headers, reply_to):
        headers = dict(headers or {})
        if batch_hint is not None:
            if batch_hint < 1:
                raise InvalidJob("batch_hint is at least 1")
            headers["batch-hint"] = int(batch_hint)
        if traceparent is not None:
            headers["traceparent"] = traceparent
        return aio_pika.Message(
            body, headers=headers, content_type=_wire.CONTENT_TYPES[self._encoding],
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT, message_id=job_id, correlation_id=job_id, reply_to=reply_to,
            priority=priority, expiration=expiration, timestamp=int(time.time()), user_id=self._user,
        )

    async def _publish(self, message, model, pending):
        while True:
            session = await self._session_within(pending)
            try:
                await asyncio.wait_for(session.jobs.publish(message, routing_key=model, mandatory=True), pending.left())
            except asyncio.TimeoutError:
                raise PublishTimeout(f"the broker did not confirm the job within {pending.timeout:g} s") from None
            except Returned:
                raise Unroutable(f"no queue for model {model!r}: is a worker for it configured?") from None
            except DeliveryError:
                raise QueueFull(f"the queue of model {model!r} is full; try again later") from None
            except ChannelClosed as error:
                if session.lost.done() and any(connection.is_closed for connection in session.connections):
                    continue
                session.lose("the broker closed the channel")
                if isinstance(error, ChannelNotFoundEntity):
                    text = f"no exchange {_wire.JOBS_EXCHANGE}: was a worker ever started on this virtual host?"
                    raise Unroutable(text) from None
                raise PublishRefused(f"the broker refuses jobs for exchange {_wire.JOBS_EXCHANGE}: {error}") from None
            except LOST as error:
                if isinstance(error, asyncio.CancelledError) and is_cancelled():
                    raise
                session.lose(f"publish: {error!r}")
                if pending.future.done():
                    return  # Answered although its confirm was lost, or failed by its time limit.
                continue
            pending.confirmed = True
            return

    async def _session_within(self, pending):
        while True:
            if self._ended is not None:
                raise self._ended
            if self._keeper is None:
                raise ClientClosed("the client is not connected: use `async with`, or `await client.connect()`")
            session = self._session
            if session is not None and not session.lost.done():
                return session
            self._opened.clear()
            try:
                await asyncio.wait_for(self._opened.wait(), pending.left())
            except asyncio.TimeoutError:
                raise PublishTimeout(f"no connection to the broker within {pending.timeout:g} s") from None

    # The connection.

    async def _keep(self, session):
        """Keeps a session until the client ends."""
        try:
            while True:
                self._session = session
                self._opened.set()
                await session.lost
                self._session = None
                await session.drop()
                session = await self._reopen()
                self.reconnects += 1
        except Exception as error:  # Whatever it is: nobody else would tell the callers that wait.
            self._end(Disconnected(f"the connection to the broker is lost: {error}"))
            self._opened.set()
        finally:
            await session.drop()

    async def _reopen(self):
        since, wait = time.monotonic(), BACKOFF_S[0]
        while True:
            try:
                return await self._connector.open()
            except ConnectError:
                if self.reconnect_for is not None and time.monotonic() - since + wait > self.reconnect_for:
                    raise
            await asyncio.sleep(wait * random.uniform(1, 1.5))
            wait = min(2 * wait, BACKOFF_S[1])

    def _lose_replies(self):
        for pending in list(self._jobs.values()):
            if pending.confirmed:
                text = "the reply queue was lost, and with it any reply; the job itself may have run"
                pending.fail(ReplyQueueLost(text))

    def _end(self, error):
        if self._ended is None:
            self._ended = error
        for pending in list(self._jobs.values()):
            pending.fail(error)

    # Replies.

    async def _take(self, message):
        """A reply from the queue: acknowledged after it was taken in; one that nobody awaits is dropped."""
        pending = self._jobs.get(message.correlation_id)
        if pending is None or pending.future.done():
            self.strays += 1
        else:
            self._take_for(pending, message)
        try:
            await message.ack()
        except (AMQPError, *LOST):
            pass  # The session is gone; the broker delivers it again, and its items are dropped as duplicates.

    def _take_for(self, pending, message):
        try:
            reply = _wire.decode_reply(message.type, message.content_type, message.headers or {}, message.body)
            if isinstance(reply, _wire.Failure):
                return pending.fail(JobFailed(reply.reason, reply.error, pending.assembly.outputs()))
            if not isinstance(reply, _wire.Part):
                return pending.report(reply)
            pending.assembly.add(reply)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return pending.fail(InvalidReply(f"the reply to job {pending.id!r} cannot be read: {error}"))
        pending.changed.set()
        if pending.assembly.is_complete:
            pending.future.set_result(_wire.Result(pending.id, pending.model, pending.assembly))

    def _forget(self, pending):
        if pending.timer:
            pending.timer.cancel()
        pending.changed.set()
        if self._jobs.pop(pending.id, None) is not None:
            self._slots.release()


def _job_id(job_id):
    job_id = str(uuid.uuid4()) if job_id is None else str(job_id)
    if not 0 < len(job_id.encode()) <= _wire.ID_BYTES_MAX:
        raise InvalidJob(f"a job id has 1 to {_wire.ID_BYTES_MAX} bytes")
    return job_id
