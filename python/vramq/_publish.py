"""Publishes jobs until the broker has them, or has said why not."""

import asyncio

from aiormq import exceptions as amqp

from . import _wire
from ._channels import Attempt, NotSent
from ._session import LOST, in_own_task
from .errors import (
    ConnectError, InvalidReply, JobFailed, JobTimeout, PublishRefused, PublishTimeout, QueueFull, Unroutable,
)

# With these the broker closes a channel or a connection over something that was sent on it. Which of several jobs that was it does not say.
_BLAMES = (
    amqp.ChannelPreconditionFailed, amqp.ConnectionSyntaxError, amqp.ConnectionFrameError, amqp.ConnectionCommandInvalid,
    amqp.ConnectionUnexpectedFrame, amqp.ConnectionResourceError, amqp.ConnectionNotImplemented,
)
# An operator or a broker that shuts down closes connections with this code, whatever was published on them. With 530
# (ConnectionNotAllowed) it closes them over a channel more than the user may have.
_CONNECTION_FORCED = 320
# So often a connection may be lost without a reason while a job is being published on it, before the job goes alone. It is never refused
# for such losses: networks and brokers fail as well, and a broker that is short of memory lets jobs wait for long.
LOSSES_MAX = 2
# Before another attempt to publish a job alone: the broker may limit how many connections a user has.
ALONE_WAIT_S = 1
# So many jobs are published alone at a time, each on a connection.
ALONE_MAX = 8


class Lost(Exception):
    """The connection was lost before the job was confirmed. `blame` is what the broker said, if it was about something published;
    `is_forced` is whether the broker closed it for a reason of its own."""

    def __init__(self, blame=None, is_forced=False):
        super().__init__(blame)
        self.blame, self.is_forced = blame, is_forced


class Publisher:
    """Publishes on the session that jobs share. A job that may have ended a session is then published alone, on a connection of its own:
    then no other job is ended by it, and what the broker says is about this job."""

    def __init__(self, sessions, open_alone):
        """`sessions` waits for the shared session, `open_alone` opens one for a single job."""
        self._sessions, self._open_alone = sessions, open_alone
        self._alone = asyncio.Semaphore(ALONE_MAX)

    async def publish(self, message, pending):
        """Returns once the broker has the job, or the job has ended otherwise. Raises PublishError."""
        losses = 0
        while losses < LOSSES_MAX:
            session = await self._sessions(pending)
            if session is None:
                return _ended(pending)
            try:
                return await _publish_once(session, message, pending)
            except Lost as lost:
                losses = LOSSES_MAX if lost.blame else losses + (not lost.is_forced)
        try:
            await in_own_task(self._publish_alone(message, pending), until=[pending.future])
        except asyncio.TimeoutError:
            _ended(pending)

    async def _publish_alone(self, message, pending):
        while not pending.future.done():
            # While the broker is away, its return is waited for where all wait for it.
            await self._sessions(pending)
            async with self._alone:
                try:
                    return await self._attempt_alone(message, pending)
                except ConnectError:
                    pass
                except Lost as lost:
                    if lost.blame:
                        raise PublishRefused(f"the broker refuses this job: {lost.blame}") from None
            await asyncio.sleep(ALONE_WAIT_S)

    async def _attempt_alone(self, message, pending):
        session = await self._open_alone()
        try:
            return await _publish_once(session, message, pending)
        finally:
            await session.drop()


async def _publish_once(session, message, pending):
    attempt = Attempt(message, pending.key, until=(pending.future, session.gone))
    pending.may_have_sent = attempt.may_have_sent
    try:
        await session.jobs.publish(attempt)
        pending.confirmed = True
        pending.has_sent()
    except NotSent:
        # Whatever ended the session, it was not this job.
        raise Lost(is_forced=True) from None
    except asyncio.TimeoutError:
        if pending.future.done():
            return _ended(pending)
        pending.has_sent()
        raise Lost(is_forced=_is_forced(session.fault)) from None
    except amqp.PublishError:
        raise Unroutable(f"no queue for {pending.destination}: is a worker for it configured? If its workers set a `key`, name it.") from None
    except amqp.DeliveryError:
        raise QueueFull(f"the queue of {pending.destination} is full; try again later") from None
    except amqp.ChannelNotFoundEntity:
        session.lose("the broker closed the channel")
        raise Unroutable(f"no exchange {_wire.JOBS_EXCHANGE}: was a worker ever started on this virtual host?") from None
    except (amqp.AMQPError, *LOST) as error:
        session.lose(f"publish: {error!r}")
        pending.has_sent()
        if _is_about_all_jobs(error):
            text = f"the broker refuses jobs for exchange {_wire.JOBS_EXCHANGE}: {error}"
            raise PublishRefused(text) from None
        raise Lost(str(error) if isinstance(error, _BLAMES) else None, _is_forced(error) or _is_forced(session.fault)) from None
    finally:
        # It may have been sent after the withdrawal was asked for.
        if attempt.may_have_sent():
            pending.has_sent()


def _is_forced(error):
    if isinstance(error, amqp.ConnectionNotAllowed):
        return True
    return isinstance(error, amqp.ConnectionClosed) and bool(error.args) and error.args[0] == _CONNECTION_FORCED


def _is_about_all_jobs(error):
    """Whether another job of this client would be refused as well: for want of permission, or because of the `user_id`."""
    return isinstance(error, amqp.ChannelAccessRefused) or (isinstance(error, amqp.ChannelPreconditionFailed) and "user_id" in str(error))


def _ended(pending):
    """A job that has ended before it was confirmed. Raises why, unless it was answered already."""
    error = None if pending.future.cancelled() else pending.future.exception()
    if isinstance(error, (InvalidReply, JobFailed)):
        return
    if isinstance(error, JobTimeout):
        raise PublishTimeout(f"the broker did not confirm the job within {pending.timeout:g} s") from None
    if error is not None:
        raise error
