"""A model that does what its items say: the tests' hands inside a process."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time

import vramq
from device import Device

MIB = 1 << 20


class Probe(vramq.Model):
    device = None
    kept = 0

    def load(self, device):
        how = os.environ.get("LOAD", "")
        print("loading", how, flush=True)
        if how == "hang":
            if "FILE" in os.environ:
                with open(os.environ["FILE"], "w"):
                    pass
            time.sleep(1000)
        if how == "fail":
            raise ValueError("no weights here")
        if how == "oom":
            raise vramq.OutOfMemory("no room for the weights", asked=7)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "needs-file" and not os.path.exists(os.environ["FILE"]):
            raise ValueError("the file is not there")
        while how == "while-file" and os.path.exists(os.environ["FILE"]):
            time.sleep(0.01)
        if "DEVICE" in os.environ:
            self.device = Device(os.environ["DEVICE"])
            self.device.take(int(os.environ.get("BASE_MIB", "0")) * MIB)
        if how == "heir" and os.path.exists(os.environ["FILE"]):
            with open(os.environ["FILE"]) as file:
                heir = int(file.read())
            while os.path.exists(os.environ["FILE"]):
                time.sleep(0.01)
            self.device.bequeath(int(os.environ["BASE_MIB"]) * MIB, heir)
            os.kill(os.getpid(), signal.SIGKILL)
        while how == "holds-while-file" and os.path.exists(os.environ["FILE"]):
            time.sleep(0.01)

    def weights(self):
        return int(os.environ.get("WEIGHTS_MIB", "0")) * MIB

    def run(self, items, params):
        for item in items:
            word, _, rest = item.text.partition(" ") if item.kind == "text" else (item.kind, "", "")
            yield getattr(self, "do_" + word)(item, rest, params)

    def do_echo(self, item, rest, params):
        return rest

    def do_pid(self, item, rest, params):
        return os.getpid()

    def do_env(self, item, rest, params):
        return dict(os.environ)

    def do_params(self, item, rest, params):
        return {"params": params, "budget": self.budget, "left": self.deadline - time.monotonic()}

    def do_sleep(self, item, rest, params):
        began = time.monotonic()
        while time.monotonic() < began + float(rest):
            time.sleep(0.01)
            self.check()
        return [began, time.monotonic()]

    def do_until(self, item, rest, params):
        """Runs until there is such a file."""
        while not os.path.exists(rest):
            time.sleep(0.01)
            self.check()

    def do_deaf(self, item, rest, params):
        """Hears neither cancel nor SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)

    def do_kill(self, item, rest, params):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_exit(self, item, rest, params):
        print("last words", file=sys.stderr, flush=True)
        os._exit(int(rest))

    def do_abort(self, item, rest, params):
        """As a library in C++ does."""
        os.write(2, rest.encode())
        os.abort()

    def do_say(self, item, rest, params):
        os.write(2, rest.encode())

    def do_murmur(self, item, rest, params):
        """Prints what stays in a buffer."""
        print(rest)

    def do_print(self, item, rest, params):
        line = "x" * 99 + "\n"
        for _ in range(int(rest) // 100):
            sys.stdout.write(line)
        sys.stdout.flush()
        print("printed", file=sys.stderr, flush=True)
        return True

    def do_raise(self, item, rest, params):
        raise ValueError(rest)

    def do_input(self, item, rest, params):
        raise vramq.InvalidInput(rest, item)

    def do_unfit(self, item, rest, params):
        """One of the items is invalid: this one is not said, or is said to be what follows."""
        raise vramq.InvalidInput("one of them", {"": None, "second": 1, "before": -1, "after": 99, "text": "0"}[rest])

    def do_oom(self, item, rest, params):
        raise vramq.OutOfMemory("the tests say so", asked=3, free=2, total=1, item=item)

    def do_oom_of(self, item, rest, params):
        """Asks for a float of bytes, as arithmetic gives it."""
        raise vramq.OutOfMemory(asked=float(rest))

    def do_value(self, item, rest, params):
        """Any value that Python can write."""
        return eval(rest)

    def do_lost(self, item, rest, params):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def do_progress(self, item, rest, params):
        for step in range(1, 6):
            self.progress(item, step / 5, f"step {step}")
            time.sleep(0.11)
        return rest

    def do_progress_of_all(self, item, rest, params):
        """Reports on so many items of the pass, three times."""
        for step in range(1, 4):
            for index in range(int(rest)):
                self.progress(index, step / 10, f"step {step}")
            time.sleep(0.11)
        return rest

    def do_progress_of_a_thread(self, item, rest, params):
        """Reports in a thread, by the item and by its index; what the second is told."""
        said = []

        def report():
            self.progress(item, 0.5)
            try:
                self.progress(0, 0.6)
            except ValueError as error:
                said.append(str(error))

        thread = threading.Thread(target=report)
        thread.start()
        thread.join()
        return said

    def do_take(self, item, rest, params):
        """Takes MiB of the device, and gives them back."""
        size = int(rest) * MIB
        self.device.take(size)
        time.sleep(float(params.get("hold", 0.1)))
        self.device.give(size)
        return rest

    def do_keep(self, item, rest, params):
        """Takes MiB of the device and keeps them for the next pass, as an allocator with a cache does."""
        more = int(rest) * MIB - self.kept
        if more > 0:
            self.device.take(more)
            self.kept += more
        return rest

    def trim(self):
        if self.kept:
            self.device.give(self.kept)
            self.kept = 0

    def do_leak(self, item, rest, params):
        """Takes MiB of the device for good."""
        self.device.take(int(rest) * MIB)
        return os.getpid()

    def do_bequeath(self, item, rest, params):
        size, pid = rest.split()
        self.device.bequeath(int(size) * MIB, int(pid))
        os.kill(os.getpid(), signal.SIGKILL)

    def do_fork(self, item, rest, params):
        """A child that holds the socket, one in a session of its own, and one whose parent is dead."""
        read, write = os.pipe()
        for kind in ("plain", "session", "orphan"):
            if os.fork() == 0:
                if kind == "session":
                    os.setsid()
                if kind == "orphan":
                    os.setsid()
                    if os.fork():
                        os._exit(0)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.write(write, f"{os.getpid()} ".encode())
                time.sleep(1000)
        pids = b""
        while pids.count(b" ") < 3:
            pids += os.read(read, 100)
        return [int(pid) for pid in pids.split()]

    def do_unmarked(self, item, rest, params):
        """A child in a session of its own, whose environment does not say where it comes from."""
        return subprocess.Popen(["/bin/sleep", "1000"], env={}, start_new_session=True).pid

    def do_self(self, item, rest, params):
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        return {
            "sid": os.getsid(0), "pgid": os.getpgid(0), "pid": os.getpid(), "folder": os.getcwd(),
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "ignored": [int(s) for s in signals if signal.getsignal(s) == signal.SIG_IGN],
            "descriptors": {name: self.link(name) for name in os.listdir("/proc/self/fd")},
        }

    def link(self, name):
        try:
            return os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            return ""

    def do_host(self, item, rest, params):
        """Holds MiB of the host's memory."""
        held = bytearray(int(rest) * MIB)
        for at in range(0, len(held), 4096):
            held[at] = 1
        time.sleep(100)

    def do_scratch(self, item, rest, params):
        with open(os.path.join(self.scratch, "left-behind"), "w") as file:
            file.write("x")
        return self.scratch

    def do_big(self, item, rest, params):
        return vramq.Bytes(b"b" * int(rest), "application/x-big")

    def do_file(self, item, rest, params):
        path = os.path.join(self.scratch, "result.bin")
        with open(path, "wb") as file:
            file.write(rest.encode())
        return vramq.File(path, "text/plain")

    def do_write(self, item, rest, params):
        """Writes to a file. `/dev/full` has no room, whatever the disk has."""
        with open(rest, "wb") as file:
            file.write(b"x")
        return rest

    def do_fill(self, item, rest, params):
        """Writes MiB into the scratch folder, and keeps what there was room for."""
        with open(os.path.join(self.scratch, "fill"), "wb") as file:
            file.write(b"x" * (int(rest) * MIB))
        return rest

    def do_bytes(self, item, rest, params):
        with open(item.path, "rb") as file:
            data = file.read()
        assert data == item.bytes
        return {"bytes": len(data), "sum": sum(data[:1000]), "media_type": item.media_type}

    def do_json(self, item, rest, params):
        return item.json

    def do_uri(self, item, rest, params):
        return item.uri


vramq.serve(Probe)
