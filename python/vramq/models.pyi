# What a model's program uses of models.py, for type checkers and editors: that file is copied beside programs, and has no types itself.

import builtins
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn

__all__ = [
    "Bytes", "Cancelled", "Embedding", "File", "InvalidInput", "Item", "Json", "Model", "OutOfMemory", "Uri", "serve",
]

class OutOfMemory(Exception):
    asked: int | None
    free: int | None
    total: int | None
    item: Item | int | None
    where: str
    def __init__(
        self, message: str = "", asked: int | None = None, free: int | None = None, total: int | None = None,
        item: Item | int | None = None, where: str = "model",
    ) -> None: ...

class InvalidInput(Exception):
    item: int | None
    def __init__(self, message: str, item: Item | int | None = None) -> None: ...

class Cancelled(BaseException): ...

class Item:
    index: int
    kind: Literal["text", "bytes", "json", "uri"]
    media_type: str | None
    def __init__(
        self, index: int, kind: str, payload: builtins.bytes = b"", media_type: str | None = None, path: str | None = None
    ) -> None: ...
    @property
    def text(self) -> str: ...
    @property
    def json(self) -> Any: ...
    @property
    def uri(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def bytes(self) -> builtins.bytes: ...

class Embedding:
    # An array.array of floats in a client's results.
    values: Sequence[float]
    dtype: Literal["f32", "f16"] | None
    # Numbers, a NumPy array or a tensor.
    def __init__(self, values: Any, dtype: Literal["f32", "f16"] | None = None) -> None: ...

class Json:
    value: Any
    def __init__(self, value: Any) -> None: ...

class Bytes:
    data: bytes
    media_type: str
    def __init__(self, data: bytes | bytearray | memoryview, media_type: str = "application/octet-stream") -> None: ...

class File:
    path: str
    media_type: str
    def __init__(self, path: str, media_type: str = "application/octet-stream") -> None: ...

class Uri:
    uri: str
    def __init__(self, uri: str) -> None: ...

class Model:
    accepts: Sequence[str] | None
    revision: str | None
    budget: int | None
    deadline: float | None
    scratch: str | None
    def load(self, device: str) -> object: ...
    def run(self, items: list[Item], params: dict[str, Any]) -> Iterable[Any]: ...
    def trim(self) -> None: ...
    def weights(self) -> int: ...
    def progress(self, item: Item | int, fraction: float, note: str = "") -> None: ...
    def check(self) -> None: ...

def serve(model: Model | type[Model]) -> NoReturn: ...
