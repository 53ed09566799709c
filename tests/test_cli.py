"""`python -m aot_hooks`: a script is run as it is, and what it saves is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aot_hooks.__main__ import main

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
    assert data["measured_peak_bytes"] is None or data["measured_peak_bytes"] > 0


@pytest.mark.core
def test_a_script_computes_what_it_would(script: str, capsys: Any) -> None:
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
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


def test_policies_are_expressions(script: str, capsys: Any) -> None:
    assert report("--policy", "lambda s: float8() if s.nbytes > 10000 else KEEP", script) == 0
    assert "float8(e4m3fn, rowwise): scope 'donated'" in capsys.readouterr().out


def test_steps_end_a_script(script: str, capsys: Any) -> None:
    assert report("--steps", "2", script) == 0
    text = capsys.readouterr().out
    assert "optimizer steps: 2" in text and len(losses(text)) == 1  # it stops inside of the second


def test_scripts_that_compile_a_function(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "fn.py"
    path.write_text(
        "import torch\n"
        "f = torch.compile(lambda x: x.sin().exp().sum(), backend='eager')\n"
        "f(torch.randn(64, requires_grad=True)).backward()\n"
    )
    assert report(str(path)) == 0
    assert "1 compiled graph with a backward" in capsys.readouterr().out


def test_a_module_that_cannot_be_followed_is_named(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "reads.py"
    path.write_text(
        "import torch\n"
        "class Reads(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        h = x.sin()\n"
        "        return h.exp() if h.sum().item() > 0 else h.cos()\n"
        "torch.nn.Linear(4, 4)(torch.randn(2, 4)).tanh().sum().backward()\n"
        "Reads()(torch.randn(4, requires_grad=True)).sum().backward()\n"
        "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())(torch.randn(2, 4)).sum().backward()\n"
    )
    assert report(str(path)) == 0
    text = capsys.readouterr().out
    assert "not in it: Reads: " in text and "Sequential" in text


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


def test_env_still_prints(capsys: Any) -> None:
    assert main(["env"]) == 0
    assert "private symbols:" in capsys.readouterr().out


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
