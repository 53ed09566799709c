"""`python -m aot_hooks env`: what a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys

import torch

from . import __version__, _compat


def env() -> str:
    """Versions, devices and each private symbol of torch that the package stands on, as text."""
    lines = [
        f"aot_hooks {__version__}",
        f"python {platform.python_version()} on {platform.platform()}",
        f"torch {torch.__version__} (tested: {', '.join(_compat.TESTED)})",
        f"triton {_version('triton')}",
        f"cuda {torch.version.cuda or 'none'}: {_devices()}",
        f"backend entry point: {_entry_point()}",
        "private symbols:",
    ]
    lines += [
        f"  {'ok     ' if found else 'MISSING'} {path} ({_compat.SYMBOLS[path]})"
        for path, found in _compat.probe().items()
    ]
    return "\n".join(lines)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    if not torch.cuda.is_available():
        return "no device"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _entry_point() -> str:
    found = [e for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "aot_hooks"]
    return found[0].value if found else "MISSING (install the package: pip install -e .)"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aot_hooks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="print what a bug report needs")
    parser.parse_args(argv)
    print(env())
    return 0


if __name__ == "__main__":
    sys.exit(main())
