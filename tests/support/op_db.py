"""Gradients of every differentiable operator of torch's `op_db` under lossy hooks, held against eager mode.

      python tests/support/op_db.py --workers 16 --out out/op_db.json

The programs are in tests/support/op_programs.py, the rule is in tests/support/oracle.py. Operators without a program
are listed with the reason. Each worker is a process of its own: an operator that crashes or hangs it is a result too.
Takes about 40 minutes of one core.

      python tests/support/op_db.py --ops 'amax|softmax' --print     each verdict in words
      python tests/support/op_db.py --magnitudes 1e-3 1e4            inputs of these sizes in place of about 1
      python tests/support/op_db.py --hooks float8 int4              one relative to a value, one to a block
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import op_programs
import torch
from oracle import FACTOR, HOOKS, ROUNDOFF

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
from measure import conditions

TIMEOUT = 120  # seconds for one operator in one dtype and form
BROKEN = 2.0**-5  # relative difference of the compiled gradients from eager mode's, without hooks, that is noted


Case = tuple[str, str, str]  # operator, dtype, form


class TimedOut(Exception):
    pass


def cases(pattern: str, dtypes: list[str], forms: list[str], shard: int = 0, shards: int = 1) -> list[Case]:
    """Operators that `pattern` finds, every `shards`-th from `shard` on, in each dtype and form."""
    names = [name for name in op_programs.operators() if re.search(pattern, name)][shard::shards]
    return [(name, dtype, form) for name in names for dtype in dtypes for form in forms]


@dataclasses.dataclass(frozen=True)
class How:
    """Attributes:
    samples: inputs of each operator.
    magnitudes: what samples are multiplied with.
    hooks: names in `HOOKS`.
    """

    samples: int
    magnitudes: Sequence[float] = (1.0,)
    hooks: Sequence[str] = tuple(HOOKS)

    @property
    def arguments(self) -> list[str]:
        """For a worker."""
        return [
            *("--samples", str(self.samples)),
            *("--magnitudes", *map(str, self.magnitudes)),
            *("--hooks", *self.hooks),
        ]


def check(case: Case, how: How) -> list[dict[str, Any]]:
    """The results of one case, as JSON has them."""

    def stop(*_: object) -> None:
        raise TimedOut

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = op_programs.check(*case, how.samples, how.magnitudes, how.hooks)
    except TimedOut:
        results = [op_programs.Result(*case, reason=f"took more than {TIMEOUT} s")]
    finally:
        signal.alarm(0)
    return [as_json(result) for result in results]


def as_json(result: op_programs.Result) -> dict[str, Any]:
    found = dataclasses.asdict(result)
    for verdict, given in zip(found["verdicts"], result.verdicts, strict=True):
        verdict |= {"kind": given.kind, "error": finite(given.error), "eager_error": finite(given.eager_error)}
    return found | {"ok": result.ok, "without_hooks": finite(result.without_hooks)}


def finite(x: float) -> float | str:
    """`x`, to four digits, or as a word: JSON has no infinity."""
    return float(f"{x:.4g}") if math.isfinite(x) else str(x)


def work(todo: list[Case], out: pathlib.Path, how: How) -> None:
    """A worker: writes a line before each case and one for each result."""
    torch.set_num_threads(1)
    with out.open("a") as file:
        for case in todo:
            print(json.dumps({"begins": case}), file=file, flush=True)
            for result in check(case, how):
                print(json.dumps(result), file=file, flush=True)


def run_worker(todo: list[Case], folder: str, number: int, how: How) -> list[dict[str, Any]]:
    """Runs `todo` in a process; starts another one behind a case that kills it."""
    path = pathlib.Path(folder) / f"{number}.jsonl"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    while todo:
        given = pathlib.Path(folder) / f"{number}.json"
        given.write_text(json.dumps(todo))
        command = [sys.executable, __file__, "--worker", str(given), str(path), *how.arguments]
        ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        begun = [tuple(line["begins"]) for line in lines if "begins" in line]
        if ended.returncode == 0:
            break
        if not begun or begun[-1] not in todo:
            raise RuntimeError(f"a worker does not start: {ended.stderr[-2000:]}")
        reason = f"the process ended with {ended.returncode}: {ended.stderr.strip()[-200:]}"
        with path.open("a") as file:
            print(json.dumps(as_json(op_programs.Result(*begun[-1], reason=reason))), file=file)
        todo = todo[todo.index(begun[-1]) + 1 :]
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if "begins" not in line]


def run(todo: list[Case], workers: int, how: How) -> list[dict[str, Any]]:
    """The results of all cases, in their order. Workers take every n-th case, so that each gets slow ones."""
    names = sorted({case[0] for case in todo}, key=[case[0] for case in todo].index)
    shares = [[case for case in todo if names.index(case[0]) % workers == i] for i in range(workers)]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        threads = [
            threading.Thread(target=lambda i=i: results.extend(run_worker(shares[i], folder, i, how)))
            for i in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    order = {case: i for i, case in enumerate(todo)}
    return sorted(results, key=lambda r: order[r["name"], r["dtype"], r["form"]])


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, what fails, and what was not compared, by name with the reason."""
    compared = [r for r in results if not r["reason"]]
    names = {r["name"] for r in compared}
    verdicts = [v for r in compared for v in r["verdicts"]]

    def other_than_eager(result: dict[str, Any]) -> bool:
        return result["without_hooks"] == "inf" or result["without_hooks"] > BROKEN

    return {
        "operators": len(names),
        "operators_by_dtype": {d: len({r["name"] for r in compared if r["dtype"] == d}) for d in op_programs.DTYPES},
        "operators_with_something_packed": len(
            {r["name"] for r in compared if any(v["packed_count"] for v in r["verdicts"])}
        ),
        "programs": len(compared),
        "verdicts": dict(collections.Counter(v["kind"] for v in verdicts)),
        "failing_operators": sorted({r["name"] for r in compared if not r["ok"]}),
        "exceptions": {r["name"]: r["reason"] for r in results if r["name"] not in names},
        "exceptions_of_a_dtype": {
            case_of(r): r["reason"]
            for r in results
            if r["reason"] and r["name"] in names and r["reason"] != op_programs.NO_GRADIENT
        },
        "graph_breaks": sorted({r["name"] for r in compared if not r["fullgraph"]}),
        "other_than_eager_without_hooks": {case_of(r): r["without_hooks"] for r in compared if other_than_eager(r)},
    }


def case_of(result: dict[str, Any]) -> str:
    return f"{result['name']} {result['dtype']} {result['form']}"


def by_operator(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each operator how many programs were compared, how many of them had something packed, and the worst verdict:
    that whose error is the largest share of what it may be."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(r["name"] for r in results if not r["reason"]):
        own = [r for r in results if r["name"] == name and not r["reason"]]
        verdicts = [(share(v), r, v) for r in own for v in r["verdicts"]]
        worst, result, verdict = max(verdicts, key=lambda item: item[0])
        found[name] = {
            "programs": len(own),
            "packed": sum(any(v["packed_count"] for v in r["verdicts"]) for r in own),
            "worst": f"{result['dtype']} {result['form']} {verdict['hook']}",
            **{key: verdict[key] for key in ("kind", "error", "eager_error")},
            "share": finite(worst),
        }
    return found


def share(verdict: dict[str, Any]) -> float:
    """The error as a share of its bound."""
    return math.inf if verdict["reason"] or verdict["error"] == "inf" else verdict["error"] / verdict["bound"]


def format_result(result: dict[str, Any]) -> str:
    head = f"{result['name']} {result['dtype']} {result['form']} {result['shapes']}"
    if result["reason"]:
        return f"{head}: {result['reason']}"
    lines = [
        f"  {v['hook']}: {v['kind']}: {v['reason']} error {v['error']}, eager mode {v['eager_error']}, "
        f"at most {v['bound']:.4g}; {v['packed_count']} packed"
        for v in result["verdicts"]
    ]
    return "\n".join([head, *lines])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", default="", help="regular expression over their names")
    parser.add_argument("--dtypes", nargs="+", choices=op_programs.DTYPES, default=list(op_programs.DTYPES))
    parser.add_argument("--forms", nargs="+", choices=op_programs.FORMS, default=list(op_programs.FORMS))
    parser.add_argument("--samples", type=int, default=1, help="sample inputs of each operator")
    parser.add_argument("--magnitudes", type=float, nargs="+", default=[1.0], help="what samples are multiplied with")
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=list(HOOKS))
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th operator, from the i-th on")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--print", action="store_true", help="every verdict, not only those that fail")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    how = How(options.samples, options.magnitudes, options.hooks)
    if options.worker:
        given, out = map(pathlib.Path, options.worker)
        work([tuple(case) for case in json.loads(given.read_text())], out, how)
        return 0
    shard, shards = map(int, options.shard.split("/"))
    todo = cases(options.ops, options.dtypes, options.forms, shard, shards)
    began = time.monotonic()
    results = run(todo, options.workers, how)
    seconds = round(time.monotonic() - began)
    asked = {"samples": options.samples, "magnitudes": options.magnitudes}
    header = conditions(torch.device("cpu"), **asked, seconds=seconds)
    counts = summary(results)
    for result in results:
        if options.print or not result["ok"]:
            print(format_result(result))
    print(json.dumps(header | counts, indent=1))
    if options.out:
        rule = {"factor": FACTOR, "roundoff": ROUNDOFF, "hooks": {name: HOOKS[name].name for name in options.hooks}}
        found = {"conditions": header, "rule": rule, "summary": counts}
        failures = [r for r in results if not r["ok"]]
        lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in by_operator(results).items()]
        options.out.write_text(
            json.dumps(found, indent=1).removesuffix("\n}")
            + ',\n "failures": [\n' + ",\n".join("  " + json.dumps(r) for r in failures)
            + '\n ],\n "operators": {\n' + ",\n".join(lines) + "\n }\n}\n"
        )  # fmt: skip
    return 1 if counts["failing_operators"] else 0


if __name__ == "__main__":
    sys.exit(main())
