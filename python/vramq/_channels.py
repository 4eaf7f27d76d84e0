"""The channels of a session on which jobs are published, one for each routing key."""

import asyncio
from collections import OrderedDict

# Before RabbitMQ publishes the first message of a channel to a quorum queue, it registers the channel with the queue. If the queue has
# lost its majority, RabbitMQ waits for that up to 65 s, and reads nothing else from the channel. So on one channel for all models, a queue
# without its majority would hold up the jobs of every other model.

# Jobs of a channel that wait for their confirms. A queue that confirms nothing blocks a channel that goes on publishing. After 200 to 400
# further messages on that channel RabbitMQ reads nothing from the whole connection. With fewer than 200 this never happens.
UNCONFIRMED_MAX = 150
# More than most clients have models. A broker allows 2,047 channels on a connection by default.
CHANNELS_MAX = 64


class NotSent(Exception):
    """The session was lost before the job was sent."""


class Attempt:
    """An attempt to publish a job. It ends when one of the futures `until` is done: a job that was not sent by then is never sent."""

    def __init__(self, message, key, until):
        self.key, self.until, self._message = key, until, message
        # The channel that the job was given to; and whether the broker has confirmed it.
        self._given_to, self._is_confirmed = None, False

    async def give_to(self, channel):
        if any(future.done() for future in self.until):
            raise asyncio.TimeoutError
        self._given_to = channel
        await channel.exchange.publish(self._message, routing_key=self.key, mandatory=True)
        self._is_confirmed = True

    def may_have_sent(self):
        """Whether the broker may have the job. aiormq sends one after the other, gives each a number then, and forgets it when an answer
        comes: a caller may give up between the confirm and the end of the attempt."""
        if self._given_to is None:
            return False
        numbers = self._given_to.numbers
        return self._is_confirmed or numbers is None or self._message.message_id in numbers


class JobChannels:
    """Publishes jobs, each on the channel of its key.

    A job has its turn on the channel until the broker has confirmed it, even if its caller has given up: it is unconfirmed until then.
    """

    def __init__(self, first, open_channel, channels_max, lost, gone):
        """`first` is the channel of the first key. `open_channel` opens another one, or returns None if that has lost the session. `lost`
        and `gone` are those of the session."""
        self._first, self._open_channel, self._channels_max, self._lost, self._gone = first, open_channel, channels_max, lost, gone
        # The key that was used longest ago is the first.
        self._by_key = OrderedDict()
        # Channels are opened one after the other, in the order in which their keys got their first jobs.
        self._opening = asyncio.Lock()
        # A future while a key waits for the channel of another one. Meanwhile no open channel takes a further job, whatever its key, so that
        # one of them is free soon. `_make_room`, which waits for it, also sets it to None again.
        self._freed = None
        # The tasks of jobs that were sent and whose callers have given up.
        self._abandoned = set()
        gone.add_done_callback(lambda _: self.end())

    @property
    def count(self):
        """How many channels are open."""
        return sum(channel.opened is not None for channel in self._by_key.values())

    async def publish(self, attempt):
        """Returns once the broker has confirmed the job. Raises as `Exchange.publish` of aio-pika, NotSent, and asyncio.TimeoutError when
        the attempt ends first. A job that was not sent when the caller is cancelled is never sent, either."""
        task = asyncio.ensure_future(self._publish(attempt))
        # Whoever gives up does not ask for its error.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({task, *attempt.until}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_late = not task.done()
            if is_late:
                self._give_up(task, attempt)
        if is_late:
            raise asyncio.TimeoutError
        if task.cancelled():
            raise ConnectionAbortedError("cancelled with its connection")
        return task.result()

    def end(self):
        """Ends what waits for the broker although no caller does: aiormq 6 leaves some of it waiting for ever."""
        opening = (channel.opening for channel in self._by_key.values() if channel.opening is not None)
        for task in [*self._abandoned, *opening]:
            task.cancel()

    def _give_up(self, task, attempt):
        if self._gone.done() or not attempt.may_have_sent():
            task.cancel()
        else:
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)

    async def _publish(self, attempt):
        key = attempt.key
        channel = self._by_key.get(key)
        if channel is None:
            channel = self._by_key[key] = _Channel(self._first)
            self._first = None
            if channel.opened is None:
                channel.opening = asyncio.ensure_future(self._open(key, channel))
        self._by_key.move_to_end(key)
        await self._turn(channel)
        try:
            while channel.opened is None:
                await self._unless_lost(channel.opening)
            if self._lost.done():
                raise NotSent
            await attempt.give_to(channel.opened)
        finally:
            channel.unconfirmed -= 1
            self._go_on(channel)

    async def _turn(self, channel):
        """Waits until the job may be sent, after all earlier ones of its key."""
        if self._may_send(channel) and not channel.waiting:
            channel.unconfirmed += 1
            return
        turn = asyncio.get_running_loop().create_future()
        channel.waiting[turn] = None
        try:
            await self._unless_lost(turn)
        except BaseException:
            if channel.waiting.pop(turn, turn) is turn:  # It had its turn already.
                channel.unconfirmed -= 1
            self._go_on(channel)
            raise

    def _may_send(self, channel):
        return channel.unconfirmed < UNCONFIRMED_MAX and (channel.opened is None or self._freed is None)

    def _go_on(self, channel):
        """Gives their turns to jobs that wait, and the channel to another key that waits."""
        while channel.waiting and self._may_send(channel):
            turn, _ = channel.waiting.popitem(last=False)
            channel.unconfirmed += 1
            turn.set_result(None)
        if channel.unconfirmed == 0 and self._freed is not None and not self._freed.done():
            self._freed.set_result(None)

    async def _unless_lost(self, future):
        await asyncio.wait({future, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            raise NotSent
        return future.result()

    async def _open(self, key, channel):
        """Opens the channel of a key, unless all jobs of the key have ended meanwhile."""
        async with self._opening:
            await self._make_room(channel)
            if channel.is_unused:
                del self._by_key[key]
            elif not self._lost.done():
                channel.opened = await self._open_channel()

    async def _make_room(self, channel):
        """Waits until one more channel may be opened: if need be, until another key's has no unconfirmed job, and is closed."""
        try:
            while self.count >= self._channels_max and not channel.is_unused and not self._lost.done():
                free = next((key for key, other in self._by_key.items() if other.is_free), None)
                if free is not None:
                    await self._close(free)
                else:
                    self._freed = asyncio.get_running_loop().create_future()
                    await asyncio.wait({self._freed, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._freed = None
            for other in self._by_key.values():
                self._go_on(other)

    async def _close(self, key):
        channel = self._by_key[key]
        opened, channel.opened = channel.opened, None
        if channel.waiting:
            channel.opening = asyncio.ensure_future(self._open(key, channel))
        else:
            del self._by_key[key]
        await opened.close()


class _Channel:
    """What a key has: its channel, and the jobs for it."""

    def __init__(self, opened):
        # None before the task `opening` has opened it.
        self.opened, self.opening = opened, None
        # How many jobs have their turn; and the futures of those that wait for it, in order.
        self.unconfirmed, self.waiting = 0, OrderedDict()

    @property
    def is_unused(self):
        return self.unconfirmed == 0 and not self.waiting

    @property
    def is_free(self):
        return self.opened is not None and self.unconfirmed == 0
