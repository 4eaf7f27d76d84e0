"""The connections of a client to the broker: how they are opened, watched and closed."""

import asyncio
import logging
import re
import ssl
from itertools import count
from urllib.parse import unquote

import aio_pika
from aiormq.exceptions import AMQPConnectionError, AMQPError, ChannelNotFoundEntity, ConnectionClosed, ConnectionNotAllowed
from pamqp.commands import Connection as ConnectionFrames
from pamqp.exceptions import PAMQPException
from yarl import URL

from . import _wire
from ._channels import CHANNELS_MAX, JobChannels
from .errors import ConnectError

# They log each lost connection with a traceback, and Python would write that to standard error in programs without a logging of their own.
for _library in ("aiormq", "aio_pika"):
    logging.getLogger(_library).addHandler(logging.NullHandler())

# Unacknowledged replies: with 64 to 256 a consumer reaches the broker's full rate.
REPLY_PREFETCH = 128
# How long the broker may take for what closing asks of it. Then it is not asked for more, and the connections are dropped.
CLOSE_S = 3
# How long the connections to a broker that did not answer may take to close.
SILENT_S = 0.2
# In this time those who use a lost connection learn why from aiormq. Version 6 leaves some of them waiting for ever.
LOST_S = 1
# For so long half as many channels are opened, after the broker has refused one.
LIMITED_FOR_S = 600

# AMQP's codes for a login that is refused, and for a virtual host that does not exist or that this user may not use. With others a broker
# closes connections because it goes away, or because a part of it is down: 320 CONNECTION_FORCED, 541 INTERNAL_ERROR.
REFUSALS = (403, 530)

# Exceptions by which aio-pika and asyncio say that a connection is gone.
LOST = (AMQPConnectionError, ConnectionError, OSError, asyncio.IncompleteReadError, RuntimeError)


async def in_own_task(work, timeout=None, until=()):
    """What `work` returns or raises; it runs as a task of its own.

    So a cancellation of the caller is told from one that comes with a lost connection, which is a ConnectionAbortedError here.
    Raises asyncio.TimeoutError after `timeout`, or when one of the futures `until` is done first.
    """
    task = asyncio.ensure_future(work)
    # Whoever stops waiting does not ask for its error.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait({task, *until}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CLOSE_S if timeout is None else min(timeout, CLOSE_S))
        raise asyncio.TimeoutError
    if task.cancelled():
        raise ConnectionAbortedError("cancelled with its connection")
    return task.result()


class Session:
    """The connections to the broker. They are opened together, and dropped together when one of them is lost.

    Publishing and consuming have a connection each: a broker that is short of memory stops reading from connections that
    publish, and on a shared one it would not read the acknowledgements of the replies that fill its memory.
    """

    def __init__(self):
        self.connections = []
        self.jobs = self.replies = self.stop_replies = None
        # Why the first connection or channel was closed, if the broker said it.
        self.fault = None
        # Whether the broker has not answered in time.
        self.is_silent = False
        loop = asyncio.get_running_loop()
        # `gone` follows `lost` after LOST_S.
        self.lost, self.gone = loop.create_future(), loop.create_future()
        self.lost.add_done_callback(lambda _: loop.call_later(LOST_S, self.gone.set_result, None))

    def lose(self, why):
        if not self.lost.done():
            self.lost.set_result(why)

    def watch(self, thing, name):
        """Loses the session when a connection or channel is closed. Returns a function that ends this."""

        def closed(*args):
            self._closed(name, args[-1])

        thing.close_callbacks.add(closed)
        return lambda: thing.close_callbacks.discard(closed)

    def _closed(self, name, error):
        self.fault = self.fault or error
        self.lose(f"{name}: {error or 'closed'}")

    async def drop(self):
        self.lose("dropped")
        # In a task of its own: a job that is published alone may end, and its attempt be cancelled, just when this begins.
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self):
        seconds = SILENT_S if self.is_silent else CLOSE_S
        closing = (in_own_task(connection.close(), seconds) for connection in self.connections)
        # One that was lost already raises: there is nothing to close.
        await asyncio.gather(*closing, return_exceptions=True)
        if self.jobs is not None:
            self.jobs.end()


class Connector:
    """Opens sessions.

    `take` is called with each message of the reply queue; `missed` when the queue of an earlier session did not exist any
    more, and was created again.
    """

    def __init__(self, url, name, timeout, ca, ssl_context, reply_queue, expires_ms, take, missed):
        self._urls, self._broker = _addresses(url)
        self._name, self._timeout = name, timeout
        self._ssl_context = ssl_context or (ssl.create_default_context() if ca else None)
        if ca:
            self._ssl_context.load_verify_locations(cafile=ca)
        self._reply_queue, self._expires_ms, self._take, self._missed = reply_queue, expires_ms, take, missed
        self._had_queue = False
        # After the broker has refused a further channel: how many there may be, and until when, as the time of the event loop.
        self._channels_limit, self._limited_until = CHANNELS_MAX, 0
        # The queue was not there, and that is not told yet.
        self._is_missed = False

    async def open(self):
        """A session with the first host that takes one. Raises ConnectError."""
        return await self._open_by(self._open_both)

    async def open_alone(self):
        """A session that only publishes, for a job that must not share a connection with others. Raises ConnectError."""
        return await self._open_by(lambda url, session: self._open_jobs(url, session, "one job"))

    async def _open_by(self, steps):
        errors = []
        for url in self._urls:
            session = Session()
            try:
                await in_own_task(steps(url, session), self._timeout)
                return session
            except asyncio.CancelledError:
                await session.drop()
                raise
            except asyncio.TimeoutError:
                text = f"the broker at {self._broker} did not answer within {self._timeout:g} s"
                errors.append(ConnectError(text, True))
            except (AMQPError, PAMQPException, *LOST) as error:
                errors.append(_explain(self._broker, error))
            await session.drop()
        raise next((error for error in errors if error.retryable), errors[-1])

    async def _open_both(self, url, session):
        # In the order that leaves no gap: reply queue, prefetch, consumer, and only then publishing.
        replies = await self._connect(url, session, "replies")
        newly_missed = self._had_queue and not self._is_missed and not await self._has_queue(replies)
        channel = await replies.channel(publisher_confirms=False)
        session.watch(channel, "replies")
        await channel.set_qos(prefetch_count=REPLY_PREFETCH)
        # From here on also if this attempt fails: the next one may find the queue that this one creates.
        self._is_missed = self._is_missed or newly_missed
        try:
            queue = await channel.declare_queue(self._reply_queue, durable=True, arguments={"x-expires": self._expires_ms})
        except ChannelNotFoundEntity:
            # Nothing was created: the queue's node is down. The queue and the replies in it are there when it is back.
            self._is_missed = self._is_missed and not newly_missed
            raise
        if self._is_missed:
            self._is_missed = False
            self._missed()
        self._had_queue = True
        # A deleted queue ends the consumer and nothing else.
        _tell_of_cancel(
            await channel.get_underlay_channel(), lambda *_: session.lose("the broker cancelled the consumer of replies"))
        tag = await queue.consume(self._take)
        session.replies, session.stop_replies = channel, lambda: queue.cancel(tag)
        await self._open_jobs(url, session, "jobs")

    async def _open_jobs(self, url, session, name):
        connection = await self._connect(url, session, name)
        # If the broker refuses also the first one, nothing can be published.
        first = await _JobChannel.open(session, connection)
        is_limited = asyncio.get_running_loop().time() < self._limited_until
        channels_max = self._channels_limit if is_limited else CHANNELS_MAX
        session.jobs = JobChannels(first, lambda: _open_channel(session, connection), channels_max, session.lost, session.gone)
        session.lost.add_done_callback(lambda _: self._heed_limit(session))

    def _heed_limit(self, session):
        # The broker allows no further channel: for now half as many have to be enough. Others of this user may need some, too.
        if isinstance(session.fault, ConnectionNotAllowed) and session.jobs.count > 0:
            self._channels_limit = max(1, session.jobs.count // 2)
            self._limited_until = asyncio.get_running_loop().time() + LIMITED_FOR_S

    async def _connect(self, url, session, what):
        options = {"ssl_context": self._ssl_context} if self._ssl_context else {}
        # In the URL, because aio-pika 9 drops `client_properties` beside a URL.
        named = URL(url).update_query(name=f"{self._name} ({what})")
        connection = await aio_pika.connect(named, **options)
        session.connections.append(connection)
        session.watch(connection, what)
        return connection

    async def _has_queue(self, connection):
        # On a channel of its own: the broker closes it if there is no such queue.
        channel = await connection.channel(publisher_confirms=False)
        try:
            await channel.declare_queue(self._reply_queue, passive=True)
        except ChannelNotFoundEntity:
            return False
        await channel.close()
        return True


class _JobChannel:
    """A channel on which jobs are published."""

    def __init__(self, session, channel, numbers, exchange):
        self._session, self._channel, self._end_watch = session, channel, session.watch(channel, "jobs")
        # By id the numbers of the jobs that were sent and are not confirmed; None if aiormq does not say.
        self.numbers, self.exchange = numbers, exchange

    @classmethod
    async def open(cls, session, connection):
        channel = await connection.channel(_free_number(connection), publisher_confirms=True, on_return_raises=True)
        numbers = getattr(await channel.get_underlay_channel(), "message_id_delivery_tag", None)
        # Not declared, and not asked for: publishers need no permission but to write to it.
        exchange = await channel.get_exchange(_wire.JOBS_EXCHANGE, ensure=False)
        return cls(session, channel, numbers, exchange)

    async def close(self):
        """Closes it. Where that fails, the session is lost."""
        self._end_watch()
        try:
            await in_own_task(self._channel.close())
        except Exception as error:  # Whatever it is: it is not about the job that needs another channel.
            self._session.lose(f"close a channel: {error!r}")


async def _open_channel(session, connection):
    """A further channel for jobs; None if there is none, which loses the session."""
    try:
        return await in_own_task(_JobChannel.open(session, connection))
    except Exception as error:  # Whatever it is: nobody else would open the channel.
        if isinstance(error, ConnectionClosed):
            session.fault = session.fault or error
        session.lose(f"open a channel: {error!r}")
        return None


def _free_number(connection):
    """A number for a channel. aiormq itself takes the one above the highest. With channels that come and go, it would soon be too high for
    the broker. Odd numbers are not those that aiormq takes at the same time for the channel of withdrawals."""
    taken = connection.transport.connection.channels
    return next(number for number in count(1, 2) if number not in taken)


def _tell_of_cancel(channel, told):
    callbacks = getattr(channel, "on_consumer_cancel_callbacks", None)
    if callbacks is not None:
        callbacks.add(told)
    else:
        channel.consumers = _Consumers(told)


class _Consumers(dict):
    """The consumers of a channel of aiormq 6, which takes out the one that was cancelled, and tells nobody."""

    def __init__(self, told):
        super().__init__()
        self._told = told

    def pop(self, *args):
        self._told()
        return super().pop(*args)


def _addresses(url):
    """One URL for each host, and what may be shown of them: no credentials."""
    parts = re.fullmatch(r"(amqps?://)((?:[^@/]*@)?)([^/?]+)(.*)", url)
    if parts is None:
        raise ConnectError("the broker URL is not like amqp://user:password@host:5672/vhost", False)
    scheme, credentials, hosts, rest = parts.groups()
    return [f"{scheme}{credentials}{host}{rest}" for host in hosts.split(",")], hosts


def user_of(url):
    """The user that the URL names, None without one."""
    parts = re.fullmatch(r"amqps?://([^:@/]+)(?::[^@/]*)?@.*", url)
    return parts and unquote(parts.group(1))


def _explain(broker, error):
    if isinstance(error, ssl.SSLError):
        return ConnectError(f"TLS with the broker at {broker} fails: {error}", False)
    closing = _closing_frame(error)
    words = closing.reply_text if closing else _first(error)
    if _is_refusal(error, closing):
        return ConnectError(f"the broker at {broker} refuses: {words}", False)
    return ConnectError(f"cannot reach the broker at {broker}: {words}", True)


def _is_refusal(error, closing):
    if closing is not None:
        return closing.reply_code in REFUSALS
    if isinstance(error, ConnectionClosed):
        # Those with a class of their own have no code.
        return isinstance(error, ConnectionNotAllowed) or (bool(error.args) and error.args[0] in REFUSALS)
    # A reply queue cannot be declared while its node is down.
    if not isinstance(error, (AMQPError, PAMQPException)) or isinstance(error, ChannelNotFoundEntity):
        return False
    return type(error) is not AMQPConnectionError and not isinstance(error.__cause__, (OSError, EOFError))


def _closing_frame(error):
    """With what the broker closed the connection instead of opening it, as for a virtual host that does not exist.

    aiormq and pamqp only say that they expected another frame. The frame that came is a variable where the error was raised.
    """
    at = error.__traceback__
    while at is not None:
        for value in at.tb_frame.f_locals.values():
            if isinstance(value, ConnectionFrames.Close):
                return value
        at = at.tb_next
    return None


def _first(error):
    return next((arg for arg in error.args if arg and isinstance(arg, str)), str(error) or type(error).__name__)
