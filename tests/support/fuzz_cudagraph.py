"""Random programs over captured functions, each compared with the same program in eager mode; see fuzz_programs.py.

python tests/support/fuzz_cudagraph.py --count 10000 --device cuda        seeds 0 to 9999; prints what differed
python tests/support/fuzz_cudagraph.py --first 4711 --count 1 --trace     one program, with what it does
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import Sequence

from failing_captures import FailingDriver
from fuzz_command import parser_of
from fuzz_functions import Functions
from fuzz_programs import Mismatch, Program
from tree_programs import World

from cudagraph import counters
from cudagraph.tree import dispatch, node


def run_seeds(
    seeds: Sequence[int], world: World, *, generation: int = 5, reset_every: int = 25, trace: bool = False
) -> list[tuple[int, str]]:
    """Run a program a seed; what went wrong, by seed."""
    wrong = []
    if generation > 4 and not isinstance(world.driver, FailingDriver):
        world.driver = FailingDriver(world.driver)
        world.tries_again = True
    functions: dict[str, Functions] = {}
    for count, seed in enumerate(seeds):
        if count % reset_every == 0:
            dispatch.reset()
            functions = {held: Functions(world, held) for held in ("error", "copy")}
        for kept in (each for trees in dispatch.every_thread for each in trees.values()):
            kept.is_marked = False  # programs without marks run on what others recorded
        try:
            Program(seed, world, functions, generation=generation, trace=trace).run()
        except (Mismatch, RuntimeError, AssertionError, ValueError) as error:
            if trace:
                raise
            wrong.append((seed, f"{type(error).__name__}: {error}"))
            dispatch.reset()
            functions = {held: Functions(world, held) for held in ("error", "copy")}
    return wrong


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--reset-every", type=int, default=25, help="programs that share recordings")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--moves", choices=["all", "made"], default="all", help="of the simulator: see there")
    parser.add_argument("--generation", type=int, choices=[1, 2, 3, 4, 5], default=5, help="of programs")
    parser.add_argument("--looks", type=int, default=node.PROBED_CALLS, help="calls until inputs may be read in place")
    parser.add_argument("--trace", action="store_true", help="print what programs do; stop at the first error")
    options = parser.parse_args()
    node.PROBED_CALLS = options.looks
    world = World(options.device, **({"moves": options.moves} if options.device == "simulator" else {}))
    if not options.trace:
        logging.getLogger("cudagraph").setLevel(logging.ERROR)
    begin = time.monotonic()
    wrong: list[tuple[int, str]] = []
    done = 0
    last = options.first + options.count
    totals: dict[str, int] = {}
    for chunk in (
        itertools.batched(range(options.first, last), options.reset_every)
        if sys.version_info >= (3, 12)
        else (range(i, min(i + options.reset_every, last)) for i in range(options.first, last, options.reset_every))
    ):
        wrong += run_seeds(
            list(chunk), world, generation=options.generation, reset_every=options.reset_every, trace=options.trace
        )
        done += len(chunk)
        for name, number in counters.stats().items():
            totals[name] = totals.get(name, 0) + number
        if time.monotonic() - begin > options.seconds:
            break
    result = {
        "device": options.device,
        "first": options.first,
        "programs": done,
        "different": len(wrong),
        "seconds": round(time.monotonic() - begin, 1),
        "counts": totals,
        "wrong": wrong[:20],
    }
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
