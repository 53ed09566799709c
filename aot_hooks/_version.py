"""The version of the package; equal to the one in pyproject.toml."""

__version__ = "0.1.0"
