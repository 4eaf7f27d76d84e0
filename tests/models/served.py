"""The model of the end-to-end tests of process models: does what its items say, and says how it was done."""

import os
import signal
import sys
import time

import vramq
from device import Device

MIB = 1 << 20


class Served(vramq.Model):
    device = None
    kept = 0

    def load(self, device):
        self.folder = os.environ["FOLDER"]
        self.revision = os.environ.get("REVISION")
        if os.path.exists(os.path.join(self.folder, "revision")):
            with open(os.path.join(self.folder, "revision")) as file:
                self.revision = file.read()
        if "ACCEPTS" in os.environ:
            self.accepts = os.environ["ACCEPTS"].split()
        if os.environ.get("LOAD") == "hang":
            print("looking for weights", file=sys.stderr, flush=True)
            time.sleep(1000)
        if not os.path.exists(os.path.join(self.folder, "weights")):
            raise ValueError("the weights are gone")
        if "DEVICE" in os.environ:
            self.device = Device(os.environ["DEVICE"])
            self.device.take(int(os.environ["BASE_MIB"]) * MIB)

    def run(self, items, params):
        for at, item in enumerate(items):
            if at >= params.get("fits", len(items)):
                raise vramq.OutOfMemory("too many items", asked=3 * MIB, free=2 * MIB, total=9 * MIB, item=item)
            if item.kind == "json":
                yield {"json": item.json}
                continue
            if item.kind == "bytes":
                yield {"bytes": item.bytes.hex()}
                continue
            word, _, rest = item.text.partition(" ")
            if word == "skip":
                continue
            if word == "again":
                yield None
                word = "echo"
            answer = getattr(self, "do_" + word)(rest, item)
            if word == "span":
                answer["items"] = len(items)
            yield answer or {"text": rest, "pid": os.getpid(), "items": len(items)}

    def do_echo(self, rest, item):
        pass

    def do_fill(self, rest, item):
        """Answers with so many MiB."""
        return bytes(int(rest) * MIB)

    def do_exhaust(self, rest, item):
        """Runs out of memory, and does not say how much it asked for."""
        raise vramq.OutOfMemory(rest, where="vae")

    def do_wait(self, rest, item):
        """Until there is a file of this name."""
        while not os.path.exists(os.path.join(self.folder, rest)):
            time.sleep(0.01)

    def do_heed(self, rest, item):
        """Until its pass is cancelled, or there is a file `.go`. Makes a file of this name when it begins, and `.cancelled` when it hears of
        that."""
        with open(os.path.join(self.folder, rest), "w"):
            pass
        try:
            while not os.path.exists(os.path.join(self.folder, rest + ".go")):
                time.sleep(0.01)
                self.check()
        except vramq.Cancelled:
            with open(os.path.join(self.folder, rest + ".cancelled"), "w"):
                pass
            raise

    def do_ignore(self, rest, item):
        """Makes a file of this name, and never looks whether its pass is cancelled."""
        with open(os.path.join(self.folder, rest), "w"):
            pass
        while True:
            time.sleep(1)

    def do_refuse(self, rest, item):
        raise vramq.InvalidInput(rest, item)

    def do_refuse_one(self, rest, item):
        raise vramq.InvalidInput(rest)

    def do_babble(self, rest, item):
        """Prints megabytes, and fails."""
        line = "x" * 99 + "\n"
        for _ in range(int(rest) * 10_000):
            sys.stdout.write(line)
        raise ValueError("what went wrong")

    def do_garble(self, rest, item):
        """Says to the worker what is no frame."""
        os.write(int(os.environ["VRAMQ_FD"]), b"garbage that is no frame")

    def do_write(self, rest, item):
        """Writes to a file of this name, by a link in the scratch folder, and says where there was no room."""
        link = os.path.join(self.scratch, rest)
        if not os.path.islink(link):
            os.symlink(os.path.join(self.folder, rest), link)
        try:
            with open(link, "wb") as file:
                file.write(b"x")
        except OSError as error:
            error.filename = link
            raise

    def do_sleep(self, rest, item):
        time.sleep(float(rest))

    def do_span(self, rest, item):
        """Sleeps, and says when it did, by the clock of all processes."""
        began = time.monotonic()
        time.sleep(float(rest.split()[0]))
        return {"began": began, "ended": time.monotonic()}

    def do_keep(self, rest, item):
        """Takes MiB of the device, and keeps them for the next pass, as an allocator with a cache does."""
        more = int(rest) * MIB - self.kept
        if more > 0:
            self.device.take(more)
            self.kept += more
        time.sleep(0.3)

    def trim(self):
        if self.kept:
            self.device.give(self.kept)
            self.kept = 0

    def do_steps(self, rest, item):
        """Reports far more often than a caller gets a reply."""
        steps = int(rest)
        for step in range(steps):
            self.progress(item, step / steps, f"step {step} of {steps}")
            time.sleep(0.02)

    def do_show(self, rest, item):
        """Writes its process id into a file, and the first time waits to be killed."""
        path = os.path.join(self.folder, rest)
        is_first = not os.path.exists(path)
        with open(path + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(path + ".new", path)
        if is_first:
            time.sleep(1000)

    def do_kill(self, rest, item):
        print("killed by " + rest, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def do_bequeath(self, rest, item):
        """The first time: dies, and what it holds of the device, another process holds from here on."""
        path = os.path.join(self.folder, "bequeathed")
        if not os.path.exists(path):
            with open(path, "w"):
                pass
            self.device.bequeath(int(os.environ["BASE_MIB"]) * MIB, int(rest))
            os.kill(os.getpid(), signal.SIGKILL)


vramq.serve(Served)
