"""A program that takes memory of a CUDA device through the driver, as frameworks do: the tests run it on a fake driver."""

import ctypes
import os
import signal
import time

import vramq

MIB = 1 << 20
OUT_OF_MEMORY = 2


class Cuda:
    """The only device that this process sees, with a context on it."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, function, *arguments):
        code = getattr(self.driver, function)(*arguments)
        if code == OUT_OF_MEMORY:
            raise vramq.OutOfMemory(function, where="fake driver")
        if code:
            raise ValueError(f"{function}: {code}")

    def take(self, size):
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def give(self, pointer):
        self.call("cuMemFree_v2", pointer)


class OnGpu(vramq.Model):
    def load(self, device):
        self.device = device
        # Programs that use the CPU alone have no context on the device.
        if int(os.environ["BASE_MIB"]):
            self.cuda = Cuda()
            self.cuda.take(int(os.environ["BASE_MIB"]) * MIB)
        # The test lets a neighbour take memory now.
        folder = os.environ["FOLDER"]
        with open(os.path.join(folder, "taken"), "w"):
            pass
        while not os.path.exists(os.path.join(folder, "go")):
            time.sleep(0.01)

    def run(self, items, params):
        for item in items:
            word, _, rest = item.text.partition(" ")
            yield getattr(self, "do_" + word)(rest)

    def do_where(self, rest):
        return {"device": self.device, "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid()}

    def do_take(self, rest):
        """Takes MiB, and gives them back. The worker looks every 20 ms; a busy machine may keep it from that for a while."""
        taken = self.cuda.take(int(rest) * MIB)
        time.sleep(1.5)
        self.cuda.give(taken)
        return {"pid": os.getpid()}

    def do_bequeath(self, rest):
        """The first time: dies, and from here on others hold so many MiB."""
        if not os.path.exists(os.path.join(os.environ["FOLDER"], "bequeathed")):
            with open(os.path.join(os.environ["FOLDER"], "bequeathed"), "w"):
                pass
            with open(os.environ["FAKE_CUDA_FOREIGN"], "w") as file:
                file.write(str(int(rest) * MIB))
            os.kill(os.getpid(), signal.SIGKILL)
        return {"pid": os.getpid()}


vramq.serve(OnGpu)
