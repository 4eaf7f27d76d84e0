"""vramq for Python: clients that publish jobs, and programs as models of a vramq worker.

The models' side needs the standard library only. The clients need aio-pika: `pip install 'vramq[client]'`.
"""

from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .models import *  # noqa: F403
from .models import __all__ as _models

# Loaded when they are asked for, so that a program that only serves a model needs no aio-pika.
_CLIENTS = {
    "AsyncClient": "aio", "AsyncJob": "aio", "Client": "client", "Job": "client", "Result": "_wire",
    "Sparse": "_wire", "download": "_download", "download_file": "_download",
}

__all__ = [*_models, *_CLIENTS, *_errors]


def __getattr__(name):
    if name not in _CLIENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f".{_CLIENTS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name not in ("aio_pika", "aiormq"):
            raise
        raise ImportError(f"vramq.{name} needs aio-pika: pip install 'vramq[client]'") from error


def __dir__():
    return sorted({*globals(), *_CLIENTS})
