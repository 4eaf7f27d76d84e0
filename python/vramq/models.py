"""Serves a Python program as a model of a vramq worker.

One file, standard library only: install the package, or copy this file beside your program as vramq.py.

    import vramq

    class Shout(vramq.Model):
        def load(self, device):             # once, before the first pass; "cpu" or "cuda:0"
            self.suffix = "!"
        def run(self, items, params):       # once per pass; one output for each item, in their order
            return [item.text.upper() + self.suffix for item in items]

    vramq.serve(Shout)

The protocol is docs/process-protocol.md of the project, version 1.
"""

import array
import collections.abc
import errno
import gc
import inspect
import json
import math
import operator
import os
import queue
import re
import signal
import socket
import struct
import sys
import threading
import time
import traceback

__all__ = [
    "Bytes", "Cancelled", "Embedding", "File", "InvalidInput", "Item", "Json", "Model", "OutOfMemory", "Uri", "serve",
]

VERSION = 1
HEADER_BYTES_MAX = 1 << 20
# The worker's limit for a frame is 64 MiB; what is larger than this goes by a file.
INLINE_BYTES_MAX = 16 << 20
# What readers of JSON accept; the worker's ends at 128, with the reply around the value.
JSON_DEPTH_MAX = 100
# Media types with parameters are some dozens of characters. The worker has the same limit.
MEDIA_TYPE_BYTES_MAX = 1024
# Progress is for people: more often than this it is not sent.
PROGRESS_SECONDS_MIN = 0.1
# A disk is full if less than this part of it is free, and less than these bytes: what a program had written when there was no more room,
# it may have removed before the SDK looks.
DISK_FREE_PART = 20
DISK_FREE_MAX = 8 << 30


class OutOfMemory(Exception):
    """Raise it when the device has no room, if no framework does. All in bytes; leave out what you do not know.

    The worker runs the items again in smaller passes, in this same process.
    """

    # For classes of a program's own that do not call this constructor.
    asked = free = total = item = None
    where = "model"

    def __init__(self, message="", asked=None, free=None, total=None, item=None, where="model"):
        super().__init__(message or "out of device memory")
        self.asked, self.free, self.total, self.item, self.where = asked, free, total, item, where


class InvalidInput(Exception):
    """Raise it when an item can never be run: its job fails at once, with this message. `item` is the item, or its index.

    The other items of the pass run again without it. Without `item` each job of the pass runs again alone, to find the one.
    """

    item = None

    def __init__(self, message, item=None):
        super().__init__(message)
        self.item = item.index if isinstance(item, Item) else item


class Cancelled(BaseException):
    """Raised out of `progress`, `check` and between outputs when the pass is no longer wanted. Let it pass."""


class _InvalidOutput(Exception):
    pass


class _InvalidOutputs(_InvalidOutput):
    """The outputs cannot be assigned to the items, not even those that were sent: the one that is too many, or missing, may be
    in the middle.
    """


class _Disconnected(Exception):
    pass


class Item:
    """One input. `kind` is "text", "bytes", "json" or "uri"; the attribute of that name has the value.

    `media_type` of bytes is what their first bytes show, such as "image/png", or None.
    """

    __slots__ = ("index", "kind", "media_type", "_payload", "_path")

    def __init__(self, index, kind, payload=b"", media_type=None, path=None):
        self.index, self.kind, self.media_type, self._payload, self._path = index, kind, media_type, payload, path

    def _get(self, kind):
        if self.kind != kind:
            raise InvalidInput(f"the item is {self.kind}, and the model takes {kind}", self.index)
        if self._path is not None:
            with open(self._path, "rb") as file:
                return file.read()
        return self._payload

    @property
    def text(self):
        return self._get("text").decode()

    @property
    def bytes(self):
        return self._get("bytes")

    @property
    def json(self):
        return json.loads(self._get("json"))

    @property
    def uri(self):
        return self._get("uri").decode()

    @property
    def path(self):
        """A file with the item's bytes, for libraries that want one. It is removed after the pass."""
        if self._path is None:
            data = self._get("bytes")
            self._path = os.path.join(_scratch(), f"item-{self.index}")
            with open(self._path, "wb") as file:
                file.write(data)
        return self._path

    def __repr__(self):
        return f"<vramq.Item {self.index}, {self.kind}>"


class Embedding:
    """A vector: numbers, a NumPy array or a tensor. `dtype` is "f32" or "f16"; by default that of the values."""

    def __init__(self, values, dtype=None):
        self.values, self.dtype = values, dtype


class Json:
    """A value that goes out as JSON. For dicts, lists, texts, numbers, booleans and None the wrapper may be left out."""

    def __init__(self, value):
        self.value = value


class Bytes:
    """Bytes with a media type, such as "image/png"."""

    def __init__(self, data, media_type="application/octet-stream"):
        self.data, self.media_type = data, media_type


class File:
    """A file in `self.scratch` as bytes with a media type, for large results. The worker removes it."""

    def __init__(self, path, media_type="application/octet-stream"):
        self.path, self.media_type = path, media_type


class Uri:
    """A reference to something that the program has stored by itself."""

    def __init__(self, uri):
        self.uri = uri


class Model:
    """What a program derives its model from."""

    #: The kinds of items that `run` takes, and media types of bytes ("image/png", "audio/*"); others are rejected
    #: before they come here. None: all.
    accepts = None
    #: Identifies weights and element type: replies carry it as `vramq-model-revision`.
    revision = None
    #: Bytes for the pass beyond the weights, if the worker knows them.
    budget = None
    #: When the pass is cancelled, by `time.monotonic()`.
    deadline = None
    #: A folder of this process's own.
    scratch = None

    def load(self, device):
        """Loads the weights. `device` is "cpu" or "cuda:0": no other GPU is visible."""

    def run(self, items, params):
        """Returns, or yields one by one, an output for each item, in their order."""
        raise NotImplementedError(f"{type(self).__name__} has no run(items, params)")

    def trim(self):
        """Gives cached device memory back. The default knows PyTorch and CuPy."""
        _free_caches()

    def weights(self):
        """Device bytes of the weights, if known."""
        return _reserved() or 0

    def progress(self, item, fraction, note=""):
        """Says how far an item is: `fraction` from 0 to 1. Also a place where a cancelled pass ends."""
        if self._session is not None:
            self._session.progress(item, fraction, note)

    def check(self):
        """Ends the pass here if it was cancelled."""
        if self._session is not None:
            self._session.check()

    _session = None


def serve(model):
    """Serves a Model, or a class of one, until the worker ends this process. Does not return, except in a process that
    `multiprocessing` spawned: that one imports the program only to find what it is to run.
    """
    multiprocessing = _loaded("multiprocessing.process")
    if multiprocessing is not None and getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    descriptor = os.environ.get("VRAMQ_FD")
    if descriptor is None:
        sys.exit("vramq: VRAMQ_FD is not set: a vramq worker starts this program. To try it by hand: "
                 f"vramq-run-model {sys.argv[0]}")
    connection = socket.socket(fileno=int(descriptor))
    # What the program starts itself must not hold the connection.
    connection.set_inheritable(False)
    # A program may have set a default for its downloads; this connection may be silent for days.
    connection.settimeout(None)
    session = _Session(_Connection(connection))
    try:
        session.serve(model() if isinstance(model, type) else model)
    except _Disconnected:
        os._exit(0)
    except BaseException as error:
        _show(error)
        _flush()
        os._exit(1)
    _flush()
    # Without waiting for what a framework would do at exit: a driver may wait for a device that hangs.
    os._exit(0)


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            # A program may have put anything there: a closed file, None, an object that cannot flush.
            pass


def _scratch():
    return os.environ.get("VRAMQ_SCRATCH") or os.environ.get("TMPDIR", "/tmp")


class _Connection:
    """Frames: u32 length, JSON header, blobs."""

    def __init__(self, connection):
        self.connection, self.sending = connection, threading.Lock()
        self.reader = connection.makefile("rb")
        self.process = os.getpid()

    def is_own(self):
        """Whether this is the process that serves, and not one that the program forked."""
        return os.getpid() == self.process

    def _exactly(self, length):
        try:
            data = self.reader.read(length)
        except OSError:
            raise _Disconnected from None
        if len(data) != length:
            raise _Disconnected
        return data

    def receive(self):
        (length,) = struct.unpack("<I", self._exactly(4))
        if length > HEADER_BYTES_MAX:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(self._exactly(length))
        return header, [self._exactly(size) for size in header.pop("blobs", ())]

    def end_copy(self):
        """Ends a copy, which the program forked, that came back out of `run`: its frames would come between those of the process that
        serves. A lock may be held in it by a thread that is not there, and a device cannot be used in it.
        """
        if not self.is_own():
            try:
                print("vramq: a forked process ends here; let it end with os._exit", file=sys.stderr, flush=True)
            finally:
                os._exit(1)

    def send(self, header, blob=None):
        self.end_copy()
        if blob is not None:
            header["blobs"] = [len(blob)]
        # A lone surrogate, as in the name of a file that is no UTF-8, is no JSON.
        text = json.dumps(header, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
        try:
            with self.sending:
                self.connection.sendall(struct.pack("<I", len(text)) + text)
                if blob:
                    self.connection.sendall(blob)
        except OSError:
            raise _Disconnected from None


class _Session:
    def __init__(self, connection):
        self.connection = connection
        self.inbox = queue.Queue(maxsize=16)
        # The running pass and its items. Whoever sends frames of it holds the lock: none may follow its last one.
        self.turn = threading.RLock()
        self.running, self.items = None, ()
        self.cancelled = set()
        # When each item of the pass was last reported on, by its index: items of a pass have callers of their own.
        self.reported = {}
        # The thread that runs the passes.
        self.thread = threading.get_ident()

    def serve(self, model):
        hello, _ = self.connection.receive()
        if hello.get("type") != "hello" or hello.get("version") != VERSION:
            raise ValueError(f"the worker speaks another version: {hello}")
        try:
            _check_model(model)
            model._session, model.scratch = self, _scratch()
            model.load(hello["device"])
            _check_run(model)
            ready = {"type": "ready", "version": VERSION, "weights": _weights(model)}
            if model.accepts is not None:
                ready["accepts"] = _accepts(model.accepts)
            if model.revision is not None:
                ready["revision"] = str(model.revision)
        except BaseException as error:
            if _ends_program(error):
                raise
            self.report(error, None, None, loading=True)
            _flush()
            os._exit(1)
        self.connection.send(ready)
        # Cancels are seen while `run` runs.
        threading.Thread(target=self.listen, daemon=True).start()
        while True:
            header, blobs = self.inbox.get()
            if header is None or header["type"] == "shutdown":
                return
            if header["type"] == "ping":
                self.connection.send({"type": "pong", "number": header["number"], "reserved": _reserved()})
            elif header["type"] == "trim":
                _trim(model)
            elif header["type"] == "run":
                self.run(model, header, blobs)
                # The inputs, before the next wait.
                header = blobs = None

    def listen(self):
        try:
            while True:
                header, blobs = self.connection.receive()
                if header["type"] == "cancel":
                    self.cancelled.add(header["pass"])
                else:
                    self.inbox.put((header, blobs))
        except _Disconnected:
            # The worker is gone, or has given this process up: nobody waits for what it does.
            os._exit(0)
        except BaseException as error:
            # No memory for a pass, say. A process that hears nothing more would look busy until its time is over.
            _show(error)
            _flush()
            os._exit(1)

    def check(self):
        if self.running is not None and self.running in self.cancelled:
            raise Cancelled

    def progress(self, item, fraction, note):
        # Not while the model is loaded; not from a process that the program forked.
        if self.running is None or not self.connection.is_own():
            return
        if isinstance(item, Item):
            if all(item is not other for other in self.items):
                # Of a thread of the program's that comes late: another pass may run, and be cancelled.
                return
        elif threading.get_ident() != self.thread:
            # By then the index may be that of another caller's item.
            raise ValueError("a thread of the program's own gives progress() the item, not its index")
        self.check()
        fraction, now = float(fraction), time.monotonic()
        if math.isnan(fraction):
            return
        note = str(note)[:200]
        with self.turn:
            # A thread of the program's may come late: the pass of its item is over, and another one may run.
            if self.running is None or (isinstance(item, Item) and all(item is not other for other in self.items)):
                return
            index = _place(item.index if isinstance(item, Item) else item, len(self.items))
            if index is None:
                raise ValueError(f"progress of item {item!r}; the pass has the items 0 to {len(self.items) - 1}")
            if now - self.reported.get(index, 0.0) < PROGRESS_SECONDS_MIN and fraction < 1:
                return
            self.reported[index] = now
            self.connection.send({"type": "progress", "pass": self.running, "item": index,
                                  "fraction": min(max(fraction, 0.0), 1.0), "note": note})

    def end(self, frame):
        """Sends the last frame of the running pass."""
        # What this pass printed is not to come to light in the next one, which may be another caller's.
        _flush()
        with self.turn:
            self.running, self.items = None, ()
            self.connection.send(frame)

    def run(self, model, header, blobs):
        number = header["pass"]
        # Passes are numbered upwards: what was cancelled too late is over. In place, since another thread adds to it.
        self.cancelled.difference_update([other for other in tuple(self.cancelled) if other < number])
        model.budget = header.get("budget")
        model.deadline = time.monotonic() + header["deadline_ms"] / 1000
        if header.get("measure"):
            _trim(model)
        peak = _Peak()
        items = [
            Item(index, item["kind"], blob, item.get("media_type"), _inside(item.get("file")))
            for index, (item, blob) in enumerate(zip(header["items"], blobs))
        ]
        with self.turn:
            self.running, self.items, self.reported = number, items, {}
        sent = [0]
        error = None
        try:
            self.check()
            # A list of the model's own: some take the items out of it.
            for output in _outputs(model.run(list(items), header["params"]), len(items)):
                self.check()
                self.output(number, sent[0], output, len(items))
                sent[0] += 1
            self.connection.end_copy()
            if sent[0] < len(items):
                raise _InvalidOutputs(f"run returned {sent[0]} outputs for {len(items)} items; item {sent[0]} has none")
            self.end({"type": "done", "pass": number, "peak": peak.bytes()})
        except _Disconnected:
            raise
        except BaseException as caught:
            self.connection.end_copy()
            # Not every error is an Exception: a library that calls sys.exit, a panic of one in Rust.
            if _ends_program(caught):
                raise
            error = caught
        finally:
            for item in items:
                if item._path is not None:
                    _remove(item._path)
        if error is not None:
            self.report(error, number, sent[0], items=len(items))
            _let_go(error)
        self.cancelled.discard(number)
        _flush()

    def output(self, number, index, value, items):
        if index >= items:
            raise _InvalidOutputs(f"run returned more than {items} outputs for {items} items")
        try:
            header, blob = _encode(value)
        except _InvalidOutput as error:
            raise _InvalidOutput(f"item {index}: {error}") from None
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            # What looks like an output, and is none when it is read. A full device or a lack of memory are other errors.
            raise _InvalidOutput(f"item {index}: {type(value).__module__}.{type(value).__name__} is not an output: "
                                 f"{type(error).__name__}: {_text(error)}") from None
        if blob is not None and len(blob) > INLINE_BYTES_MAX:
            name = f"output-{number}-{index}"
            path = os.path.join(_scratch(), name)
            try:
                with open(path, "wb") as file:
                    file.write(blob)
            except OSError as error:
                # What a full disk took of it would keep the disk full.
                _remove(path)
                if error.errno == errno.ENOSPC:
                    # A write that fails does not say what it wrote to.
                    error.filename = path
                raise
            header["file"], blob = name, None
        self.connection.send({"type": "output", "pass": number, "item": index, **header}, blob)

    def report(self, error, number, item, loading=False, items=0):
        """Says how a pass, or loading, ended by an exception, and frees what the exception holds."""
        # Not of a pass that was cancelled: what it has queued on the device may take longer than the process has to stop.
        is_dead = not isinstance(error, Cancelled) and _is_device_dead()
        out_of_memory = None if is_dead else _out_of_memory(error)
        if out_of_memory is not None:
            out_of_memory.update(type="oom", detail=_text(error)[:2000], item=_place(out_of_memory["item"], items))
            # Before its frames are let go: the traceback says where it ran out.
            _show(error)
            _let_go(error)
            _free_caches()
            if out_of_memory["free"] is None or out_of_memory["total"] is None:
                free, total = _device_memory()
                out_of_memory["free"] = free if out_of_memory["free"] is None else out_of_memory["free"]
                out_of_memory["total"] = total if out_of_memory["total"] is None else out_of_memory["total"]
            self.answer(out_of_memory, number)
            return
        text = _text(error)
        kind, detail = "load" if loading else "model", f"{type(error).__name__}: {text}" if text else type(error).__name__
        if is_dead:
            # Whatever the model makes of it: this process can use the device no more.
            kind = "device"
        elif isinstance(error, Cancelled) and number in self.cancelled:
            kind, detail, item = "cancelled", "", None
        elif isinstance(error, InvalidInput):
            kind, detail, item = "input", text, 0 if items == 1 else _place(error.item, items)
        elif isinstance(error, _InvalidOutput):
            kind, detail = "output", text
            if isinstance(error, _InvalidOutputs):
                # Without an item no output of the pass counts.
                item = None
        elif _is_host_memory(error, text):
            kind = "host_memory"
        elif _is_device_lost(error):
            # By its text alone: a model that says what the error is knows better.
            kind = "device"
        if kind in ("model", "load", "device", "host_memory"):
            _show(error)
        message = {"type": "failed", "kind": kind, "detail": detail[:2000]}
        if kind == "model" and _is_disk_full(error):
            # No job's fault: each is tried again later, in smaller passes first.
            message["disk_full"] = True
        # A model that returns all outputs at once does not say which item it failed at.
        if _place(item, items) is not None and (kind in ("input", "output") or item > 0 or items == 1):
            message["item"] = item
        self.answer(message, number)
        if kind == "device":
            _flush()
            os._exit(1)

    def answer(self, message, number):
        """Ends a pass, or, without its number, loading."""
        if number is None:
            self.connection.send(message)
        else:
            self.end({**message, "pass": number})


def _ends_program(error):
    """Whether an exception is no failure of the model, but meant to end the process: an interrupt, and what a SIGTERM handler of
    the program's own raises.
    """
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and callable(signal.getsignal(signal.SIGTERM)))


def _text(error):
    try:
        return str(error)
    except Exception as another:
        return f"its text cannot be shown: {type(another).__name__}"


def _show(error):
    try:
        traceback.print_exception(type(error), error, error.__traceback__)
    except Exception:
        # The exception may have raised another when it was asked for its notes; the frames say where it came from.
        try:
            traceback.print_tb(error.__traceback__)
        except Exception:
            # A program may have put anything into the place of sys.stderr.
            pass


def _let_go(error):
    """Frees what the frames of an exception hold, tensors above all, and those of the exceptions that it came from."""
    for cause in _chain(error):
        traceback.clear_frames(cause.__traceback__)
        # Not by an assignment, which a class may refuse: frozen dataclasses do.
        BaseException.with_traceback(cause, None)


def _check_model(model):
    """Says at once what is no model."""
    if not isinstance(model, Model):
        name = type(model).__name__
        raise TypeError(f"vramq.serve takes a class derived from vramq.Model, or an object of one; it got {name}")
    _check_method(model, "load", "device")
    for method in ("trim", "weights"):
        # Not of the object: a property must not be evaluated before `load`.
        _check_no_coroutine(type(model), method, type(model).__name__)


def _check_run(model):
    """Says before the first pass what would fail every pass, and with it every job. `load` may have set `run`."""
    if getattr(model.run, "__func__", None) is Model.run:
        raise NotImplementedError(f"{type(model).__name__} has no run(self, items, params)")
    _check_method(model, "run", "items", "params")


def _check_method(model, method, *parameters):
    _check_no_coroutine(model, method, type(model).__name__)
    try:
        inspect.signature(getattr(model, method)).bind(*parameters)
    except TypeError as error:
        called = f"{type(model).__name__}.{method} is called as {method}({', '.join(parameters)})"
        raise TypeError(f"{called}: {error}") from None
    except ValueError:
        # It is not written in Python, and does not say what it takes.
        pass


def _check_no_coroutine(model, method, name):
    """A coroutine that nobody awaits would look like a model that is loaded, and fail every pass."""
    function = getattr(model, method, None)
    for called in (function, getattr(function, "__call__", None)):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            raise TypeError(f"{name}.{method} is `async def`, and vramq calls it as a plain function: write "
                            f"`def {method}`, and use asyncio.run inside it")


def _weights(model):
    """What `weights` says. An attribute that the program gave this name is something else: its weights, or where they are."""
    method = getattr(type(model), "weights", None)
    if not inspect.isfunction(method):
        return _reserved() or 0
    said = method(model)
    try:
        weights = 0 if said is None else int(said)
    except (TypeError, ValueError, OverflowError):
        weights = -1
    if weights < 0:
        raise TypeError(f"{type(model).__name__}.weights returned {said!r}; it must return a number of bytes, or None")
    return min(weights, (1 << 63) - 1)


def _accepts(accepts):
    """The kinds and media types that a model takes, as a list."""
    if isinstance(accepts, (bytes, bytearray, dict)) or not isinstance(accepts, (str, collections.abc.Iterable)):
        raise TypeError(f"accepts is {accepts!r}; it must be a list of kinds and media types, such as ['text', 'image/*']")
    accepts = [accepts] if isinstance(accepts, str) else list(accepts)
    for accepted in accepts:
        if not isinstance(accepted, str):
            raise TypeError(f"accepts has {accepted!r}, which is {type(accepted).__name__}, not a text")
    return accepts


def _trim(model):
    try:
        model.trim()
    except Exception as error:
        # A model's own fault, and no pass's.
        _show(error)


def _remove(path):
    try:
        os.unlink(path)
    except OSError:
        pass


def _place(item, items):
    """An item's index in a pass of so many, from what a model gave as one; None where it is none."""
    try:
        index = operator.index(item.index if isinstance(item, Item) else item)
    except TypeError:
        return None
    return index if 0 <= index < items else None


def _inside(name):
    return None if name is None else os.path.join(_scratch(), os.path.basename(name))


def _outputs(returned, items):
    """What `run` returned, as something to iterate over; what cannot be one output per item is named."""
    if returned is None:
        raise _InvalidOutputs(f"run returned None; it must return or yield {items} outputs, one for each item")
    if isinstance(returned, (str, bytes, bytearray, dict, set, frozenset, Embedding, Json, Bytes, File, Uri)):
        raise _InvalidOutputs(f"run returned one {type(returned).__name__}; it must return or yield {items} outputs, "
                              "one for each item")
    if hasattr(returned, "iloc"):
        raise _InvalidOutputs(f"run returned one {type(returned).__name__}; it must return {items} outputs, one for each item, "
                              "as its .to_numpy() or .to_dict('records')")
    shape = getattr(returned, "shape", None)
    if shape is not None:
        if len(shape) < 2:
            numbers = "; return its .tolist() for a number for each item" if tuple(shape) == (items,) else ""
            raise _InvalidOutputs(f"run returned an array of shape {tuple(shape)}; it must have a row for each item{numbers}")
        if shape[0] != items:
            raise _InvalidOutputs(f"run returned an array of shape {tuple(shape)} for {items} items; "
                                  f"item {min(shape[0], items)} {'has none' if shape[0] < items else 'is not there'}")
        return _rows(returned)
    if isinstance(returned, collections.abc.Sized) and len(returned) != items:
        raise _InvalidOutputs(f"run returned {len(returned)} outputs for {items} items"
                              + (f"; item {len(returned)} has none" if len(returned) < items else ""))
    if not isinstance(returned, collections.abc.Iterable):
        raise _InvalidOutputs(f"run returned one {type(returned).__name__}; it must return or yield {items} outputs, "
                              "one for each item")
    return iter(returned)


def _rows(matrix):
    """The rows of an array; a tensor leaves the device once, not row by row."""
    if hasattr(matrix, "detach"):
        matrix = matrix.detach().cpu()
    matrix = _as_numpy(matrix)
    return (matrix[row] for row in range(matrix.shape[0]))


def _encode(value):
    """One output as a header and a payload."""
    if isinstance(value, Embedding):
        return _vector(value.values, value.dtype)
    if isinstance(value, Bytes):
        if not isinstance(value.data, (bytes, bytearray, memoryview)):
            raise _InvalidOutput(f"Bytes of {type(value.data).__name__}, not of bytes")
        return {"kind": "bytes", "media_type": _media_type(value)}, bytes(value.data)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"kind": "bytes", "media_type": "application/octet-stream"}, bytes(value)
    if isinstance(value, Uri):
        if not isinstance(value.uri, str) or not value.uri:
            raise _InvalidOutput("a Uri that is not a text")
        try:
            return {"kind": "uri"}, value.uri.encode()
        except UnicodeEncodeError as error:
            raise _InvalidOutput(f"a Uri that is not UTF-8: {error}") from None
    if isinstance(value, File):
        return _file(value)
    if isinstance(value, Json):
        return _json(value.value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        value = _as_numpy(value)
        if len(value.shape) == 0:
            return _json(value.item())
        return _vector(value, None)
    if value is None or isinstance(value, (str, bool, int, float, dict, list, tuple)):
        return _json(value)
    raise _InvalidOutput(f"{type(value).__module__}.{type(value).__name__} is not an output; return a vector, JSON values, "
                         "bytes, or vramq.Embedding, Json, Bytes, File, Uri")


def _as_numpy(array):
    """TensorFlow's tensors have no way to Python's values but this."""
    return array.numpy() if not hasattr(array, "tolist") and hasattr(array, "numpy") else array


def _media_type(value):
    """That of Bytes or a File. None, as `mimetypes` says of an unknown ending, is that of any bytes."""
    if value.media_type is None:
        return "application/octet-stream"
    if not isinstance(value.media_type, str):
        raise _InvalidOutput(f"a media type that is {type(value.media_type).__name__}, not a text")
    if not value.media_type:
        raise _InvalidOutput("an empty media type; None is that of any bytes")
    size = len(value.media_type.encode("utf-8", "replace"))
    if size > MEDIA_TYPE_BYTES_MAX:
        raise _InvalidOutput(f"a media type of {size} bytes; the limit is {MEDIA_TYPE_BYTES_MAX}")
    return value.media_type


def _json(value):
    try:
        _check_json(value)
        # As UTF-8, which a text that is none (a lone surrogate) cannot be.
        return {"kind": "json"}, json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _InvalidOutput(f"the value cannot be JSON: {error}") from None


def _check_json(value, depth=0, at=None):
    """Refuses what is no JSON, and what Python writes as JSON and other programs read as something else, or not at all. `at` is where
    the value is: where the one around it is, and the key or index in that.
    """
    if depth > JSON_DEPTH_MAX:
        raise ValueError(f"it is nested deeper than {JSON_DEPTH_MAX}")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} of {_where(at)} is {type(key).__name__}, and keys are texts")
            _check_json(inner, depth + 1, (at, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check_json(inner, depth + 1, (at, index))
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"{_where(at)} is an integer beyond 64 bits; send it as a text")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{_where(at)} is {value}, a number that JSON does not have; send None")
    elif value is not None and not isinstance(value, str):
        advice = "; send its .tolist()" if hasattr(value, "tolist") else ""
        raise TypeError(f"{_where(at)} is {type(value).__module__}.{type(value).__name__}{advice}")


def _where(at):
    """Where in an output a value is, as Python writes it."""
    keys = []
    while at is not None:
        at, key = at
        keys.append(f"[{repr(key)[:100]}]")
    return "".join(reversed(keys)) or "it"


def _file(value):
    if not isinstance(value.path, (str, bytes, os.PathLike)):
        raise _InvalidOutput(f"a File whose path is {type(value.path).__name__}, not a text")
    path, folder = os.fsdecode(value.path), _scratch()
    name = os.path.basename(path)
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), name):
        raise _InvalidOutput(f"the file {path} is not in the scratch folder {folder}")
    if not os.path.isfile(path):
        raise _InvalidOutput(f"there is no file {path}")
    return {"kind": "bytes", "media_type": _media_type(value), "file": name}, None


def _vector(values, dtype):
    shape = getattr(values, "shape", None)
    if shape is not None:
        if len(shape) != 1:
            raise _InvalidOutput(f"an array of shape {tuple(shape)}; a vector has one dimension. Return an image as vramq.Bytes, "
                                 "and another array as its .tolist()")
        known = ("float16", "float32", "float64", "bfloat16")
        # PyTorch's "torch.float32", Paddle's "paddle.float32", whose name is "FLOAT32".
        name = str(values.dtype).rpartition(".")[2]
        if name not in known:
            # NumPy shows the order of bytes (">f4"), TensorFlow "<dtype: 'float32'>".
            name = getattr(values.dtype, "name", name)
        if name not in known:
            raise _InvalidOutput(f"a vector of {name}; use float16 or float32, or return its .tolist() as JSON")
        dtype = dtype or ("f16" if name == "float16" else "f32")
        numpy = _loaded("numpy")
        # Of a masked array the bytes beneath the mask would go out.
        is_array = numpy is not None and isinstance(values, numpy.ndarray) and not isinstance(values, numpy.ma.MaskedArray)
        if is_array and len(values) and dtype in ("f16", "f32"):
            with numpy.errstate(over="ignore"):
                converted = values.astype("<f2" if dtype == "f16" else "<f4")
            if numpy.isfinite(converted).all():
                return {"kind": "embedding", "dtype": dtype}, converted.tobytes()
        # Names the element at fault.
        values = values.tolist()
    elif not isinstance(values, (list, tuple, array.array)):
        raise _InvalidOutput(f"Embedding of {type(values).__name__}, which is not a vector")
    if dtype not in (None, "f32", "f16"):
        raise _InvalidOutput(f"an embedding of dtype {dtype!r}; use 'f32' or 'f16'")
    dtype = dtype or "f32"
    if not len(values):
        raise _InvalidOutput("an embedding without elements")
    for index, number in enumerate(values):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise _InvalidOutput(f"element {index} of the embedding is {type(number).__name__}, which is not a number")
        try:
            is_finite = math.isfinite(number)
        except OverflowError:
            raise _InvalidOutput(f"element {index} of the embedding is an integer that does not fit {dtype}") from None
        if not is_finite:
            raise _InvalidOutput(f"element {index} of the embedding is {number}")
    try:
        packed = struct.pack(f"<{len(values)}{'e' if dtype == 'f16' else 'f'}", *values)
    except (OverflowError, struct.error) as error:
        raise _InvalidOutput(f"the embedding does not fit {dtype}: {error}") from None
    return {"kind": "embedding", "dtype": dtype}, packed


def _loaded(name):
    """A module, if the program has imported it: this file imports none."""
    return sys.modules.get(name)


def _torch_cuda():
    torch = _loaded("torch")
    try:
        return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
    except Exception:
        return None


def _free_caches():
    gc.collect()
    cuda = _torch_cuda()
    for free in (getattr(cuda, "synchronize", None), getattr(cuda, "empty_cache", None), _cupy_free):
        try:
            if free is not None:
                free()
        except Exception:
            # A device that cannot even free tells so at the next pass.
            pass


def _cupy_free():
    cupy = _loaded("cupy")
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def _reserved():
    """Device bytes that the framework holds, its cache included; None where no framework says."""
    cuda, cupy = _torch_cuda(), _loaded("cupy")
    try:
        if cuda is not None:
            return int(cuda.memory_reserved())
        if cupy is not None:
            return int(cupy.get_default_memory_pool().total_bytes())
    except Exception:
        pass
    return None


def _device_memory():
    cuda = _torch_cuda()
    try:
        return cuda.mem_get_info() if cuda is not None else (None, None)
    except Exception:
        return None, None


class _Peak:
    """The most device bytes that the framework holds during a pass, beyond what it held before."""

    def __init__(self):
        self.cuda, self.before = _torch_cuda(), _reserved()
        try:
            if self.cuda is not None:
                self.cuda.reset_peak_memory_stats()
        except Exception:
            self.cuda = None

    def bytes(self):
        try:
            if self.cuda is not None and self.before is not None:
                return max(0, int(self.cuda.max_memory_reserved()) - self.before)
        except Exception:
            pass
        return None


# How frameworks say that the device's memory ran out: module, type, text (None: any), and the name to report. A type of its own
# is enough; a general one needs the code, which frameworks put into the text.
_OUT_OF_MEMORY = [
    ("torch", "OutOfMemoryError", None, "torch"),
    ("torch", "AcceleratorError", r"(CUDA|HIP) error: out of memory|cudaErrorMemoryAllocation|hipErrorOutOfMemory", "torch"),
    ("", "RuntimeError", r"(CU|HIP)BLAS_STATUS_ALLOC_FAILED|rocblas_status_memory_error", "cublas"),
    ("", "RuntimeError", r"CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)|miopenStatusAllocFailed", "cudnn"),
    ("", "RuntimeError", r"(CUDA|HIP|XPU) (driver )?error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|"
                         r"hipErrorOutOfMemory|CUFFT_ALLOC_FAILED|CU(SOLVER|SPARSE)_STATUS_ALLOC_FAILED", "cuda"),
    ("", "RuntimeError", r"(CUDA|HIP|MPS|XPU)( backend)? out of memory", "torch"),
    # RAPIDS and Paddle raise this of the host for the device, too.
    ("", "MemoryError", r"cudaErrorMemoryAllocation|Out of memory error on GPU", "cuda"),
    ("pycuda", "MemoryError", None, "pycuda"),
    ("", "RuntimeError", r"(CUDA|HIP) failed with error out of memory", "ctranslate2"),
    ("", "XlaRuntimeError", r"RESOURCE_EXHAUSTED", "jax"),
    ("", "JaxRuntimeError", r"RESOURCE_EXHAUSTED", "jax"),
    ("onnxruntime", "", r"Failed to allocate memory|BFCArena|CUDA failure 2\b|out of memory", "onnxruntime"),
    ("cupy", "OutOfMemoryError", None, "cupy"),
    ("cupy", "CUDARuntimeError", r"cudaErrorMemoryAllocation", "cupy"),
    ("tensorflow", "ResourceExhaustedError", None, "tensorflow"),
    ("numba", "CudaAPIError", r"\[2\]|OUT_OF_MEMORY", "numba"),
]

# How they say that the device is lost to this process: each later call fails, too. Python's own errors but RuntimeError are left
# out, and those of other libraries: the text of one that checks values has what a caller sent. A RuntimeError may be about something
# else, too: a browser's launch that timed out, a camera that is busy or unavailable.
_LOST = re.compile(
    r"illegal memory access|illegal instruction was encountered|device-side assert|unspecified launch failure|"
    r"launch timed out and was terminated|misaligned address|global/shared address space|uncorrectable (ECC|NVLink) error|"
    r"GPU is lost|[dD]evicesUnavailable|CUDA-capable devices?\S* \S+ busy or unavailable|CUDA_ERROR_ILLEGAL_ADDRESS|"
    r"hardware stack error|invalid program counter|(CUDA|HIP)( driver)? error: unknown error"
)
_OF_DEVICES = ("torch", "onnxruntime", "tensorflow", "jax", "cupy", "numba", "pycuda", "tensorrt", "paddle", "ctranslate2")


def _chain(error):
    """An exception, those that it came from, and those that it groups, once each."""
    seen, left = [], [error]
    while left:
        error = left.pop(0)
        if error is None or any(error is other for other in seen):
            continue
        seen.append(error)
        left.append(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
        left.extend(_members(error))
    return seen


def _members(error):
    """The exceptions that one groups."""
    try:
        members = getattr(error, "exceptions", None)
    except Exception:
        # A class may look its attributes up elsewhere, and raise something else for one that is not there.
        members = None
    return [member for member in members if isinstance(member, BaseException)] if isinstance(members, (list, tuple)) else []


def _out_of_memory(error):
    """The report, if an exception, or one that it came from, is the device's memory running out."""
    if isinstance(error, (InvalidInput, _InvalidOutput, Cancelled)):
        return None
    for cause in _chain(error):
        if isinstance(cause, OutOfMemory):
            item = cause.item.index if isinstance(cause.item, Item) else cause.item
            return {"item": item, "asked": _amount(cause.asked), "free": _amount(cause.free),
                    "total": _amount(cause.total), "where": str(cause.where)[:100]}
        where = _framework(cause)
        if where is not None:
            text = _text(cause)
            return {
                "item": None,
                "asked": _size(text, r"(?:[Tt]ried to allocate|requested|allocate(?: memory for requested buffer of size)?|"
                                     r"[Aa]llocating) ([\d.,]+) ?([KMGT]i?B|bytes|B)?"),
                "free": _size(text, r"of which ([\d.,]+) ?([KMGT]i?B|bytes|B) is free"),
                "total": _size(text, r"total capacity of ([\d.,]+) ?([KMGT]i?B|bytes|B)"),
                "where": where,
            }
    return None


def _amount(number):
    """A number of bytes, from what a model gave as one: a float or a NumPy integer, too; None where it is none."""
    try:
        return min(max(int(number), 0), (1 << 63) - 1)
    except (TypeError, ValueError, OverflowError):
        return None


def _framework(error):
    text = None
    for kind in type(error).__mro__:
        for module, name, pattern, where in _OUT_OF_MEMORY:
            if (name and kind.__name__ != name) or not kind.__module__.startswith(module):
                continue
            if pattern is None:
                return where
            text = _text(error) if text is None else text
            if re.search(pattern, text):
                return where
    return None


def _is_disk_full(error):
    """Whether an exception, or one that it came from, is that the disk of the scratch folder, or a quota, had no room.

    Limits of the kernel have the same error, such as that of watched files, and so have other file systems that are full, such as
    /dev/shm. Those do not become free by waiting.
    """
    causes = [cause for cause in _chain(error) if isinstance(cause, OSError)]
    if any(cause.errno == errno.EDQUOT for cause in causes):
        return True
    causes = [cause for cause in causes if cause.errno == errno.ENOSPC]
    return any(_is_in_scratch(cause.filename) for cause in causes) or (bool(causes) and not _has_scratch_room())


def _is_in_scratch(path):
    try:
        return os.path.abspath(os.fsdecode(path)).startswith(os.path.join(os.path.abspath(_scratch()), ""))
    except Exception:
        # Most errors name no file, and a program may put anything there.
        return False


def _has_scratch_room():
    """Whether the file system of the scratch folder has room. One that cannot be asked, or that has no blocks, is not known to be full."""
    try:
        system = os.statvfs(_scratch())
    except OSError:
        return True
    if system.f_files > 0 and system.f_favail == 0:
        return False
    total = system.f_blocks * system.f_frsize
    return total == 0 or system.f_bavail * system.f_frsize >= min(total // DISK_FREE_PART, DISK_FREE_MAX)


def _is_host_memory(error, text):
    """Whether the host's memory ran out: Python's own error, or the words of PyTorch and of libraries in C++ such as ONNX Runtime."""
    is_of_library = _speaks_of_devices(error) and "std::bad_alloc" in text
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in text or is_of_library


def _speaks_of_devices(error):
    return isinstance(error, RuntimeError) or type(error).__module__.startswith(_OF_DEVICES)


def _is_device_lost(error):
    return any(_speaks_of_devices(cause) and _LOST.search(_text(cause)) for cause in _chain(error))


def _is_device_dead():
    """Whether the device answers this process with such an error now. A kernel's error comes late: what the pass failed with may have
    been something else, and the next pass would fail with it.
    """
    runtime = getattr(getattr(_loaded("cupy"), "cuda", None), "runtime", None)
    for wait in (getattr(_torch_cuda(), "synchronize", None), getattr(runtime, "deviceSynchronize", None)):
        try:
            if wait is not None:
                wait()
        except Exception as error:
            if _LOST.search(_text(error)):
                return True
    return False


def _size(text, pattern):
    found = re.search(pattern, text)
    if found is None:
        return None
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    unit = units.get((found.group(2) or "B")[0], 1)
    try:
        return _amount(float(found.group(1).replace(",", "").rstrip(".")) * unit)
    except ValueError:
        return None
