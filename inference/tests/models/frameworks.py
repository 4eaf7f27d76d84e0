"""Raises what frameworks raise. Their types are made by name, so that the tests need none of them."""

import os
import sys
import types
import weakref

import vramq


def error(module, name, base=RuntimeError):
    return type(name, (base,), {"__module__": module})


class Group(Exception):
    """As ExceptionGroup of Python 3.11."""

    def __init__(self, message, exceptions):
        super().__init__(message)
        self.exceptions = exceptions


class LateCuda:
    """torch.cuda, after a kernel that failed."""

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def synchronize():
        raise RuntimeError("CUDA error: device-side assert triggered")


def because(error, cause):
    error.__cause__ = cause
    return error


Torch = error("torch", "OutOfMemoryError")
TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 512.00 MiB is free."
JAX = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."
ONNX = "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 1073741824"
CASES = {
    "torch": lambda: Torch(TORCH),
    "torch-old": lambda: RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.79 GiB total capacity)"),
    "torch-subclass": lambda: type("Ours", (Torch,), {})("no room"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuda": lambda: RuntimeError("CUDA error: out of memory"),
    "ctranslate2": lambda: RuntimeError("CUDA failed with error out of memory"),
    "jax": lambda: error("jaxlib.xla_extension", "XlaRuntimeError")(JAX),
    "onnxruntime": lambda: error("onnxruntime.capi.onnxruntime_pybind11_state", "RuntimeException")(ONNX),
    "cupy": lambda: error("cupy.cuda.memory", "OutOfMemoryError", MemoryError)("Out of memory allocating 512 bytes"),
    "tensorflow": lambda: error("tensorflow.python.framework.errors_impl", "ResourceExhaustedError")("OOM"),
    "numba": lambda: error("numba.cuda.cudadrv.driver", "CudaAPIError")("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    "hip": lambda: RuntimeError("HIP error: out of memory"),
    "torch-hip": lambda: Torch("HIP out of memory. Tried to allocate 20.00 MiB."),
    "torch-accelerator": lambda: error("torch", "AcceleratorError")("CUDA error: out of memory"),
    "mps": lambda: RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB). Tried to allocate 1.00 GB on private pool."),
    "cufft": lambda: error("cupy_backends.cuda.libs.cufft", "CUFFTError")("CUFFT_ALLOC_FAILED"),
    "rapids": lambda: MemoryError("std::bad_alloc: out_of_memory: CUDA error: cudaErrorMemoryAllocation out of memory"),
    "paddle": lambda: MemoryError("ResourceExhaustedError: Out of memory error on GPU 0. Cannot allocate 2.0GB memory on GPU 0"),
    "pycuda": lambda: error("pycuda._driver", "MemoryError", Exception)("cuMemAlloc failed: out of memory"),
    "torch-huge": lambda: Torch("CUDA out of memory. Tried to allocate " + "9" * 400 + " GiB."),
    "jax-huge": lambda: error("jaxlib", "XlaRuntimeError")("RESOURCE_EXHAUSTED: Out of memory allocating 99999999999999999999999 bytes."),
    "group": lambda: Group("two tasks failed", [ValueError("one"), Torch(TORCH)]),
    "host": lambda: MemoryError(),
    "host-torch": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    "host-onnxruntime": lambda: error("onnxruntime.capi.onnxruntime_pybind11_state", "RuntimeException", Exception)(
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Expand node. Status Message: std::bad_alloc"),
    "plain": lambda: ValueError("a bad day"),
    "talks-of-host": lambda: ValueError("std::bad_alloc, says the text of the user"),
    "talks-of-it": lambda: ValueError("CUDA out of memory, says the text of the user"),
    "talks-of-loss": lambda: ValueError("an illegal memory access, says the text of the user"),
    "lost-onnxruntime": lambda: error("onnxruntime.capi.onnxruntime_pybind11_state", "Fail", Exception)(
        "CUDA failure 700: an illegal memory access was encountered ; GPU=0"),
    "lost-tensorflow": lambda: error("tensorflow.python.framework.errors_impl", "InternalError", Exception)(
        "Failed to copy: CUDA_ERROR_ILLEGAL_ADDRESS"),
    "lost-numba": lambda: error("numba.cuda.cudadrv.driver", "CudaAPIError", Exception)(
        "[719] Call to cuMemcpyDtoH results in CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
    "lost-timeout": lambda: RuntimeError("CUDA error: the launch timed out and was terminated"),
    "lost-busy": lambda: RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable"),
    "lost-busy-newer": lambda: RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    "lost-ecc": lambda: RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    "lost-unknown": lambda: RuntimeError("CUDA error: unknown error"),
    "lost-unknown-driver": lambda: RuntimeError("CUDA driver error: unknown error"),
    "talks-of-launch": lambda: RuntimeError("browser launch timed out after 30000 ms"),
    "talks-of-busy": lambda: RuntimeError("/dev/video0 is busy or unavailable"),
    "talks-of-ecc": lambda: RuntimeError("barcode: ECC error"),
    "talks-of-unknown": lambda: RuntimeError("unknown error in s3://bucket/illegal-memory-access"),
    "invalid-because": lambda: because(vramq.InvalidInput("no barcode"), RuntimeError("barcode: an illegal memory access in the name")),
}


class Tensor:
    pass


class Frameworks(vramq.Model):
    seen = None

    def run(self, items, params):
        case = items[0].text
        if case == "pid":
            return [os.getpid()]
        if case == "held":
            return [int(self.seen() is not None)]
        tensor = Tensor()
        # A cycle, which only the collector frees.
        tensor.self = tensor
        self.seen = weakref.ref(tensor)
        if case == "wrapped":
            try:
                raise Torch(TORCH)
            except Torch as cause:
                raise ValueError("the pipeline failed") from cause
        if case in ("lost-late", "lost-late-invalid"):
            sys.modules["torch"] = types.SimpleNamespace(cuda=LateCuda)
            raise vramq.InvalidInput("not for me", items[0]) if case == "lost-late-invalid" else ValueError("a bad day")
        if case == "suppressed":
            try:
                raise Torch(TORCH)
            except Torch:
                raise ValueError("something else") from None
        raise CASES[case]()


vramq.serve(Frameworks)
