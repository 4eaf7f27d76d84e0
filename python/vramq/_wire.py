"""Bodies of jobs and replies, and the assembly of a job's parts. No I/O; docs/wire.md of the project has the contract."""

import array
import base64
import json
import re
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InvalidJob, NoEmbedding
from .models import Bytes, Embedding, Json, Uri

JOBS_EXCHANGE = "vramq.jobs"
# How a client writes its jobs; replies come in the same encoding.
CONTENT_TYPES = {"json": "application/json", "msgpack": "application/msgpack"}

# The limits of the contract: a job beyond them would be dead-lettered, so it is refused before it is published.
BODY_BYTES_MAX = 16 << 20
ITEMS_MAX = 65_536
MODEL_NAME = re.compile(r"[a-zA-Z0-9._/:-]{1,128}")


def check_encoding(encoding):
    """The encoding itself. Raises ValueError if there is none of that name, ImportError if it needs a package that is not there."""
    if encoding not in CONTENT_TYPES:
        raise ValueError(f"the encoding is {encoding!r}; there are {', '.join(CONTENT_TYPES)}")
    if encoding == "msgpack":
        _msgpack()
    return encoding


def _msgpack():
    try:
        import msgpack
    except ImportError as error:
        raise ImportError("MessagePack is not installed: pip install 'vramq[msgpack]'") from error
    return msgpack


def input_list(inputs):
    """The inputs of a job as a list. Raises InvalidJob for a single input: split into its characters, a text would be many inputs."""
    if isinstance(inputs, (str, bytes, bytearray, memoryview, Uri, Json)):
        raise InvalidJob(f"the inputs are a {type(inputs).__name__}, and have to be a list: for a single input write [input]")
    if isinstance(inputs, Mapping):
        raise InvalidJob("the inputs are a mapping, and have to be a list: for a JSON value write [vramq.Json(value)]")
    try:
        return list(inputs)
    except TypeError:
        raise InvalidJob(f"the inputs are a {type(inputs).__name__}, and have to be a list") from None


def checked_params(params):
    """The params of a job as a dict. Raises InvalidJob."""
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        raise InvalidJob(f"params is a {type(params).__name__}, and has to be a dict")
    return dict(params)


def checked_name(name, what="the model"):
    """The name of a model, or `key`, the routing key of its jobs."""
    if not isinstance(name, str) or not MODEL_NAME.fullmatch(name):
        raise InvalidJob(f"{what} is {name!r}, and has to be 1 to 128 characters of a-z, A-Z, 0-9, - _ . / :")
    return name


def encode_job(model, inputs, params, encoding="json"):
    """The body of a job.

    Raises InvalidJob if no worker would take it.
    """
    checked_name(model)
    if not inputs:
        raise InvalidJob("a job without inputs has no result")
    if len(inputs) > ITEMS_MAX:
        raise InvalidJob(f"the job has {len(inputs)} inputs, at most {ITEMS_MAX} are allowed")
    try:
        job = {"model": model, "inputs": [_input(item, at, encoding) for at, item in enumerate(inputs)]}
        if params:
            job["params"] = _json_value(params, encoding)
        body = _encoded(job, encoding)
    except InvalidJob:
        raise
    except _NO_FORM as error:
        what = "is not Unicode text" if isinstance(error, UnicodeEncodeError) else f"has no form in {CONTENT_TYPES[encoding]}"
        raise InvalidJob(f"{_without_form(inputs, params, encoding)} {what}: {error}") from error
    if len(body) > BODY_BYTES_MAX:
        raise InvalidJob(f"the job takes {len(body)} bytes, at most {BODY_BYTES_MAX} are allowed; submit several jobs")
    return body


# What encoding raises for a value that has no form there. OverflowError: MessagePack has integers of 64 bits. RecursionError: nested too
# deeply. ValueError: not a number, or half a surrogate pair.
_NO_FORM = (TypeError, ValueError, OverflowError, RecursionError)


def _without_form(inputs, params, encoding):
    """The first input that an encoding has no form for, or params; the job if each has one alone."""
    for at, item in enumerate(inputs):
        try:
            _encoded(_input(item, at, encoding), encoding)
        except _NO_FORM:
            return f"inputs[{at}]"
    try:
        _encoded(_json_value(params, encoding), encoding)
    except _NO_FORM:
        return "params"
    return "the job"


def _encoded(value, encoding):
    return _msgpack().packb(value) if encoding == "msgpack" else _dumps(value).encode()


def _dumps(value):
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _json_value(value, encoding):
    """The value as JSON has it: a key that is a number becomes a text, and bytes are an error."""
    return json.loads(_dumps(value)) if encoding == "msgpack" else value


def _input(item, at, encoding):
    if isinstance(item, str):
        return item
    if isinstance(item, (bytes, bytearray, memoryview)):
        # A view with gaps has no base64 by itself.
        whole = item if isinstance(item, bytes) else bytes(item)
        return {"bytes": whole if encoding == "msgpack" else base64.b64encode(whole).decode()}
    if isinstance(item, Uri):
        return {"uri": item.uri}
    if isinstance(item, Json):
        return {"json": _json_value(item.value, encoding)}
    raise InvalidJob(f"inputs[{at}] is a {type(item).__name__}; an input is a str, bytes, vramq.Uri or vramq.Json")


@dataclass(frozen=True)
class Sparse:
    """A sparse vector: the indices of the elements that are not zero, ascending, and their values."""

    indices: array.array
    values: array.array


@dataclass(frozen=True)
class Part:
    """A `part` or `done` reply: the outputs of consecutive items."""

    offset: int
    items_total: int
    outputs: list
    worker: str
    attempt: int
    queued_ms: int
    ran_ms: int
    tokens: object
    model_revision: object


@dataclass(frozen=True)
class ItemProgress:
    """A `progress` reply: how far one item is, from 0 to 1, and what the model says about it."""

    item: int
    fraction: float
    note: str


@dataclass(frozen=True)
class Failure:
    """A `failed` reply."""

    reason: str
    error: str


def decode_reply(kind, content_type, headers, body):
    """A Part, an ItemProgress or a Failure; None for what is ignored: a type that this version does not know, and a progress report that it
    cannot read, which is no reason to give the job up.

    Raises ValueError if the message is no reply of the contract.
    """
    if kind not in ("part", "done", "failed", "progress"):
        return None
    if kind == "progress":
        try:
            return _progress(_parsed(content_type, body))
        except (TypeError, ValueError, OverflowError):
            return None
    parsed = _parsed(content_type, body)
    if kind == "failed":
        return Failure(str(parsed.get("reason")), str(parsed.get("error")))
    outputs = parsed.get("outputs")
    if not isinstance(outputs, list):
        raise ValueError("its body has no outputs")
    if _count(headers, "items") != len(outputs):
        raise ValueError(f"its headers say {headers['items']} items, and it holds {len(outputs)}")
    return Part(
        offset=_count(headers, "offset"),
        items_total=_count(headers, "items-total"),
        outputs=[decode_output(output) for output in outputs],
        worker=str(headers.get("worker", "")),
        attempt=_count(headers, "attempt", 0),
        queued_ms=_count(headers, "queued", 0),
        ran_ms=_count(headers, "ran", 0),
        tokens=headers.get("vramq-tokens"),
        model_revision=_text(headers.get("vramq-model-revision")),
    )


def _text(value):
    """A header's value as text, whichever of AMQP's types it has; None if it is no text."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else None


def _progress(parsed):
    return ItemProgress(int(parsed.get("item")), float(parsed.get("fraction")), str(parsed.get("note", "")))


def _parsed(content_type, body):
    if content_type in (None, CONTENT_TYPES["json"]):
        parsed = json.loads(body)
    elif content_type == CONTENT_TYPES["msgpack"]:
        parsed = _msgpack().unpackb(body)
    else:
        raise ValueError(f"its content type is {content_type!r}, and the job was {' or '.join(CONTENT_TYPES.values())}")
    if not isinstance(parsed, dict):
        raise ValueError("its body is not an object")
    return parsed


def _count(headers, name, default=None):
    value = headers.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"its header {name} is {value!r}")
    return value


def decode_output(output):
    """An output as a Python value: Embedding, Sparse, Bytes, Uri, or whatever JSON the model answered with."""
    if not isinstance(output, dict):
        raise ValueError("an output is not an object")
    if "embedding" in output:
        return _embedding(output["embedding"], output.get("dtype", "f32"))
    if "json" in output:
        return output["json"]
    if "bytes" in output:
        return Bytes(_bytes(output["bytes"]), output.get("media_type"))
    if "uri" in output:
        return Uri(output["uri"])
    if "sparse" in output:
        return _sparse(output["sparse"])
    raise ValueError(f"an output has only {sorted(output)}")


def _embedding(values, dtype):
    if dtype not in ("f32", "f16"):
        raise ValueError(f"an embedding has the dtype {dtype!r}")
    if isinstance(values, (str, bytes)):
        values = _from_bytes(_bytes(values), dtype)
    # f16 is widened: every f16 is an f32.
    return Embedding(array.array("f", values), dtype)


def _sparse(fields):
    indices, values = (fields.get(key) for key in ("indices", "values")) if isinstance(fields, dict) else (None, None)
    if not isinstance(indices, list) or not isinstance(values, list):
        raise ValueError("a sparse vector has no indices or no values")
    if len(indices) != len(values):
        raise ValueError(f"a sparse vector has {len(indices)} indices and {len(values)} values")
    return Sparse(array.array("I", indices), array.array("f", values))


def _bytes(value):
    """Bytes as MessagePack has them, or base64 of JSON."""
    return value if isinstance(value, bytes) else base64.b64decode(value, validate=True)


def _from_bytes(data, dtype):
    """Numbers of little-endian bytes."""
    if dtype == "f16":
        if len(data) % 2:
            raise ValueError("an f16 embedding has an odd number of bytes")
        return struct.unpack(f"<{len(data) // 2}e", data)
    numbers = array.array("f")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


class Assembly:
    """The outputs of one job as far as they have come. Its size is that of the job, whatever a reply claims."""

    _MISSING = object()

    def __init__(self, items):
        self._outputs = [self._MISSING] * items
        self.items, self.done = items, 0
        self.last = None
        # The revisions of the model that computed the outputs, each once.
        self.model_revisions = []

    @property
    def is_complete(self):
        return self.done == self.items

    def add(self, part):
        """Takes a part in. Of an item that comes twice the first answer stands.

        Raises ValueError if the part contradicts the job; nothing of it is taken then.
        """
        if part.items_total != self.items:
            raise ValueError(f"it is for a job of {part.items_total} items, and the job has {self.items}")
        if part.offset + len(part.outputs) > self.items:
            raise ValueError(f"it holds {len(part.outputs)} items from {part.offset} on, the job has {self.items}")
        done = self.done
        for at, output in enumerate(part.outputs, part.offset):
            if self._outputs[at] is self._MISSING:
                self._outputs[at] = output
                self.done += 1
        if self.done > done and part.model_revision is not None and part.model_revision not in self.model_revisions:
            self.model_revisions.append(part.model_revision)
        self.last = part

    def outputs(self):
        """One entry for every input; None where there is none."""
        return [None if output is self._MISSING else output for output in self._outputs]


class Result:
    """The outputs of a job, in the order of its inputs.

    `outputs` has an `Embedding`, `Sparse`, `Bytes`, `Uri` or a JSON value for each input. `model_revisions` has the revisions of the
    model that computed them: one, or more if workers with other revisions continued the job, or none if the model has none. The rest is
    of the last reply: which worker answered, after how many earlier attempts, and the milliseconds that the job waited and ran.
    """

    __slots__ = ("id", "model", "outputs", "model_revisions", "worker", "attempt", "queued_ms", "ran_ms")

    def __init__(self, job_id, model, assembly):
        last = assembly.last
        self.id, self.model, self.outputs = job_id, model, assembly.outputs()
        self.model_revisions = list(assembly.model_revisions)
        self.worker, self.attempt = last.worker, last.attempt
        self.queued_ms, self.ran_ms = last.queued_ms, last.ran_ms

    def numpy(self):
        """The embeddings as one array of shape (inputs, dimensions), float32 or float16 as the worker computed them."""
        return stack(self.outputs)

    def plain(self):
        """The outputs as plain values: an embedding as a list of floats, a sparse vector as a dict of floats by index, bytes as
        bytes, a reference as its text."""
        return [plain(output) for output in self.outputs]

    def __repr__(self):
        return f"<vramq.Result {self.id}, {len(self.outputs)} outputs of {self.model}>"


def plain(output):
    if isinstance(output, Embedding):
        return list(output.values)
    if isinstance(output, Sparse):
        return dict(zip(output.indices, output.values))
    if isinstance(output, Bytes):
        return output.data
    return output.uri if isinstance(output, Uri) else output


def numpy_or_why():
    """The module. Raises ImportError that says how to get it."""
    try:
        import numpy
    except ImportError as error:
        raise ImportError("NumPy is not installed: pip install 'vramq[numpy]'") from error
    return numpy


def stack(outputs):
    """Embeddings as the rows of a NumPy array."""
    numpy = numpy_or_why()
    other = next((type(output).__name__ for output in outputs if not isinstance(output, Embedding)), None)
    if other is not None:
        raise NoEmbedding(f"an output is a {other}, not an embedding")
    dtype = numpy.float16 if outputs and outputs[0].dtype == "f16" else numpy.float32
    return numpy.array([output.values for output in outputs], dtype=dtype)
