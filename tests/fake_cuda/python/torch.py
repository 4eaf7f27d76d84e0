"""As much of PyTorch as tests/gpu/pytorch_program.py uses, on the fake driver: for the test of the script that runs it."""

import ctypes
import types

uint8 = "uint8"
OUT_OF_MEMORY = 2

driver = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()


class OutOfMemoryError(RuntimeError):
    pass


def call(function, *arguments):
    code = getattr(driver, function)(*arguments)
    if code == OUT_OF_MEMORY:
        raise OutOfMemoryError("CUDA out of memory.")
    if code:
        raise RuntimeError(f"CUDA error: {function}: {code}")


def start():
    if not context:
        call("cuInit", 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)


class Tensor:
    def __init__(self, size):
        start()
        self.pointer = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(size))

    def __del__(self):
        if self.pointer:
            call("cuMemFree_v2", self.pointer)


def empty(size, dtype, device):
    return Tensor(size)


zeros = empty


def is_available():
    return driver.cuInit(0) == 0


def mem_get_info():
    start()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


# The SDK asks a device that is in use.
cuda = types.SimpleNamespace(is_available=is_available, mem_get_info=mem_get_info, is_initialized=lambda: bool(context),
                             OutOfMemoryError=OutOfMemoryError)
OutOfMemoryError.__module__ = "torch"
