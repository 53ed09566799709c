"""Gradients of every differentiable operator of torch's `op_db` under lossy hooks, held against eager mode.

      python benchmarks/bench_op_db.py --workers 16 --out results/op_db.json

The programs and the rule are in tests/op_programs.py and tests/oracle.py; the operators that make no program are listed
by name with the reason. Each worker is a process of its own: an operator that crashes or hangs it is a result, too.

      python benchmarks/bench_op_db.py --ops 'amax|softmax' --print     each verdict in words
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
from typing import Any

import torch
from _measure import conditions

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
import op_programs
from oracle import FACTOR, HOOKS, ROUNDOFF

TIMEOUT = 120  # seconds for one operator in one dtype and form
BROKEN = 2.0**-5  # relative difference of the compiled gradients from eager mode's, without hooks, that is noted


class TimedOut(Exception):
    pass


def cases(pattern: str, dtypes: list[str], forms: list[str]) -> list[tuple[str, str, str]]:
    names = [name for name in op_programs.operators() if re.search(pattern, name)]
    return [(name, dtype, form) for name in names for dtype in dtypes for form in forms]


def check(case: tuple[str, str, str], samples: int) -> list[dict[str, Any]]:
    """The results of one case, as JSON has them."""

    def stop(*_: object) -> None:
        raise TimedOut

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = op_programs.check(*case, samples)
    except TimedOut:
        results = [op_programs.Result(*case, reason=f"took more than {TIMEOUT} s")]
    finally:
        signal.alarm(0)
    return [as_json(result) for result in results]


def as_json(result: op_programs.Result) -> dict[str, Any]:
    found = dataclasses.asdict(result)
    found["ok"] = result.ok
    for verdict, given in zip(found["verdicts"], result.verdicts, strict=True):
        verdict["kind"] = given.kind
        for key in ("error", "eager_error"):
            verdict[key] = verdict[key] if math.isfinite(verdict[key]) else str(verdict[key])
    found["without_hooks"] = found["without_hooks"] if math.isfinite(result.without_hooks) else "inf"
    return found


def work(todo: list[tuple[str, str, str]], samples: int, out: pathlib.Path) -> None:
    """A worker: writes a line before each case and one for each result."""
    torch.set_num_threads(1)
    with out.open("a") as file:
        for case in todo:
            print(json.dumps({"begins": case}), file=file, flush=True)
            for result in check(case, samples):
                print(json.dumps(result), file=file, flush=True)


def run_worker(todo: list[tuple[str, str, str]], samples: int, folder: str, number: int) -> list[dict[str, Any]]:
    """Runs `todo` in a process; starts another one behind a case that kills it."""
    path = pathlib.Path(folder) / f"{number}.jsonl"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    while todo:
        given = pathlib.Path(folder) / f"{number}.json"
        given.write_text(json.dumps(todo))
        command = [sys.executable, __file__, "--samples", str(samples), "--worker", str(given), str(path)]
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


def run(todo: list[tuple[str, str, str]], samples: int, workers: int) -> list[dict[str, Any]]:
    """The results of all cases, in their order. Workers take every n-th case, so that each gets slow ones."""
    names = sorted({case[0] for case in todo}, key=[case[0] for case in todo].index)
    shares = [[case for case in todo if names.index(case[0]) % workers == i] for i in range(workers)]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        threads = [
            threading.Thread(target=lambda i=i: results.extend(run_worker(shares[i], samples, folder, i)))
            for i in range(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    order = {case: i for i, case in enumerate(todo)}
    return sorted(results, key=lambda r: order[r["name"], r["dtype"], r["form"]])


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, failures and exceptions."""
    compared = [r for r in results if not r["reason"]]
    names = {r["name"] for r in compared}
    failures = [r for r in compared if not r["ok"]]
    verdicts = [v for r in compared for v in r["verdicts"]]
    exceptions = {r["name"]: r["reason"] for r in results if r["name"] not in names}
    return {
        "operators": len(names),
        "operators_by_dtype": {d: len({r["name"] for r in compared if r["dtype"] == d}) for d in op_programs.DTYPES},
        "operators_with_something_packed": len(
            {r["name"] for r in compared for v in r["verdicts"] if v["packed_count"]}
        ),
        "programs": len(compared),
        "verdicts": dict(collections.Counter(v["kind"] for v in verdicts)),
        "failing_operators": sorted({r["name"] for r in failures}),
        "exceptions": exceptions,
        "not_in_this_dtype": {
            f"{r['name']} {r['dtype']} {r['form']}": r["reason"]
            for r in results
            if r["reason"] and r["name"] in names and "no gradient in this dtype" not in r["reason"]
        },
        "graph_breaks": sorted({r["name"] for r in compared if not r["fullgraph"]}),
        "other_without_hooks": {
            f"{r['name']} {r['dtype']} {r['form']}": r["without_hooks"]
            for r in compared
            if r["without_hooks"] == "inf" or r["without_hooks"] > BROKEN
        },
    }


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
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th operator, from the i-th on")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--print", action="store_true", help="every verdict, not only those that fail")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(
            [tuple(case) for case in json.loads(pathlib.Path(options.worker[0]).read_text())],
            options.samples,
            pathlib.Path(options.worker[1]),
        )
        return 0
    shard, shards = map(int, options.shard.split("/"))
    todo = cases(options.ops, options.dtypes, options.forms)
    names = sorted({case[0] for case in todo})[shard::shards]
    began = time.monotonic()
    results = run([case for case in todo if case[0] in names], options.samples, options.workers)
    header = conditions(torch.device("cpu"), samples=options.samples, seconds=round(time.monotonic() - began))
    counts = summary(results)
    for result in results:
        if options.print or not result["ok"]:
            print(format_result(result))
    print(json.dumps(header | counts, indent=1))
    if options.out:
        rule = {"factor": FACTOR, "roundoff": ROUNDOFF, "hooks": {name: hook.name for name, hook in HOOKS.items()}}
        lines = ",\n".join("  " + json.dumps(result) for result in results)
        text = json.dumps({"conditions": header, "rule": rule, "summary": counts}, indent=1)
        options.out.write_text(text.removesuffix("\n}") + ',\n "results": [\n' + lines + "\n ]\n}\n")
    return 1 if counts["failing_operators"] else 0


if __name__ == "__main__":
    sys.exit(main())
