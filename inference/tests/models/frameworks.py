"""Raises what frameworks raise. Their types are made by name, so that the tests need none of them."""

import os
import weakref

import vramq


def error(module, name, base=RuntimeError):
    return type(name, (base,), {"__module__": module})


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
    "host": lambda: MemoryError(),
    "host-torch": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    "plain": lambda: ValueError("a bad day"),
    "talks-of-it": lambda: ValueError("CUDA out of memory, says the text of the user"),
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
        if case == "suppressed":
            try:
                raise Torch(TORCH)
            except Torch:
                raise ValueError("something else") from None
        raise CASES[case]()


vramq.serve(Frameworks)
