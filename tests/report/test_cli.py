"""`python -m aot_hooks`: runs an unchanged script and reports the tensors that it saves."""

from __future__ import annotations

import json
import logging
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aot_hooks import float8, lossless, records
from aot_hooks.__main__ import main
from aot_hooks.policies import first_match, larger_than
from aot_hooks.report.script import _names_this_package
from cudagraph.torch_private import symbols

EXAMPLES = Path(__file__).parents[2] / "examples"

SCRIPT = """\
import sys
import torch
from torch import nn

torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(32) for _ in range(3))

    def forward(self, x, *, scale):
        for layer in self.layers:
            x = layer(x)
        return x * scale

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
run = torch.compile(net) if "compile" in sys.argv else net
for step in range(4):
    loss = run(torch.randn(64, 32), scale=2.0).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


Reported = Callable[..., str]


@pytest.fixture
def reported(tmp_path: Path, capsys: Any) -> Reported:
    """The report of a script with this source."""

    def run(source: str, *arguments: str) -> str:
        path = tmp_path / "some.py"
        path.write_text(source)
        assert main(["report", *arguments, str(path)]) == 0
        return str(capsys.readouterr().out)

    return run


def losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ")]


def report(*arguments: str) -> int:
    return main(["report", "--inner", "aten", *arguments])


@pytest.mark.core
@pytest.mark.parametrize("how", ["eager", "compile"])
def test_report_of_a_script(how: str, script: str, tmp_path: Path, capsys: Any) -> None:
    assert report("--hook", "float8", "--json", str(tmp_path / "out.json"), script, "--", how) == 0
    text = capsys.readouterr().out
    data = json.loads((tmp_path / "out.json").read_text())
    assert f"{data['totals']['packed_tensor_count']} of {data['totals']['tensor_count']} tensors packed" in text
    assert 0 < data["totals"]["packed_bytes"] < data["totals"]["saved_bytes"]
    assert "layers.0-2 " in text and "train.py:13" in text and "predicted peak" in text
    assert "optimizer steps: 4" in text and len(losses(text)) == 4
    assert ("compiled graph" in text) == (how == "compile")
    assert ("run eagerly" in text) == (how == "eager")
    assert data["measured_peak_bytes"] is None  # it trains on the CPU, also where torch has a GPU


def test_a_script_computes_what_it_would(script: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(script, run_name="__main__")
    out = capsys.readouterr().out
    before = (list(sys.argv), list(sys.path))
    for how in ("eager", "compile"):
        torch._dynamo.reset()
        assert report(script, "--", how) == 0
        got, expected = losses(capsys.readouterr().out), losses(out)
        assert len(got) == len(expected) == 4
        for a, b in zip(got, expected, strict=True):
            assert float(a.split()[2]) == pytest.approx(float(b.split()[2]), rel=1e-5)
    assert (sys.argv, sys.path) == before


def test_without_a_policy_everything_stays(script: str, capsys: Any) -> None:
    assert report(script) == 0
    text = capsys.readouterr().out
    assert "; 0 of " in text and "keep: no hook covers it" in text


@pytest.mark.parametrize(
    "hook, name",
    [("int8", "int8"), ("cast(bfloat16)", "cast(bfloat16)"), ("float8(scaling='tensorwise')", "tensorwise")],
)
def test_hooks_by_name_and_with_arguments(hook: str, name: str, script: str, capsys: Any) -> None:
    assert report("--hook", hook, "--steps", "1", script) == 0
    text = capsys.readouterr().out
    assert name in text and "; 0 of " not in text


def test_lossless_is_a_hook_of_the_command(script: str, capsys: Any) -> None:
    assert report("--hook", "lossless", "--steps", "1", script) == 0
    assert "keep: lossless" in capsys.readouterr().out


@pytest.mark.parametrize(
    "policy, reason",
    [
        ("lambda s: float8() if s.nbytes > 10000 else KEEP", "policy <lambda>"),
        (repr(first_match(lossless(), larger_than(10000, float8()))), "larger than 10000 bytes"),
    ],
)
def test_policies_are_expressions(policy: str, reason: str, script: str, capsys: Any) -> None:
    assert report("--policy", policy, "--steps", "1", script) == 0
    assert f"float8(e4m3fn, rowwise): {reason}; read by" in capsys.readouterr().out


def test_steps_end_a_script(script: str, capsys: Any) -> None:
    assert report("--steps", "2", script) == 0
    text = capsys.readouterr().out
    assert "optimizer steps: 2" in text and len(losses(text)) == 1  # it stops inside of the second


def test_scripts_that_compile_a_function(reported: Reported) -> None:
    source = """
import torch
f = torch.compile(lambda x: x.sin().exp().sum(), backend='eager')
f(torch.randn(64, requires_grad=True)).backward()
"""
    assert "1 compiled graph with a backward" in reported(source, "--inner", "aten")


def test_a_second_script_is_not_taken_for_the_first(tmp_path: Path, capsys: Any) -> None:
    # Dynamo caches `__main__`, which is another module for each script
    for name in ("tanh", "sigmoid"):
        source = f"""import torch
def {name}_of(x):
    return torch.{name}(x)
class Model(torch.nn.Module):
    def forward(self, x):
        return {name}_of(x) * x
Model()(torch.ones(3, requires_grad=True)).sum().backward()
"""
        (tmp_path / "script.py").write_text(source)
        assert report("--inner", "aten", str(tmp_path / "script.py")) == 0
        assert f"{name} float32[3]" in capsys.readouterr().out


def test_modules_that_take_the_place_of_others_in_memory_are_planned(reported: Reported) -> None:
    source = """
import torch
for i in range(12):
    kind = type(f'Kind{i}', (torch.nn.Tanh,), {})
    kind()(torch.randn(4, requires_grad=True)).sum().backward()
"""
    assert ", ".join(f"Kind{i}" for i in range(12)) in reported(source, "--inner", "aten")


AND_ANOTHER = """
torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())(torch.randn(2, 4)).sum().backward()
print('went on')
"""


def test_a_module_that_cannot_be_followed_is_named(reported: Reported) -> None:
    source = """
import torch
class Reads(torch.nn.Module):
    def forward(self, x):
        h = x.sin()
        return h.exp() if h.sum().item() > 0 else h.cos()
torch.nn.Linear(4, 4)(torch.randn(2, 4)).tanh().sum().backward()
Reads()(torch.randn(4, requires_grad=True)).sum().backward()
"""
    text = reported(source + AND_ANOTHER, "--inner", "aten")
    assert "not in it: Reads: " in text and "Sequential" in text


def test_a_module_that_runs_but_does_not_compile_does_not_end_the_script(reported: Reported) -> None:
    source = """
import torch
class Tries(torch.nn.Linear):
    def forward(self, x):
        try:
            h = super().forward(x[:, :3])
        except RuntimeError:
            h = super().forward(x)
        return h.tanh()
Tries(4, 4)(torch.randn(2, 4)).sum().backward()
"""
    text = reported(source + AND_ANOTHER, "--inner", "aten")
    # torch 2.15 follows the `try` on fake tensors too, so there it is planned
    named = "not in it: Tries: cannot be compiled" in text
    assert "went on" in text and "Sequential" in text
    assert named or torch.__version__ >= "2.15"


OWN = """\
import sys
import torch
from torch import nn
import aot_hooks

torch.manual_seed(0)

def train(**how):
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = torch.compile(net, **how)
    for _ in range(2):
        compiled(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
    return aot_hooks.last_plans(compiled)

def ours(policy):
    return train(backend="aot_hooks", options={"inner": "aten", "policy": policy})

assert train(backend="aot_eager") == ()
assert train(backend="aot_hooks", options={"inner": "aten"}) == ()
(plan,) = ours(aot_hooks.KEEP)
(plan,) = ours(aot_hooks.cast(torch.bfloat16))
print("own", plan.saved_bytes, plan.packed_bytes)
"""


@pytest.mark.slow
def test_a_script_with_hooks_of_its_own_is_reported_as_it_is(tmp_path: Path, capsys: Any) -> None:
    path, out = tmp_path / "own.py", tmp_path / "out.json"
    path.write_text(OWN)
    alone = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True).stdout.split()
    assert main(["report", "--json", str(out), str(path)]) == 0
    text, data = capsys.readouterr().out, json.loads(out.read_text())
    own = next(line.split() for line in text.splitlines() if line.startswith("own "))
    totals = [data["totals"]["saved_bytes"], data["totals"]["packed_bytes"]]
    assert own == alone == ["own", *map(str, totals)] and totals[1] < totals[0]
    assert {row["hook"] for row in data["rows"]} == {"cast(bfloat16)", "keep"}
    assert "1 compiled graph with a backward, of the last step" in text and "hooks and options of the script" in text
    # the graphs without hooks are listed, that of the other backend is not seen
    assert "not in it: 2 compiled graphs" in text and "other backends than aot_hooks" in text
    assert data["other_graphs"] == {"graph_count": 2, "saved_bytes": 2 * totals[0], "packed_bytes": 2 * totals[0]}


@pytest.mark.core
def test_a_context_inside_the_script_is_reported_and_nothing_listens_on(reported: Reported) -> None:
    source = """
import torch
from aot_hooks import checkpoint_name, float8, saved_tensors_hooks
pack, unpack = float8().pack, float8().unpack
def f(x):
    with saved_tensors_hooks(pack, unpack):
        return checkpoint_name(x @ x, 'wave').square().sum()
f = torch.compile(f, backend='aot_hooks', options={'inner': 'aten'})
f(torch.randn(64, 64, requires_grad=True)).backward()
"""
    text = reported(source)
    assert "float8(e4m3fn, rowwise): scope 'donated'" in text and "named 'wave'" in text
    assert records.recording_graphs() is None


def test_a_policy_from_outside_overrides_that_of_the_script(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN.replace("(plan,) = ", "plans = ").replace('print("own", plan', "raise SystemExit #"))
    assert report("--hook", "int8", str(path)) == 0
    text = capsys.readouterr().out
    assert "int8(64): scope" in text and "cast(bfloat16)" not in text
    assert "uses aot_hooks itself" in text and "overridden" in text
    path.write_text(OWN)  # its plans are not there: the error says why
    assert report("--hook", "int8", str(path)) == 1
    assert "leave --hook and --policy out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "source, own",
    [
        ("import aot_hooks.policies", True),
        ("def f():\n    from aot_hooks import plan", True),
        ("torch.compile(f, backend='aot_hooks')", True),
        ("import aot_hooks_other  # aot_hooks", False),
        ("print('we leave aot_hooks alone')", False),
        ("from . import x", False),
        ("def f(:", False),
    ],
)
def test_scripts_that_use_the_package_are_told_by_their_syntax(source: str, own: bool, tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(source)
    assert _names_this_package(str(path)) is own


def test_graphs_of_the_last_step_are_reported_and_others_named(reported: Reported, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    source = """
import torch
nets = [torch.nn.Sequential(torch.nn.Linear(n, n), torch.nn.Tanh()) for n in (32, 64)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
second = torch.optim.SGD(nets[1].parameters(), lr=0.1)
compiled = [torch.compile(net) for net in nets]
for _ in range(3):
    for n, (run, optimizer) in zip((32, 64), zip(compiled, optimizers)):
        for _ in range(n // 32):
            run(torch.randn(8, n)).sum().backward()
        optimizer.step()
    second.step()
compiled[0](torch.randn(8, 32))  # after the last step: in no complete one
"""
    text = reported(source, "--inner", "aten", "--json", str(out))
    data = json.loads(out.read_text())
    assert data["totals"]["saved_bytes"] == 4 * 8 * 64 and data["other_graphs"]["saved_bytes"] == 4 * 8 * 32
    assert "1 compiled graph with a backward, of the last step" in text and "not in it: 1 compiled graph" in text
    assert "times" not in text  # the second ran twice, one after the other


LAYERS = """
import torch
class Layer(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()
layers = torch.nn.ModuleList(Layer(64, 64) for _ in range(4))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for layer in layers:
    layer.compile()
for _ in range(2):
    for _ in range({batches}):
        x = torch.randn(8, 64, requires_grad=True)
        for layer in layers:
            x = layer(x)
        {between}
        x.sum().backward()
    {step}
    before = x  # of a step that is over
"""


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("step", ["optimizer.step()", "pass"])
def test_layers_that_run_one_graph_count_each(tmp_path: Path, capsys: Any, batches: int, step: str) -> None:
    path, out = tmp_path / "layers.py", tmp_path / "out.json"
    path.write_text(LAYERS.format(batches=batches, step=step, between="lost = layers[0](x); del lost"))
    assert report("--json", str(out), "--hook", "cast(bfloat16)", str(path)) == 0
    text, data = capsys.readouterr().out, json.loads(out.read_text())
    assert data["totals"]["saved_bytes"] == sum(row["saved_bytes"] for row in data["rows"]) == 5 * 4 * 8 * 64
    assert "one counts 5 times, as often as what it saved was there at once" in text
    assert data["totals"]["predicted_peak_before_bytes"] >= 5 * 4 * 8 * 64


def test_graphs_of_one_step_are_added_up(reported: Reported) -> None:
    source = """
import torch
first, second = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(2))
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
a, b = torch.compile(first), torch.compile(second)
for _ in range(2):
    b(a(torch.randn(8, 64))).sum().backward()
    optimizer.step()
"""
    text = reported(source, "--inner", "aten")
    assert "2 compiled graphs with a backward, of the last step" in text and "not in it" not in text


@pytest.mark.parametrize(
    "source, message",
    [
        (None, "no such script"),
        ("raise ValueError('mine')", "raised ValueError: mine"),
        ("import sys; sys.exit(3)", "exited with 3"),
        ("print('no training')", "saved nothing for backward"),
        ("import torch\nwith torch.no_grad(): torch.nn.Linear(2, 2)(torch.ones(2, 2))", "saved nothing for backward"),
    ],
)
def test_errors_are_clear(source: str | None, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "bad.py"
    if source is not None:
        path.write_text(source)
    assert report(str(path)) == 1
    error = capsys.readouterr().err
    assert f"aot_hooks report: {path}" in error or "aot_hooks report: no such script" in error
    assert message in error


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        ("", "no module could be planned"),
        ("torch.compile", "raised BudgetError: budget('10B'): expected a step under"),  # without Dynamo's words
    ],
)
def test_a_budget_that_is_not_met_is_what_the_error_says(wrap: str, said: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "train.py"
    layers = "torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)"
    path.write_text(f"import torch\nm = {wrap}(torch.nn.Sequential({layers}))\nm(torch.ones(64, 8)).sum().backward()")
    assert report("--budget", "10B", str(path)) == 1
    error = capsys.readouterr().err
    assert said in error and "expected a step under" in error
    assert "saved nothing" not in error and "TORCHDYNAMO_VERBOSE" not in error


def test_a_budget_that_graphs_are_over_together_is_in_the_heading(reported: Reported) -> None:
    source = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        x = torch.nn.functional.gelu(x * 2)
        torch._dynamo.graph_break()
        return torch.nn.functional.gelu(x * 2).sum()
Model()(torch.ones(256, 256, requires_grad=True)).backward()
"""
    text = reported(source, "--inner", "aten", "--budget", "1200KiB")
    assert "its 2 graphs are planned one by one here" in text and "last_plans(compiled)" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hook", "nothing"], "has no hook 'nothing'"),
        (["--hook", "plan"], "has no hook 'plan'"),
        (["--hook", "cast"], "expected an expression such as"),
        (["--policy", "float8("], "SyntaxError"),
        (["--policy", "3"], "policy"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str, script: str, capsys: Any) -> None:
    assert report(*arguments, script) == 1
    assert message in capsys.readouterr().err


TRAINS = """
import sys, torch
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
step = torch.compile(net)
step(torch.randn(4, 8)).sum().backward()
print(sys.argv[1:], __name__, net[0].weight.grad.abs().sum().item() > 0)
sys.exit(int(sys.argv[1]))
"""


def test_run_trains_a_script_with_a_policy(tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture) -> None:
    path, level = tmp_path / "train.py", logging.getLogger("aot_hooks").level
    path.write_text(TRAINS)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["run", "--hook", "int8", "--check", "--inner", "aten", str(path), "--", "5"])
    finally:
        logging.getLogger("aot_hooks").setLevel(level)
    assert ended.value.code == 5 and "['5'] __main__ True" in capsys.readouterr().out
    lines = [r.getMessage() for r in caplog.records]
    assert any("gradients are within" in line for line in lines)
    assert [line.partition(": 1 graph")[0] for line in lines if "1 graph" in line] == [
        "aot_hooks: enable(int8()): first step",
        "aot_hooks: enable(int8()) ended",
    ]
    assert main(["run", "--hook", "int8", str(tmp_path / "none.py")]) == 1
    assert "no such script" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(path)])
    assert "--hook --policy --budget --total is required" in capsys.readouterr().err


GPU = """
import torch
net = torch.nn.Sequential(*[m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())])
optimizer = torch.optim.AdamW(net.parameters())
torch.compile(net)(torch.randn(8192, 64)).sum().backward()
optimizer.step()
"""


def test_frontier_says_which_policy_fits_on_a_gpu(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "train.py"
    path.write_text(GPU)
    assert main(["frontier", "--gpu", "64MiB,17MiB,5MiB", "--inner", "aten", str(path)]) == 0
    large, small, none = capsys.readouterr().out.splitlines()
    assert large.startswith("64MiB: aot_hooks.budget(total='60.8MiB'): a step takes ") and "1.000 times" in large
    taken, before = re.findall(r"([\d.]+) MiB", small)
    assert float(taken) < 16.1 - 2 < float(before) and small.startswith("17MiB: aot_hooks.budget(total=")
    assert none.startswith("5MiB: does not fit. budget(total='4.75MiB'): expected a step under")
    assert "weights and data 2.048 MiB, state of AdamW" in none
    assert main(["frontier", "--gpu", "64MiB,80", "--inner", "aten", str(path)]) == 1
    said = capsys.readouterr()
    assert not said.out and "did you mean '80GiB'" in said.err


def test_env_prints_text_and_json(capsys: Any) -> None:
    said = {}
    for option in ("--short", "--symbols", "--json"):
        assert main(["env", option]) == 0
        said[option] = capsys.readouterr().out
    data, text = json.loads(said["--json"]), said["--symbols"]
    assert f"torch {data['torch']} (tested: {', '.join(data['torch_tested'])})" in text
    listed = text.split("private symbols:\n")[1].splitlines()
    assert [s["path"] for s in data["private_symbols"]] == [line.split()[1] for line in listed]
    assert [s["found"] for s in data["private_symbols"]] == [line.split()[0] == "ok" for line in listed]
    assert len(said["--short"].splitlines()) <= 10 and text.startswith(said["--short"])


def test_env_lists_the_symbols_that_are_missing(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["env"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 10
    monkeypatch.setattr(symbols, "has", lambda path: path != "torch._dynamo.assume_constant_result")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert ", 1 missing" in text
    listed = text.split("private symbols:\n")[1].splitlines()
    assert [line.split()[:2] for line in listed] == [["MISSING", "torch._dynamo.assume_constant_result"]]


@pytest.mark.slow
def test_as_a_program(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aot_hooks", "report", "--hook", "float8", "--inner", "aten"]
    command += ["--plot", str(tmp_path / "out.png")]
    done = subprocess.run([*command, script, "--", "compile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "saved for backward" in done.stdout and "global hooks" not in done.stderr
    assert (tmp_path / "out.png").exists()


@pytest.mark.gpu
def test_measured_peak_stands_beside_the_predicted_one(script: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "cuda.py"
    path.write_text("import torch\ntorch.set_default_device('cuda')\n" + SCRIPT.replace("32", "512"))
    assert report("--json", str(tmp_path / "out.json"), str(path), "--", "compile") == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert "measured peak of forward and backward" in capsys.readouterr().out
    # the loss, outside of the graph, is in the measured one only
    assert data["measured_peak_bytes"] == pytest.approx(data["totals"]["predicted_peak_before_bytes"], rel=0.25)
