"""Hooks that come with the package: pack and unpack as pure tensor functions, one idea a file."""

from .float8 import float8

__all__ = ["float8"]
