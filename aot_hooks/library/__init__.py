"""Hooks that come with the package: pack and unpack as pure tensor functions, one idea a file."""

from .bitmask import bitmask
from .cast import cast
from .float8 import float8
from .integer import int4, int8

__all__ = ["bitmask", "cast", "float8", "int4", "int8"]
