"""A program that is rough with the SDK, as programs are: what its items name."""

import dataclasses
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time

import vramq

# For downloads. Each new socket has it from here on, the connection to the worker too.
socket.setdefaulttimeout(0.2)


class PanicException(BaseException):
    """As panics of libraries in Rust come: no Exception."""


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every assignment to its attributes."""

    why: str


class LooksUp(Exception):
    """Has no attribute that it does not find, and says so with another error than AttributeError."""

    def __getattr__(self, name):
        return {}[name]


class TooMany(vramq.InvalidInput):
    """Does not call the constructor of the SDK's class."""

    def __init__(self, words):
        self.words = words

    def __str__(self):
        return f"{self.words} words"


class TooLong(vramq.InvalidInput):
    """Names its item, without the constructor."""

    def __init__(self, item):
        self.item = item

    def __str__(self):
        return "a long text"


class NoRoom(vramq.OutOfMemory):
    def __init__(self, cause):
        self.cause = cause


class NoFlush:
    def write(self, text):
        return len(text)


class Rough(vramq.Model):
    late = None

    def load(self, device):
        how = os.environ.get("LOAD", "")
        if how == "exit":
            sys.exit("no such option: --models")
        if how == "progress":
            self.progress(0, 0.5, "half of the download")
        if how == "accepts":
            self.accepts = "text"
        if how == "weights":
            # The name of a method of the SDK.
            self.weights = {"layer": [0.5]}
        if how == "handler":
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))

    def trim(self):
        raise ValueError("nothing to trim")

    def run(self, items, params):
        if items[0].text == "taken":
            taken = []
            while items:
                taken.append(items.pop(0).index)
            return taken
        return [getattr(self, "do_" + item.text)(item) for item in items]

    def do_pid(self, item):
        return os.getpid()

    def do_doze(self, item):
        """Longer than the default of sockets."""
        time.sleep(0.6)

    def do_sleep(self, item):
        time.sleep(1000)

    def do_exit(self, item):
        sys.exit("no such option: --fast")

    def do_panic(self, item):
        raise PanicException("index out of bounds: the len is 3 but the index is 7")

    def do_cancelled(self, item):
        raise vramq.Cancelled

    def do_unprintable(self, item):
        raise Unprintable

    def do_frozen(self, item):
        raise Frozen("a caption")

    def do_looks_up(self, item):
        raise LooksUp("a body")

    def do_too_many(self, item):
        raise TooMany(7)

    def do_too_long(self, item):
        raise TooLong(item)

    def do_no_room(self, item):
        """Comes from an exception that refuses to let go of its traceback."""
        try:
            raise Frozen("a caption")
        except Frozen as error:
            raise NoRoom(error)

    def do_name(self, item):
        raise FileNotFoundError("no file a\udc80b")

    def do_note(self, item):
        self.progress(item, 1.0, "a\udc80b")
        self.progress(item, float("nan"))

    def do_elsewhere(self, item):
        self.progress(7, 1.0)

    def do_late(self, item):
        """Reports progress when the pass is over: of its own item, and of whichever is the first then."""
        number = self._session.running

        def report():
            while self._session.running == number:
                time.sleep(0.001)
            self.progress(item, 1.0, "late")
            self.progress(0, 1.0, "late")

        self.late = threading.Thread(target=report)
        self.late.start()

    def do_join(self, item):
        self.late.join()

    def do_flush(self, item):
        sys.stdout = NoFlush()
        sys.stderr = object()

    def do_fork(self, item):
        """Both processes come back, the new one first."""
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        return child > 0

    def do_fork_raise(self, item):
        child = os.fork()
        if child == 0:
            raise ValueError("in the fork")
        os.waitpid(child, 0)

    def do_fork_amid_progress(self, item):
        """While another thread sends progress: in the new process there is nobody who would release the lock."""
        sending, forked = threading.Event(), threading.Event()

        def send():
            with self._session.turn:
                sending.set()
                forked.wait()

        thread = threading.Thread(target=send)
        thread.start()
        sending.wait()
        child = os.fork()
        if child == 0:
            raise ValueError("in the fork")
        os.waitpid(child, 0)
        forked.set()
        thread.join()

    def do_spawn(self, item):
        """The new process imports this program once more."""
        child = multiprocessing.get_context("spawn").Process(target=os.getpid)
        child.start()
        child.join()
        return child.exitcode

    def do_full(self, item):
        """No file can be larger, as on a full disk."""
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
        return b"x" * (20 << 20)

    def do_scratch(self, item):
        return os.listdir(self.scratch)


class NoModel:
    def run(self, items, params):
        return [None for item in items]


class NoRun(vramq.Model):
    pass


class NoParams(vramq.Model):
    def run(self, items):
        return [None for item in items]


class NoDevice(vramq.Model):
    def load(self):
        pass

    def run(self, items, params):
        return [None for item in items]


MISTAKES = {"no-model": NoModel, "no-run": NoRun, "no-params": NoParams, "no-device": NoDevice}
HOW = os.environ.get("LOAD")
if HOW != "not-served":
    vramq.serve(MISTAKES.get(HOW, Rough))
