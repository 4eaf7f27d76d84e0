"""Any ONNX model on ONNX Runtime: a JSON object of its inputs in, or only the input if it has one; its outputs as JSON out."""

import os

import numpy
import onnxruntime
import vramq

# ONNX's types of tensors, as NumPy has them.
TYPES = {"tensor(float)": numpy.float32, "tensor(double)": numpy.float64, "tensor(int64)": numpy.int64}


def plain(value):
    """What ONNX Runtime gives, as JSON has it."""
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


class Onnx(vramq.Model):
    accepts = ["json"]

    def load(self, device):
        providers = ["CPUExecutionProvider"] if device == "cpu" else ["CUDAExecutionProvider", "CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(os.environ["MODEL"], providers=providers)
        self.outputs = [output.name for output in self.session.get_outputs()]

    def run(self, items, params):
        for item in items:
            values = self.session.run(self.outputs, self.feeds(item))
            yield {name: plain(value) for name, value in zip(self.outputs, values)}

    def feeds(self, item):
        inputs = self.session.get_inputs()
        given = item.json
        if len(inputs) == 1 and not isinstance(given, dict):
            given = {inputs[0].name: given}
        feeds = {}
        for wanted in inputs:
            try:
                value = numpy.asarray(given[wanted.name], dtype=TYPES[wanted.type])
            except (KeyError, TypeError, ValueError) as error:
                raise vramq.InvalidInput(f"input {wanted.name} is no {wanted.type}: {error!r}", item)
            # A dimension without a number may have any length.
            fits = len(value.shape) == len(wanted.shape) and all(
                not isinstance(size, int) or size == found for size, found in zip(wanted.shape, value.shape)
            )
            if not fits:
                message = f"input {wanted.name} has the shape {list(value.shape)}, the model takes {wanted.shape}"
                raise vramq.InvalidInput(message, item)
            feeds[wanted.name] = value
        return feeds


vramq.serve(Onnx)
