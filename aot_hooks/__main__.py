"""`python -m aot_hooks env`: what a bug report needs. `... report script.py`: what a script saves for backward.
`... run --budget 24GiB script.py`: a script that knows nothing of this package trains with a policy.
`... frontier script.py`: what memory a script can do without, at what cost. `... explain-miss`: why the last graph with
hooks was not in torch's cache.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import logging
import pathlib
import platform
import sys
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

import aot_hooks
import cudagraph.torch_private
from cudagraph.torch_private import symbols

from ._version import __version__
from .cache import notes
from .errors import AotHooksError, OptionError, error_behind, is_library_file, unwrapped
from .hook import KEEP
from .passes.plan import Plan
from .planning.budget import ALLOWED, budget
from .report import script
from .report.expressions import evaluated
from .report.frontier import frontier_of, on_gpu
from .report.plot import check_can_plot, plot_report
from .report.script import Recorded, ScriptError, run_as_program, run_script
from .report.text import format_report, report_as_data
from .settings.byte_sizes import parse_size
from .settings.setting import SCOPES
from .torch_private import aot_cache

_HOOKS = ("float8", "int8", "int4", "bitmask", "cast", "offload", "lossless")


def env_data() -> dict[str, Any]:
    """Versions, devices, and each private symbol of torch that the two packages use."""
    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    entry_points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="aot_hooks")
    return {
        "aot_hooks": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_tested": list(symbols.TESTED),
        "triton": next((d.version for d in importlib.metadata.distributions(name="triton")), None),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(device_count)],
        "backend_entry_point": next((e.value for e in entry_points), None),
        "private_symbols": [row for package in (aot_hooks, cudagraph) for row in _private_symbols(package)],
    }


def _private_symbols(package: types.ModuleType) -> Iterator[dict[str, Any]]:
    for file in sorted(pathlib.Path(package.torch_private.__path__[0]).glob("*.py")):
        for row in symbols.rows_of(package.__name__, file.read_text(encoding="utf-8")):
            yield {**row._asdict(), "found": row.status == "ok"}


def env(options: argparse.Namespace) -> None:
    data = env_data()
    if options.json:
        print(json.dumps(data, indent=1))
        return
    lines = [
        f"aot_hooks {data['aot_hooks']}",
        f"python {data['python']} on {data['platform']}",
        f"torch {data['torch']} (tested: {', '.join(data['torch_tested'])})",
        f"triton {data['triton'] or 'not installed'}",
        f"cuda {data['cuda'] or 'none'}: {', '.join(data['devices']) or 'no device'}",
        f"backend entry point: {data['backend_entry_point'] or 'MISSING (install the package: pip install -e .)'}",
    ]
    rows = data["private_symbols"]
    count = Counter(row["status"] for row in rows)
    lines.append(
        f"private symbols of torch: {count['ok']} found, {count['absent']} that this build or version need not have, "
        f"{count['MISSING']} missing"
    )
    shown = rows if options.symbols else [row for row in rows if row["status"] == "MISSING" and not options.short]
    if shown:
        lines.append("private symbols:")
        lines += [f"  {row['status']:7} {row['path']} ({row['package']}: {row['needed_for']})" for row in shown]
    print("\n".join(lines))


def report(options: argparse.Namespace) -> None:
    settings = {"policy": _policy(options), "scope": options.scope, "inner": options.inner}
    _check_can_write("--json", options.json)
    _check_can_write("--plot", options.plot)
    if options.plot is not None:
        check_can_plot(options.plot)
    recorded = run_script(options.script, options.arguments, settings, options.steps)
    plan = recorded.plan
    measured = {"measured_peak_bytes": recorded.peak_bytes, "measured_optimizer_bytes": recorded.optimizer_bytes}
    print("\n" + _heading(options.script, recorded))
    print(format_report(plan, **measured))
    if options.json is not None:
        other_graphs = {
            "graph_count": len(recorded.compiled) - len(recorded.reported),
            "saved_bytes": recorded.others.saved_bytes,
            "packed_bytes": recorded.others.packed_bytes,
        }
        data = report_as_data(plan) | measured | {"other_graphs": other_graphs}
        pathlib.Path(options.json).write_text(json.dumps(data, indent=1) + "\n")
    if options.plot is not None:
        plot_report(plan, options.plot)


def train(options: argparse.Namespace) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("aot_hooks").setLevel(logging.INFO)  # one line after the first step, one at the end
    settings = {"scope": options.scope, "options": {"inner": options.inner}, "check": options.check}
    with aot_hooks.enable(_policy(options), **settings):
        try:
            run_as_program(options.script, options.arguments)
        except Exception as e:
            if (ours := error_behind(e, AotHooksError)) is None:
                raise
            raise ours from e  # `main` prints its message alone


def print_frontier(options: argparse.Namespace) -> None:
    def plan_with(policy: Any) -> Plan:
        settings = {"policy": policy, "scope": options.scope, "inner": options.inner}
        torch.compiler.reset()
        gc.collect()  # the optimizer of the run before, whose state would count
        return run_script(options.script, options.arguments, settings, 1).plan

    if options.gpu:
        for size in options.gpu:  # before the script runs
            parse_size(size, "gpu")
        for size in options.gpu:
            print(f"{size}: {on_gpu(plan_with, size, **_of_budget(options))}")
    else:
        print(frontier_of(plan_with(KEEP), plan_with, **_of_budget(options)))


def _of_budget(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a budget that the command line gives."""
    given = {"allow": options.allow, "max_error": options.max_error}
    return {name: value for name, value in given.items() if value is not None}


def explain_miss(options: argparse.Namespace) -> None:
    miss = notes.last_miss(options.dir)
    if miss is None:
        raise AotHooksError(f"no graph with hooks has missed torch's cache in {options.dir or aot_cache.cache_dir()}")
    print(json.dumps(miss.as_data(), indent=1) if options.json else notes.explain(miss))


def _check_can_write(option: str, path: str | None) -> None:
    """Raises `OptionError` unless `path` can be a file. Called before the script runs, which may take hours."""
    if path is None:
        return
    if not path:
        raise OptionError(f"{option}: expected the path of a file, got {path!r}")
    folder = pathlib.Path(path).parent
    if not folder.is_dir():
        raise OptionError(f"{option} {path}: no such folder: {folder}")
    if pathlib.Path(path).is_dir():
        raise OptionError(f"{option} {path}: is a folder; expected the path of a file")


def _step_count(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _policy(options: argparse.Namespace) -> Any:
    """The hook or policy that the command line names, None if none."""
    if options.hook is not None:
        name, with_arguments, _ = options.hook.partition("(")
        if name not in _HOOKS:
            raise OptionError(f"--hook: aot_hooks has no hook {name!r}; it has {', '.join(_HOOKS)}")
        return evaluated("--hook", options.hook if with_arguments else f"{name}()")
    if options.budget is not None or options.total is not None:
        return budget(options.budget, total=options.total, **_of_budget(options))
    for name in _of_budget(options):
        raise OptionError(f"--{name.replace('_', '-')} is for --budget and --total")
    return None if options.policy is None else evaluated("--policy", options.policy)


def _heading(script: str, recorded: Recorded) -> str:
    """The lines over a report: which graphs or modules it covers, and which parts of the script it does not."""
    notes: list[str] = []
    if recorded.compiled:
        what = _compiled_graphs(recorded, notes)
    else:
        modules = ", ".join(dict.fromkeys(name for name, _ in recorded.eager))
        what = f"run eagerly, reported as torch.compile would save: {modules}"
        notes.append("what the script computes outside of these modules, such as its loss")
    lines = [f"{script}: {what}" + (f"; optimizer steps: {recorded.step_count}" if recorded.step_count else "")]
    lines += [f"  {text}" for text in recorded.over_budget]
    if recorded.keeps_own_hooks:
        lines.append("  by the hooks and options of the script itself")
        notes.append("what the script compiles by other backends than aot_hooks")
    if recorded.hooks_overridden:
        lines.append(
            "  the script uses aot_hooks itself: the backends and options that it asks for are overridden from the "
            "command line (without --hook and --policy they are reported)"
        )
    return "\n".join([*lines, *(f"  not in it: {note}" for note in (*notes, *recorded.notes))])


def _compiled_graphs(recorded: Recorded, notes: list[str]) -> str:
    """Which graphs are in the report; what is not goes to `notes`."""
    count, others = len(recorded.reported), len(recorded.compiled) - len(recorded.reported)
    what = f"{count} compiled graph{'s' if count > 1 else ''} with a backward"
    times = max(map(recorded.times, recorded.reported))
    again = f"; one counts {times} times, as often as what it saved was there at once" if times > 1 else ""
    if not recorded.last_step:
        return what + (", added up as those of one step" if count > 1 else "") + again
    if others:
        saved, packed = recorded.others.saved_bytes / 2**20, recorded.others.packed_bytes / 2**20
        notes.append(
            f"{others} compiled graph{'s' if others > 1 else ''} with a backward that did not run in the last step "
            f"(saved for backward: {saved:.2f} -> {packed:.2f} MiB)"
        )
    return what + ", of the last step" + again


def _add_policy_to(command: argparse.ArgumentParser, *, required: bool) -> None:
    how = command.add_mutually_exclusive_group(required=required)
    hooks = f"for every tensor: {', '.join(_HOOKS)}, or with arguments: 'cast(bfloat16)'"
    how.add_argument("--hook", metavar="NAME", help=hooks)
    how.add_argument("--policy", metavar="EXPRESSION", help="a policy or hook in the names of aot_hooks, evaluated")
    how.add_argument("--budget", metavar="PEAK", help="the fastest step under this peak: 24GiB, 500MB, fit")
    how.add_argument("--total", metavar="BYTES", help="the fastest step with this much allocated in all: 80GiB")


def _for_scripts() -> argparse.ArgumentParser:
    """The arguments of each command that runs a script."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("script")
    shared.add_argument("arguments", nargs="*", default=[], help="arguments of the script, after --")
    shared.add_argument("--scope", choices=SCOPES, default="donated")
    shared.add_argument("--inner", choices=("inductor", "aten"), default="inductor")
    allowed = f"what a budget may use: {','.join(ALLOWED)}"
    shared.add_argument("--allow", metavar="MEANS", type=lambda text: tuple(text.split(",")), help=allowed)
    shared.add_argument("--max-error", type=float, help="predicted relative error of the gradient, 0.05")
    return shared


def parser_of_commands() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m aot_hooks", description=__doc__)
    shared = _for_scripts()
    commands = parser.add_subparsers(dest="command", required=True)
    environment = commands.add_parser("env", help="print what a bug report needs")
    how_much = environment.add_mutually_exclusive_group()
    how_much.add_argument("--short", action="store_true", help="ten lines at most, for an issue")
    how_much.add_argument("--symbols", action="store_true", help="also each private symbol of torch that is used")
    how_much.add_argument("--json", action="store_true", help="all of it as JSON")

    def add_command(name: str, does: str, **others: Any) -> argparse.ArgumentParser:
        usage = f"python -m aot_hooks {name} [options] script.py [-- arguments of the script]"
        return commands.add_parser(name, parents=[shared], help=does, usage=usage, **others)

    verbatim = {"description": script.__doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    run = add_command("report", "run a training script and print what it saves for backward", **verbatim)
    _add_policy_to(run, required=False)
    run.add_argument("--steps", type=_step_count, metavar="N", help="stop after N optimizer steps")
    run.add_argument("--json", metavar="PATH", help="write rows, totals and live bytes there")
    run.add_argument("--plot", metavar="PATH", help="draw saved and live bytes there; needs matplotlib")
    each_point = "run a training script for a step per point, and print what memory a step can do without at what cost"
    points = add_command("frontier", each_point)
    trains = add_command("run", "run a training script, with a policy for what it compiles by torch's own backend")
    _add_policy_to(trains, required=True)
    trains.add_argument("--check", action="store_true", help="compare the first step's gradients with those without")
    sizes = "only what fits on GPUs of these sizes, and the policy for each: 24GiB,80GiB"
    points.add_argument("--gpu", metavar="SIZES", type=lambda text: text.split(","), help=sizes)
    says = "say in what the key of the last cache miss differs from the nearest one stored before"
    miss = commands.add_parser("explain-miss", help=says)
    directory = "torch's cache directory, if not TORCHINDUCTOR_CACHE_DIR or its default"
    miss.add_argument("--dir", metavar="PATH", help=directory)
    miss.add_argument("--json", action="store_true", help="as JSON")
    does = {environment: env, run: report, points: print_frontier, trains: train, miss: explain_miss}
    for command, function in does.items():
        command.set_defaults(run=function)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = parser_of_commands().parse_args(argv)
    try:
        options.run(options)
    except (AotHooksError, OSError) as e:
        cause = e.__cause__
        if isinstance(e, ScriptError) and isinstance(cause, Exception) and unwrapped(cause) is None:
            frames = cause.__traceback__
            while frames is not None and is_library_file(frames.tb_frame.f_code.co_filename):  # they run the script
                frames = frames.tb_next
            traceback.print_exception(cause.with_traceback(frames))
        print(f"aot_hooks {options.command}: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
