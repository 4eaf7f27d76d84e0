"""A job's AMQP message, checked before it is sent: what cannot be encoded, or what the broker refuses, would end a connection that other
jobs share."""

import datetime
import decimal
import math
import numbers
import operator
import struct
import time
import uuid
from collections.abc import Mapping

import aio_pika
from pamqp.decode import embedded_value
from pamqp.encode import encode_table_value
from pamqp.header import ContentHeader

from ._withdraw import DIGEST
from .errors import InvalidJob

# An AMQP short string.
SHORT_BYTES_MAX = 255
# The field names of AMQP; the encoder cuts longer ones off.
HEADER_NAME_BYTES_MAX = 128
# What workers take. A frame has 128 KiB, unless the broker is set otherwise.
HEADER_BYTES_MAX = 120 << 10
# The revision of the model that a job demands, as workers take it.
MODEL_REVISION = "vramq-model-revision"
MODEL_REVISION_BYTES_MAX = 2048
# Headers within headers, as workers read them.
HEADER_DEPTH_MAX = 32
PRIORITY_MAX = 255
BATCH_HINT_MAX = (1 << 32) - 1
# 49 days: RabbitMQ counts milliseconds in 32 bits.
EXPIRATION_MS_MAX = (1 << 32) - 1


def checked_id(job_id):
    """The id of a job as workers take it, a random one for None. Raises InvalidJob."""
    if job_id is None:
        return str(uuid.uuid4())
    if isinstance(job_id, str):
        # Without what a class of its own, such as an enumeration, makes of it.
        job_id = str.__str__(job_id)
    elif isinstance(job_id, uuid.UUID):
        job_id = str(job_id)
    else:
        job_id = _decimal(job_id)
    return _echoed_text("the job id", job_id)


def _decimal(job_id):
    """The digits of an integer, also of one of NumPy. Raises InvalidJob."""
    try:
        # A truth value is an integer to Python, and no id.
        number = None if isinstance(job_id, bool) else operator.index(job_id)
    except TypeError:
        number = None
    if number is None:
        # The text of bytes is b'…', and that of many objects their address: no id that another program would find.
        raise InvalidJob(f"the job id is a {type(job_id).__name__}, and has to be a str, an int or a uuid.UUID")
    try:
        # Without what a class of its own, such as an enumeration, makes of it.
        return int.__repr__(number)
    except ValueError as error:
        # Python writes no number of thousands of digits.
        raise InvalidJob(f"the job id must have 1 to {SHORT_BYTES_MAX} bytes: {error}") from error


def job_message(body, content_type, job_id, reply_to, user, *, priority, expiration, batch_hint, traceparent, app_id, headers, digest=None):
    """The message that publishes a job; `digest` is that of the secret that withdraws it. Raises InvalidJob
    if AMQP, RabbitMQ or workers would not take it."""
    headers = _headers(headers)
    if digest is not None:
        headers[DIGEST] = digest
    if batch_hint is not None:
        headers["batch-hint"] = _integer("batch_hint", batch_hint, 1, BATCH_HINT_MAX)
    if traceparent is not None:
        headers["traceparent"] = _short_text("traceparent", traceparent)
    message = aio_pika.Message(
        body, headers=headers, content_type=content_type, delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        message_id=job_id, correlation_id=job_id, reply_to=None if reply_to is None else _echoed_text("reply_to", reply_to),
        priority=None if priority is None else _integer("priority", priority, 0, PRIORITY_MAX),
        expiration=_expiration(expiration), timestamp=int(time.time()), user_id=user,
        app_id=None if app_id is None else _short_text("app_id", app_id),
    )
    try:
        encoded = ContentHeader(body_size=len(body), properties=message.properties).marshal()
    # Whatever the encoder raises, of whichever version it is: it is about a value that the caller gave.
    except Exception as error:
        raise InvalidJob(f"the job's headers have no form in AMQP: {error}") from error
    if len(encoded) > HEADER_BYTES_MAX:
        raise InvalidJob(f"the job's headers take {len(encoded)} bytes, at most {HEADER_BYTES_MAX} are allowed")
    return message


def checked_timeout(timeout):
    """The time limit of a job in seconds; None for no limit. Raises InvalidJob."""
    if timeout is None:
        return None
    # Not a number is in no range; an event loop would lose the order of its timers over it.
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not timeout >= 0:
        raise InvalidJob(f"timeout is {timeout!r}, and has to be None or seconds, at least 0")
    return float(timeout)


def _headers(headers):
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise InvalidJob(f"headers is a {type(headers).__name__}, and has to be a dict")
    headers = dict(headers)
    _check_header("headers", headers, 0)
    revision = headers.get(MODEL_REVISION)
    if isinstance(revision, (str, bytearray)):
        size = len(revision.encode() if isinstance(revision, str) else revision)
        if size > MODEL_REVISION_BYTES_MAX:
            raise InvalidJob(f"headers.{MODEL_REVISION} has {size} bytes, at most {MODEL_REVISION_BYTES_MAX} are allowed")
    return headers


def _check_header(name, value, depth):
    """Raises InvalidJob, which names the header, for a value that has no form in AMQP, or another one than its writer meant."""
    if depth > HEADER_DEPTH_MAX:
        raise InvalidJob(f"{name} is nested in more than {HEADER_DEPTH_MAX} others")
    if isinstance(value, dict):
        for key, field in value.items():
            _check_header_name(name, key)
            _check_header(f"{name}.{key}", field, depth + 1)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            _check_header(f"{name}[{at}]", item, depth + 1)
    elif isinstance(value, float) and not _is_of_32_bits(value):
        # Rounded, a time would be a minute off, and two values may become one.
        raise InvalidJob(f"{name} is {float(value)!r}, which is no number of 32 bits, and Python's AMQP library sends no other floats: "
                         "make it a str or an int")
    else:
        try:
            encoded = encode_table_value(value)
        # Whatever the encoder raises, of whichever version it is.
        except Exception as error:
            raise InvalidJob(f"{name} has no form in AMQP: {error}") from error
        if isinstance(value, decimal.Decimal) and (arrives := embedded_value(encoded)[1]) != value:
            raise InvalidJob(f"{name} is {value!r}, which Python's AMQP library sends as {arrives}: make it a str or an int")
        if isinstance(value, datetime.datetime) and value.microsecond:
            raise InvalidJob(f"{name} is {value!r}, and AMQP has only whole seconds: make it a str or an int")


def _check_header_name(parent, name):
    if not isinstance(name, str):
        raise InvalidJob(f"the name {name!r} in {parent} is not a str")
    if not 0 < _utf8_bytes(f"a name in {parent}", name) <= HEADER_NAME_BYTES_MAX:
        raise InvalidJob(f"the name {name[:HEADER_NAME_BYTES_MAX]!r} in {parent} must have 1 to {HEADER_NAME_BYTES_MAX} bytes")


def _is_of_32_bits(number):
    try:
        return math.isfinite(number) and struct.unpack(">f", struct.pack(">f", number)) == (number,)
    except OverflowError:
        return False


def _short_text(name, text):
    if not isinstance(text, str):
        raise InvalidJob(f"{name} is a {type(text).__name__}, and has to be a str")
    if not 0 < _utf8_bytes(name, text) <= SHORT_BYTES_MAX:
        raise InvalidJob(f"{name} must have 1 to {SHORT_BYTES_MAX} bytes")
    return text


def _echoed_text(name, text):
    """What replies repeat, or go to. There workers read U+FFFD for bytes that are not a text, and cannot tell the two apart."""
    if "\ufffd" in _short_text(name, text):
        raise InvalidJob(f"{name} has the character U+FFFD, which workers do not take there")
    return text


def _utf8_bytes(name, text):
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidJob(f"{name} is not Unicode text: {error}") from error


def _integer(name, value, least, most):
    try:
        # Also those of NumPy.
        number = operator.index(value)
    except TypeError:
        raise InvalidJob(f"{name} is {value!r}, and has to be an int") from None
    if not least <= number <= most:
        raise InvalidJob(f"{name} is {number}, and has to be {least} to {most}")
    return number


def _expiration(value):
    """Seconds, a timedelta or a datetime, as the timedelta that it is from now."""
    if value is None:
        return None
    if isinstance(value, datetime.datetime):
        milliseconds = (value - datetime.datetime.now(tz=value.tzinfo)).total_seconds() * 1000
    elif isinstance(value, datetime.timedelta):
        milliseconds = value.total_seconds() * 1000
    else:
        try:
            milliseconds = float(value) * 1000
        except (TypeError, ValueError):
            raise InvalidJob(f"expiration is {value!r}, and has to be seconds, a timedelta or a datetime") from None
    # Not a number is in no range.
    if not 0 <= milliseconds <= EXPIRATION_MS_MAX:
        raise InvalidJob(f"expiration is in {milliseconds / 1000:g} s, and has to be in 0 to {EXPIRATION_MS_MAX // 1000} s")
    return datetime.timedelta(milliseconds=int(milliseconds))
