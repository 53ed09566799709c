"""Hooks that come with the package: pack and unpack as pure tensor functions, one idea a file."""
