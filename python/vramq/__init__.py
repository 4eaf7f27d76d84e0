"""vramq for Python: programs as models of a vramq worker."""

from .models import *  # noqa: F403
from .models import __all__
