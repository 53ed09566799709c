"""Mistakes of new users: each is one clear sentence, within the first lines that a terminal shows.

As a script, `python test_mistakes.py no_unit` makes one of them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from steps import ATEN
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import budget, enable, float8, int8, unused
from aot_hooks.__main__ import main
from aot_hooks.settings import recompiles

FIRST_LINES = 20
MOST_LINES = 25  # so that a terminal shows all of it: Dynamo adds five lines to an error's message


class Blocks(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def train(model: Callable[[torch.Tensor], torch.Tensor], rows: int = 8) -> None:
    model(torch.randn(rows, 32, requires_grad=True)).square().mean().backward()


def no_unit() -> None:
    enable(budget(80))


def a_share() -> None:
    enable(budget("80%"))


def a_wrong_unit() -> None:
    enable(budget(total="80 gigs"))


def a_total_below_the_weights() -> None:
    with enable(budget(total="1KiB"), options=ATEN):
        train(torch.compile(Blocks()))


def a_budget_below_what_is_possible() -> None:
    with enable(budget("4KiB"), options=ATEN):
        train(torch.compile(Blocks()))


def a_budget_below_what_is_possible_in_the_explicit_form() -> None:
    train(torch.compile(Blocks(), backend="aot_hooks", options={**ATEN, "policy": budget("4KiB")}))


def a_policy_that_is_not_called() -> None:
    enable(float8)


def the_model_in_place_of_a_policy() -> None:
    enable(torch.compile(Blocks()))


def a_mean_that_is_misspelled() -> None:
    budget("24GiB", allow=["ofload"])


def plans_of_a_model_that_is_not_compiled() -> None:
    aot_hooks.last_plans(Blocks())


def plans_before_the_first_step() -> None:
    _ = aot_hooks.last_plans(torch.compile(Blocks(), backend="aot_hooks", options={**ATEN, "policy": float8()}))[0]


def a_plan_without_inputs() -> None:
    aot_hooks.plan(Blocks(), policy=float8())


def a_frontier_without_inputs() -> None:
    aot_hooks.frontier(Blocks())


def a_check_without_inputs() -> None:
    aot_hooks.check_gradients(Blocks(), policy=float8())


def an_unknown_option() -> None:
    train(torch.compile(Blocks(), backend="aot_hooks", options={**ATEN, "polcy": float8()}))


def checkpoints_inside() -> None:
    with enable(float8(), options=ATEN):
        train(torch.compile(Blocks(checkpoints=True)))


def checkpoints_around() -> None:
    compiled = torch.compile(Blocks())
    with enable(float8(), options=ATEN):
        train(lambda x: checkpoint(compiled, x, use_reentrant=False))


def reentrant_checkpoints_around_the_forward() -> None:
    compiled = torch.compile(Blocks())
    with enable(float8(), options=ATEN):
        loss = checkpoint(compiled, torch.randn(8, 32, requires_grad=True), use_reentrant=True).sum()
    loss.backward()


def reentrant_checkpoints_in_a_context_around_the_forward() -> None:
    compiled = torch.compile(Blocks(), backend="aot_hooks", options=ATEN)
    with aot_hooks.saved_tensors_policy(float8()):
        loss = checkpoint(compiled, torch.randn(8, 32, requires_grad=True), use_reentrant=True).square().sum()
    loss.backward()


def not_compiled() -> None:
    with enable(float8()):
        train(Blocks())


def two_at_once() -> None:
    with enable(float8(), options=ATEN), enable(int8(), options=ATEN):
        train(torch.compile(Blocks()))


def another_backend() -> None:
    with enable(float8()):
        train(torch.compile(Blocks(), backend="aot_eager"))


def fit_on_a_cpu() -> None:
    with enable(budget("fit"), options=ATEN):
        train(torch.compile(Blocks()))


def lengths_that_vary() -> None:
    compiled = torch.compile(Blocks(), dynamic=False)
    with enable(float8(), options=ATEN), torch._dynamo.config.patch(recompile_limit=2):
        for rows in range(2, 6):
            train(compiled, rows)


def a_second_thread() -> None:
    raised: list[Exception] = []

    def work() -> None:
        try:
            enable(int8())
        except aot_hooks.errors.OptionError as e:
            raised.append(e)

    with enable(float8(), options=ATEN):
        train(torch.compile(Blocks()))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    raise raised[0]


def a_second_process() -> None:
    with enable(float8(), options=ATEN):
        process = multiprocessing.get_context("spawn").Process(target=train, args=(Blocks(),))
        process.start()
        process.join()


def a_hook_on_a_cpu() -> None:
    logging.basicConfig(level=logging.INFO)
    with enable(float8(), options=ATEN):
        train(torch.compile(Blocks()))


def evaluation_first() -> None:
    logging.basicConfig(level=logging.INFO)
    compiled = torch.compile(Blocks())
    with enable(float8(), options=ATEN):
        with torch.no_grad():
            compiled.eval()(torch.randn(8, 32))
        train(compiled.train())


MISTAKES = {
    no_unit: "80 is less than 1 MiB; did you mean '80GiB'?",
    a_share: "a share of a device is not taken. Write 'fit'",
    a_wrong_unit: 'total must be bytes as an int, "24GiB", "500MB" or "fit", got \'80 gigs\'',
    a_total_below_the_weights: "leave nothing for a step. Shard or offload the weights",
    a_budget_below_what_is_possible: "but the least that was found takes",
    a_budget_below_what_is_possible_in_the_explicit_form: "but the least that was found takes",
    a_policy_that_is_not_called: "float8 is the function that makes one: call it, float8(...)",
    the_model_in_place_of_a_policy: "got an object of class 'OptimizedModule'. It takes aot_hooks.float8() or the like",
    a_mean_that_is_misspelled: "got ['ofload']; did you mean 'offload'?",
    plans_of_a_model_that_is_not_compiled: "takes what torch.compile returned, got an object of class 'Blocks'",
    plans_before_the_first_step: "IndexError: last_plans has 0 plans: nothing is saved for backward",
    a_plan_without_inputs: "missing a required argument: 'x'. Give its arguments after it: aot_hooks.plan(Blocks, x",
    a_frontier_without_inputs: "Give its arguments after it: aot_hooks.frontier(Blocks, x",
    a_check_without_inputs: "Give its arguments after it: check_gradients(Blocks, x",
    an_unknown_option: "unknown option 'polcy'; did you mean 'policy'?",
    checkpoints_inside: "finds little to pack: torch.utils.checkpoint inside of the compiled function",
    checkpoints_around: "does nothing for a compiled function that torch.utils.checkpoint calls",
    reentrant_checkpoints_around_the_forward: "Put the context (or enable) around the backward too",
    reentrant_checkpoints_in_a_context_around_the_forward: "Put the context (or enable) around the backward too",
    not_compiled: "No compiled function was called: compile the model",
    two_at_once: "Only the innermost counts, and enable(int8()) was enabled inside this one",
    another_backend: "compiled for another backend, 'aot_eager'. Leave backend= out",
    fit_on_a_cpu: "asks a CUDA device for its free memory, and the saved tensors are on none; give the peak in bytes",
    lengths_that_vary: "mark the sizes that change as dynamic",
    a_second_thread: "thread 'MainThread' has enable(float8()) enabled: disable that first",
}
# What new users did most: each as a script of its own. Two callbacks: tests/integrations/test_mistakes_in_trainers.py.
IN_A_SCRIPT = {
    mistake: MISTAKES[mistake]
    for mistake in (
        no_unit,
        a_total_below_the_weights,
        a_budget_below_what_is_possible_in_the_explicit_form,
        checkpoints_inside,
        not_compiled,
        two_at_once,
        another_backend,
        lengths_that_vary,
    )
} | {
    a_second_process: "a process that is started inside needs an enable of its own",
    a_hook_on_a_cpu: "on a CPU, whose memory is seldom what limits training",
    evaluation_first: "first step: 1 graph, ",  # it is no mistake
}


def shown(run: Callable[[], None]) -> list[str]:
    """The lines that a terminal shows of the warnings and the error of `run`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except Exception as e:
            assert e.__traceback__ is not None  # its first frame is this one, which no script has
            error = "".join(traceback.format_exception(type(e), e, e.__traceback__.tb_next)).splitlines()
        else:
            error = []
    ours = [w for w in caught if issubclass(w.category, UserWarning)]
    return [str(warnings.formatwarning(w.message, w.category, w.filename, w.lineno)).strip() for w in ours] + error


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused, "_warned", set())
    monkeypatch.setattr(recompiles, "_said", set())


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_has_its_sentence_where_one_sees_it(mistake: Callable[[], None]) -> None:
    try:
        lines = shown(mistake)
    finally:
        aot_hooks.disable()
    assert any(MISTAKES[mistake] in line for line in lines[:FIRST_LINES]), "\n".join(lines)
    assert len(lines) <= MOST_LINES, "\n".join(lines)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_reentrant_checkpoint_inside_of_a_whole_step_is_no_mistake(evaluates: bool) -> None:
    def right() -> None:
        compiled = torch.compile(Blocks())
        with enable(float8(), options=ATEN):
            if evaluates:
                with torch.no_grad():
                    compiled(torch.randn(8, 32))
            train(lambda x: checkpoint(compiled, x, use_reentrant=True))
        (plan,) = aot_hooks.last_plans(compiled)
        assert plan.packed_bytes < plan.saved_bytes

    assert shown(right) == []


@pytest.mark.slow
@pytest.mark.parametrize("mistake", IN_A_SCRIPT, ids=lambda mistake: mistake.__name__)
def test_a_script_with_a_mistake_prints_its_sentence_in_the_first_lines(mistake: Callable[[], None]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__, mistake.__name__]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = done.stdout.splitlines()
    mine = 3 * ("in <module>" in done.stdout)  # lines of a traceback's first frame, in this file, which no script has
    assert any(IN_A_SCRIPT[mistake] in line for line in lines[: FIRST_LINES + mine]), done.stdout


@pytest.mark.parametrize("nested", [1, 5])
def test_an_error_under_enable_has_the_users_frames_alone(nested: int) -> None:
    """Else each function of the user's pushes the message two lines further down, behind those of torch."""

    def called(depth: int) -> None:
        if depth:
            called(depth - 1)
        else:
            train(torch.compile(Blocks()))

    def run() -> None:
        with enable(budget("4KiB"), options=ATEN):
            called(nested)

    lines = shown(run)
    files = {line.split('"')[1] for line in lines if line.startswith('  File "')}
    assert files == {__file__}
    assert "Set TORCHDYNAMO_VERBOSE=1" in "\n".join(lines[-2:])


def test_an_error_of_the_user_under_enable_keeps_its_frames() -> None:
    def run() -> None:
        with enable(float8(), options=ATEN):
            torch.compile(Blocks())(torch.randn(8, 5))

    assert any(f"{torch.__path__[0]}" in line for line in shown(run))


ENABLES = "import torch, aot_hooks; aot_hooks.enable(aot_hooks.float8())"
TRAINS = "torch.nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()"
SPAWNS = f"""import multiprocessing
child = multiprocessing.get_context("spawn").Process(target=exec, args=({f"{ENABLES}; {TRAINS}"!r}, {{}}))
child.start(), child.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "warn", "last"),
    [
        (f"{ENABLES}; {TRAINS}", "default", "No compiled function was called: compile the model"),
        (f"{ENABLES}; {TRAINS}", "error", None),
        (f"{ENABLES}; {TRAINS}; raise ValueError('mine')", "default", "ValueError: mine"),
        (f"{ENABLES}; import argparse; argparse.ArgumentParser().parse_args(['--help'])", "default", None),
        (SPAWNS, "default", None),
    ],
    ids=["trains", "an error", "fails", "help", "worker"],
)
def test_a_switch_that_nobody_ends_speaks_at_the_end_of_a_process_that_trains(
    script: str, warn: str, last: str | None
) -> None:
    python = f"import warnings; warnings.simplefilter({warn!r}, UserWarning); {script}"
    shown = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, check=False).stderr
    lines = shown.splitlines()
    if last is None:
        assert lines == []
    else:
        assert last in lines[-1] and "UnusedWarning" not in "".join(lines[:-1]), shown


def test_evaluation_first_is_no_mistake() -> None:
    compiled = torch.compile(Blocks())

    def run() -> None:
        with enable(float8(), options=ATEN):
            with torch.no_grad():
                compiled.eval()(torch.randn(8, 32))
            train(compiled.train())

    assert shown(run) == []
    (plan,) = aot_hooks.last_plans(compiled)
    assert plan.packed_bytes < plan.saved_bytes


def test_a_script_that_is_run_prints_the_sentence_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "net = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)))\n"
        "net(torch.randn(4, 8)).sum().backward()\n"
    )
    assert main(["run", "--budget", "1KiB", "--inner", "aten", str(script)]) == 1
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1 and printed[0].startswith("aot_hooks run: budget('1KiB'): expected a step under")


def test_an_error_keeps_its_own_frames_for_those_who_look() -> None:
    with pytest.raises(Exception, match="leave nothing for a step") as caught:
        a_total_below_the_weights()
    inner = aot_hooks.errors.unwrapped(caught.value)
    assert inner is not None and any(f.name == "fitted" for f in traceback.extract_tb(inner.__traceback__))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
