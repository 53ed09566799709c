"""`examples/hf_finetune.py`: Hugging Face models, untouched: gradients, bytes, graphs; and it says what it lacks."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from aot_hooks import Hook

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hf_finetune.py"
SMALL = ["--device", "cpu", "--inner", "aten", "--steps", "2"]


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hf_finetune", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def needs_transformers() -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'aot-hooks[hf]'")


def row(text: str, label: str) -> list[str]:
    (line,) = re.findall(rf"^{re.escape(label)}(.*)$", text, re.MULTILINE)
    return line.split()


CASES = [("gpt2", "float8"), ("llama", "lossless"), ("t5", "lossless"), ("t5", "int8"), ("vit", "int8")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "policy"), CASES)
def test_gradients_bytes_and_graphs(
    example: ModuleType, model: str, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_transformers()
    assert example.main(["--model", model, "--policy", policy, *SMALL]) == 0
    out = capsys.readouterr().out
    saved, kept = map(float, row(out, "saved for backward, MiB"))
    if (model, policy) == ("llama", "lossless"):
        assert 0 < kept == saved  # it has nothing to store exactly in fewer bytes
    else:
        assert 0 < kept < (saved if policy == "lossless" else 0.45 * saved)
    stock_loss, hooks_loss = row(out, "first loss")
    assert stock_loss == hooks_loss  # the forward computes with the same numbers
    stock_graphs, hooks_graphs = row(out, "graphs")
    assert int(stock_graphs) == int(hooks_graphs) >= 1


@pytest.mark.slow
def test_a_wrong_gradient_fails(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_transformers()
    negated = Hook("negated", lambda x: -x if x.is_floating_point() else x, lambda x: x)
    monkeypatch.setitem(example.POLICIES, "int8", (lambda: negated, 0.1))
    assert example.main(["--model", "vit", "--policy", "int8", *SMALL]) == 1
    assert re.search(r"FAILED: the gradient is \S+ off", capsys.readouterr().err)


def test_graphs_are_counted(example: ModuleType) -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            torch._dynamo.graph_break()
            return y.cos()

    def run(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return graph.forward

    batch = {"x": torch.randn(3)}
    assert example.count_graphs(Broken(), batch, run, None) == 2
    assert example.count_graphs(Broken(), batch, example.our_backend, example.POLICIES["int8"][0]()) == 2
    assert example.count_graphs(torch.nn.Identity(), {"input": batch["x"]}, run, None) <= 1


def test_without_transformers_it_says_what_to_install(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit, match=r"pip install 'aot-hooks\[hf\]'"):
        example.main([])
