"""What the commands of fuzzers have in common: which programs run, where, and how what differs is printed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--device", choices=["simulator", "cuda"], default="simulator")
    return parser


def printed(options: argparse.Namespace, programs: str, wrong: Sequence[tuple[int, str]]) -> int:
    """Print how many `programs` ran, which is a word for them, and which were wrong. Returns the exit status."""
    result = {"device": options.device, programs: options.count, "different": len(wrong), "wrong": wrong[:20]}
    print(json.dumps(result))
    return 1 if wrong else 0
