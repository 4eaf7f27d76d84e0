# What `vramq` exports, for type checkers and editors: most of it is loaded when it is asked for, which they cannot follow.
# The scenario `types` of tests/scenarios.py compares this file with what there is.

import array
import datetime
import os
import ssl
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy.typing
from typing_extensions import Self

from .errors import (
    ClientClosed, ConnectError, Disconnected, DownloadError, DuplicateId, Forgotten, InvalidJob, InvalidReply, JobError, JobFailed,
    JobTimeout, NoEmbedding, PublishError, PublishRefused, PublishTimeout, QueueFull, ReplyQueueLost, Unroutable, VramqError, Withdrawn,
)
from .models import Bytes, Cancelled, Embedding, File, InvalidInput, Item, Json, Model, OutOfMemory, Uri, serve

__all__ = [
    "AsyncClient", "AsyncJob", "Bytes", "Cancelled", "Client", "ClientClosed", "ConnectError", "Disconnected", "DownloadError",
    "DuplicateId", "Embedding", "File", "Forgotten", "InvalidInput", "InvalidJob", "InvalidReply", "Item", "Job", "JobError",
    "JobFailed", "JobTimeout", "Json", "Model", "NoEmbedding", "OutOfMemory", "PublishError", "PublishRefused", "PublishTimeout", "QueueFull",
    "ReplyQueueLost", "Result", "Sparse", "Unroutable", "Uri", "VramqError", "Withdrawn", "download", "download_file", "serve",
]

_Input = str | bytes | bytearray | memoryview | Uri | Json
_Id = str | int | uuid.UUID
_Encoding = Literal["json", "msgpack"]
_Expiration = float | datetime.timedelta | datetime.datetime
_OnProgress = Callable[[int, float, str], object]
_Vectors = numpy.typing.NDArray[Any]

@dataclass(frozen=True)
class Sparse:
    indices: array.array[int]
    values: array.array[float]

class Result:
    id: str
    model: str
    # An Embedding, Sparse, Bytes, Uri or a JSON value for each input.
    outputs: list[Any]
    # Several if workers with other revisions of the model continued the job, none if the model has none.
    model_revisions: list[str]
    worker: str
    attempt: int
    queued_ms: int
    ran_ms: int
    def __init__(self, job_id: str, model: str, assembly: Any) -> None: ...
    def numpy(self) -> _Vectors: ...
    def plain(self) -> list[Any]: ...

class AsyncJob:
    id: str
    model: str
    def __init__(self, pending: Any) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def items_done(self) -> int: ...
    async def result(self, timeout: float | None = None) -> Result: ...
    def __await__(self) -> Generator[Any, None, Result]: ...
    def progress(self) -> AsyncGenerator[tuple[int, int], None]: ...
    def withdraw(self) -> None: ...
    def forget(self) -> None: ...

class AsyncClient:
    timeout: float | None
    reconnect_for: float | None
    reply_queue: str
    reconnects: int
    strays: int
    def __init__(
        self, url: str, *, timeout: float | None = 3600, jobs_in_flight: int = 1024, connect_timeout: float = 10.0,
        reconnect_for: float | None = None, reply_queue_expires: float = 600.0, ca: str | os.PathLike[str] | None = None,
        ssl_context: ssl.SSLContext | None = None, name: str | None = None, encoding: _Encoding = "json", anonymous: bool = False,
    ) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    async def connect(self) -> Self: ...
    async def close(self) -> None: ...
    async def submit(
        self, model: str, inputs: Iterable[_Input], *, params: Mapping[str, Any] | None = None, id: _Id | None = None,
        timeout: float | None = ..., priority: int | None = None, expiration: _Expiration | None = None,
        batch_hint: int | None = None, traceparent: str | None = None, app_id: str | None = None,
        headers: Mapping[str, Any] | None = None, on_progress: _OnProgress | None = None, key: str | None = None,
    ) -> AsyncJob: ...
    async def run(
        self, model: str, inputs: Iterable[_Input], *, params: Mapping[str, Any] | None = None, id: _Id | None = None,
        timeout: float | None = ..., priority: int | None = None, expiration: _Expiration | None = None,
        batch_hint: int | None = None, traceparent: str | None = None, app_id: str | None = None,
        headers: Mapping[str, Any] | None = None, on_progress: _OnProgress | None = None, key: str | None = None,
    ) -> Result: ...
    async def embed(
        self, model: str, texts: Iterable[str], *, dtype: Literal["f32", "f16"] = "f32", job_items: int = 32,
        params: Mapping[str, Any] | None = None, timeout: float | None = ..., priority: int | None = None,
        expiration: _Expiration | None = None, batch_hint: int | None = None, traceparent: str | None = None,
        app_id: str | None = None, headers: Mapping[str, Any] | None = None, key: str | None = None,
    ) -> _Vectors: ...
    async def publish(
        self, model: str, inputs: Iterable[_Input], *, params: Mapping[str, Any] | None = None, id: _Id | None = None,
        reply_to: str | None = None, timeout: float | None = 60.0, priority: int | None = None,
        expiration: _Expiration | None = None, batch_hint: int | None = None, traceparent: str | None = None,
        app_id: str | None = None, headers: Mapping[str, Any] | None = None, key: str | None = None,
    ) -> str: ...

class Job:
    id: str
    model: str
    def __init__(self, client: Client, job: AsyncJob) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def items_done(self) -> int: ...
    def result(self, timeout: float | None = None) -> Result: ...
    def progress(self) -> Generator[tuple[int, int], None, None]: ...
    def withdraw(self) -> None: ...
    def forget(self) -> None: ...

class Client:
    def __init__(
        self, url: str, *, timeout: float | None = 3600, jobs_in_flight: int = 1024, connect_timeout: float = 10.0,
        reconnect_for: float | None = None, reply_queue_expires: float = 600.0, ca: str | os.PathLike[str] | None = None,
        ssl_context: ssl.SSLContext | None = None, name: str | None = None, encoding: _Encoding = "json", anonymous: bool = False,
    ) -> None: ...
    @property
    def reply_queue(self) -> str: ...
    @property
    def reconnects(self) -> int: ...
    def submit(
        self, model: str, inputs: Iterable[_Input], *, params: Mapping[str, Any] | None = None, id: _Id | None = None,
        timeout: float | None = ..., priority: int | None = None, expiration: _Expiration | None = None,
        batch_hint: int | None = None, traceparent: str | None = None, app_id: str | None = None,
        headers: Mapping[str, Any] | None = None, on_progress: _OnProgress | None = None, key: str | None = None,
    ) -> Job: ...
    def run(
        self, model: str, inputs: Iterable[_Input], *, params: Mapping[str, Any] | None = None, id: _Id | None = None,
        timeout: float | None = ..., priority: int | None = None, expiration: _Expiration | None = None,
        batch_hint: int | None = None, traceparent: str | None = None, app_id: str | None = None,
        headers: Mapping[str, Any] | None = None, on_progress: _OnProgress | None = None, key: str | None = None,
    ) -> Result: ...
    def embed(
        self, model: str, texts: Iterable[str], *, dtype: Literal["f32", "f16"] = "f32", job_items: int = 32,
        params: Mapping[str, Any] | None = None, timeout: float | None = ..., priority: int | None = None,
        expiration: _Expiration | None = None, batch_hint: int | None = None, traceparent: str | None = None,
        app_id: str | None = None, headers: Mapping[str, Any] | None = None, key: str | None = None,
    ) -> _Vectors: ...
    def publish(
        self, model: str, inputs: Iterable[_Input], *, params: Mapping[str, Any] | None = None, id: _Id | None = None,
        reply_to: str | None = None, timeout: float | None = 60.0, priority: int | None = None,
        expiration: _Expiration | None = None, batch_hint: int | None = None, traceparent: str | None = None,
        app_id: str | None = None, headers: Mapping[str, Any] | None = None, key: str | None = None,
    ) -> str: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

def download(
    reference: Uri | str, *, folder: str | os.PathLike[str] | None = None, private: bool = False, bytes_max: int = ...,
    timeout: float = 600.0, ssl_context: ssl.SSLContext | None = None,
) -> bytes: ...
def download_file(
    reference: Uri | str, path: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None, private: bool = False,
    bytes_max: int = ..., timeout: float = 600.0, ssl_context: ssl.SSLContext | None = None,
) -> int: ...
