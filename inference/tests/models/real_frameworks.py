"""Runs out of memory in PyTorch, NumPy and ONNX Runtime themselves: their own errors, by their own types."""

import os

import numpy
import onnxruntime
import torch

import vramq
from onnx import TensorProto, helper

# More than any address space has.
PEBIBYTE = 1 << 50

ON_GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 512.00 MiB is free."


def expand(arena):
    """A session whose only node makes a tensor of the shape that it is given."""
    node = helper.make_node("ConstantOfShape", ["shape"], ["out"])
    graph = helper.make_graph(
        [node], "expand", [helper.make_tensor_value_info("shape", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [None])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena = arena
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class RealFrameworks(vramq.Model):
    def load(self, device):
        self.sessions = {"onnx-arena": expand(True), "onnx": expand(False)}

    def run(self, items, params):
        return [getattr(self, "do_" + item.text.replace("-", "_"))(item.text) for item in items]

    def do_pid(self, text):
        return os.getpid()

    def do_torch_class(self, text):
        raise torch.OutOfMemoryError(ON_GPU)

    def do_torch_cuda_class(self, text):
        raise torch.cuda.OutOfMemoryError(ON_GPU)

    def do_torch_accelerator(self, text):
        raise torch.AcceleratorError("CUDA error: out of memory")

    def do_torch_cpu(self, text):
        return torch.empty(PEBIBYTE, dtype=torch.uint8)

    def do_numpy(self, text):
        return numpy.empty(PEBIBYTE, dtype=numpy.uint8)

    def do_onnx(self, text):
        self.sessions[text].run(None, {"shape": numpy.array([PEBIBYTE // 4], dtype=numpy.int64)})

    do_onnx_arena = do_onnx


vramq.serve(RealFrameworks)
