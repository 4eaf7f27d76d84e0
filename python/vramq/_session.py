"""The connections of a client to the broker: how they are opened, watched and closed."""

import asyncio
import re
import ssl
from urllib.parse import unquote

import aio_pika
from aiormq.exceptions import AMQPConnectionError, AMQPError, ChannelClosed

from . import _wire
from .errors import ConnectError

# Unacknowledged replies: with 64 to 256 a consumer reaches the broker's full rate.
REPLY_PREFETCH = 128
# How long closing may take before the connections are dropped.
CLOSE_S = 3

# Exceptions by which aio-pika and asyncio say that a connection is gone.
LOST = (AMQPConnectionError, ConnectionError, OSError, asyncio.IncompleteReadError, RuntimeError, asyncio.CancelledError)


def is_cancelled():
    """Whether the current task was cancelled, rather than a future of a lost connection."""
    cancelling = getattr(asyncio.current_task(), "cancelling", None)
    return cancelling is None or cancelling() > 0


class Session:
    """The connections to the broker. They are opened together, and dropped together when one of them is lost.

    Publishing and consuming have a connection each: a broker that is short of memory stops reading from connections that
    publish, and on a shared one it would not read the acknowledgements of the replies that fill its memory.
    """

    def __init__(self):
        self.connections = []
        self.jobs = self.replies = self.stop_replies = None
        self.lost = asyncio.get_running_loop().create_future()

    def lose(self, why):
        if not self.lost.done():
            self.lost.set_result(why)

    def watch(self, thing, name):
        thing.close_callbacks.add(lambda *args: self.lose(f"{name}: {args[-1] or 'closed'}"))

    async def drop(self):
        self.lose("dropped")
        for connection in self.connections:
            try:
                await asyncio.wait_for(connection.close(), CLOSE_S)
            except Exception:  # It was lost already: there is nothing to close.
                pass


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

    async def open(self):
        """A session with the first host that takes one. Raises ConnectError."""
        session, errors = Session(), []
        for url in self._urls:
            try:
                await asyncio.wait_for(self._open_at(url, session), self._timeout)
                return session
            except asyncio.TimeoutError:
                text = f"the broker at {self._broker} did not answer within {self._timeout:g} s"
                errors.append(ConnectError(text, True))
            except (AMQPError, *LOST) as error:
                if isinstance(error, asyncio.CancelledError) and is_cancelled():
                    await session.drop()
                    raise
                errors.append(_explain(self._broker, error))
            await session.drop()
            session = Session()
        raise next((error for error in errors if error.retryable), errors[-1])

    async def _open_at(self, url, session):
        # In the order that leaves no gap: reply queue, prefetch, consumer, and only then publishing.
        for what in ("replies", "jobs"):
            options = {"ssl_context": self._ssl_context} if self._ssl_context else {}
            properties = {"connection_name": f"{self._name} ({what})"}
            session.connections.append(await aio_pika.connect(url, client_properties=properties, **options))
            session.watch(session.connections[-1], what)
        replies, jobs = session.connections
        missed = self._had_queue and not await self._has_queue(replies)
        channel = await replies.channel(publisher_confirms=False)
        session.watch(channel, "replies")
        await channel.set_qos(prefetch_count=REPLY_PREFETCH)
        queue = await channel.declare_queue(self._reply_queue, durable=True, arguments={"x-expires": self._expires_ms})
        if missed:
            self._missed()
        self._had_queue = True
        # A deleted queue ends the consumer and nothing else.
        cancelled = getattr(await channel.get_underlay_channel(), "on_consumer_cancel_callbacks", None)
        if cancelled is not None:
            cancelled.add(lambda *_: session.lose("the broker cancelled the consumer of replies"))
        tag = await queue.consume(self._take)
        session.replies, session.stop_replies = channel, lambda: queue.cancel(tag)
        publishing = await jobs.channel(publisher_confirms=True, on_return_raises=True)
        session.watch(publishing, "jobs")
        # Not declared, and not asked for: publishers need no permission but to write to it.
        session.jobs = await publishing.get_exchange(_wire.JOBS_EXCHANGE, ensure=False)

    async def _has_queue(self, connection):
        # On a channel of its own: the broker closes it if there is no such queue.
        channel = await connection.channel(publisher_confirms=False)
        try:
            await channel.declare_queue(self._reply_queue, passive=True)
        except ChannelClosed:
            return False
        await channel.close()
        return True


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
    if isinstance(error, AMQPError) and not _is_transport(error):
        return ConnectError(f"the broker at {broker} refuses: {_first(error)}", False)
    return ConnectError(f"cannot reach the broker at {broker}: {_first(error)}", True)


def _is_transport(error):
    return type(error) is AMQPConnectionError or isinstance(error.__cause__, (OSError, EOFError))


def _first(error):
    return next((arg for arg in error.args if arg and isinstance(arg, str)), str(error) or type(error).__name__)
