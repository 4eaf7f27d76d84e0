"""A model that returns what its first item names: right ones and wrong ones."""

import array
import types

import vramq


class FakeArray:
    """Shaped as NumPy's arrays are, so that the tests need none."""

    def __init__(self, values, shape):
        self.values, self.shape, self.dtype = values, shape, "float32"

    def __getitem__(self, row):
        size = len(self.values) // self.shape[0]
        return FakeArray(self.values[row * size:(row + 1) * size], self.shape[1:])

    def tolist(self):
        return list(self.values)

    def __len__(self):
        return self.shape[0]


def yields(count):
    for number in range(count):
        yield {"n": number}


class FakeTensor:
    """As TensorFlow's: its values come by NumPy's array alone."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, types.SimpleNamespace(name="float32")

    def numpy(self):
        return self.array


class PaddleType:
    """As Paddle names a tensor's type."""

    name = "FLOAT32"

    def __str__(self):
        return "paddle.float32"


class NumPyType:
    """As NumPy names a type whose bytes are in the other order."""

    name = "float32"

    def __str__(self):
        return ">f4"


def typed(dtype):
    values = FakeArray([0.0, 1.0], (2,))
    values.dtype = dtype
    return values


class FakeScalar:
    """As NumPy's numbers, which are no numbers of Python."""

    def tolist(self):
        return 0.5


class OddShape:
    """Something else that has these names."""

    shape, dtype = None, "float32"


class FakeFrame:
    """As a DataFrame of pandas: its length is that of its rows, and it iterates over the names of its columns."""

    iloc, shape = None, (2, 3)

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(["label", "score", "text"])


GOOD = vramq.Json(0)
CASES = {
    "texts": lambda: ["a", "b"],
    "generator": lambda: yields(2),
    "lists": lambda: ([1, 2.5], []),
    "plain": lambda: [None, True],
    "embeddings": lambda: [vramq.Embedding([1, 2.0]), vramq.Embedding(array.array("f", [0.5]), "f32")],
    "bytes": lambda: [b"x", vramq.Bytes(bytearray(b"x"), "image/png")],
    "uris": lambda: [vramq.Uri(f"s3://b/{n}") for n in range(2)],
    "array": lambda: FakeArray([0.0, 1.0, 2.0, 3.0], (2, 2)),
    "tensor": lambda: FakeTensor(FakeArray([0.0, 1.0, 2.0, 3.0], (2, 2))),
    "types": lambda: [typed(PaddleType()), vramq.Embedding(typed(NumPyType()))],
    "no-type": lambda: [vramq.Bytes(b"x", None), vramq.Bytes(b"x", "image/png")],
    "none": lambda: None,
    "one-text": lambda: "a",
    "one-dict": lambda: {"a": 1},
    "number": lambda: 7,
    "too-few": lambda: ["a"],
    "too-many": lambda: ["a", "b", "c"],
    "yields-too-few": lambda: yields(1),
    "yields-too-many": lambda: yields(3),
    "set": lambda: [GOOD, {1, 2}],
    "object": lambda: [GOOD, object()],
    "nan": lambda: [GOOD, {"a": float("nan")}],
    "deep-nan": lambda: [GOOD, {"a": [0, {"b": float("nan")}]}],
    "number-of-numpy": lambda: [GOOD, {"scores": [1.0, FakeScalar()]}],
    "frame": FakeFrame,
    "bad-key": lambda: [GOOD, {(1, 2): 3}],
    "nan-vector": lambda: [GOOD, vramq.Embedding([1.0, float("nan")])],
    "text-vector": lambda: [GOOD, vramq.Embedding(["a"])],
    "empty-vector": lambda: [GOOD, vramq.Embedding([])],
    "large-f16": lambda: [GOOD, vramq.Embedding([1e9], "f16")],
    "uri-surrogate": lambda: [GOOD, vramq.Uri("s3://b/a\udc80")],
    "type-number": lambda: [GOOD, vramq.Bytes(b"x", 7)],
    "type-empty": lambda: [GOOD, vramq.Bytes(b"x", "")],
    "type-long": lambda: [GOOD, vramq.Bytes(b"x", "image/" + "x" * 2_000_000)],
    "bytes-none": lambda: [GOOD, vramq.Bytes(None)],
    "file-none": lambda: [GOOD, vramq.File(None)],
    "large-integer": lambda: [GOOD, {"a": 1 << 64}],
    "large-element": lambda: [GOOD, vramq.Embedding([1.0, 10 ** 400])],
    "odd-shape": lambda: [GOOD, OddShape()],
    "file-outside": lambda: [GOOD, vramq.File("/etc/hostname")],
    "array-row": lambda: FakeArray([1.0, 2.0], (2,)),
    "array-short": lambda: FakeArray([1.0, 2.0], (1, 2)),
    "array-deep": lambda: [GOOD, FakeArray([1.0] * 4, (2, 2))],
}


class Returns(vramq.Model):
    def run(self, items, params):
        returned = CASES[items[0].text]()
        return returned[:1] if len(items) == 1 else returned


vramq.serve(Returns)
