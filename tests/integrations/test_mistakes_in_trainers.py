"""Mistakes with transformers' Trainer, each as a script: one sentence within the first lines of what it prints.

As a script, `python test_mistakes_in_trainers.py two_callbacks` makes one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trained import ATEN, TEXT, llama  # noqa: E402

from aot_hooks import budget, float8, int8  # noqa: E402
from aot_hooks.integrations.transformers import AotHooksCallback  # noqa: E402

FIRST_LINES = 20


def trainer_of(policy: Any, **arguments: Any) -> Any:
    data = [{"input_ids": row, "labels": row} for row in TEXT]
    arguments = {"max_steps": 2, "report_to": [], "save_strategy": "no", "use_cpu": True} | arguments
    trainer = transformers.Trainer(llama(), transformers.TrainingArguments("out", **arguments), train_dataset=data)
    AotHooksCallback(policy, options=ATEN).add_to(trainer)
    return trainer


def two_callbacks() -> None:
    AotHooksCallback(int8(), options=ATEN).add_to(trainer_of(float8(), torch_compile=True))


def not_compiled() -> None:
    trainer_of(float8()).train()


def a_misspelled_argument() -> None:
    AotHooksCallback(float8(), chek=True)


def the_model_in_place_of_the_trainer() -> None:
    AotHooksCallback(float8()).add_to(llama())


def checkpointing_on() -> None:
    trainer_of(float8(), torch_compile=True, gradient_checkpointing=True).train()


def a_total_below_the_weights() -> None:
    trainer_of(budget(total="20KiB"), torch_compile=True).train()


MISTAKES = {
    two_callbacks: "this Trainer has an AotHooksCallback already, for float8(): a model has one policy at a time",
    not_compiled: "No compiled function was called: compile the model",
    a_misspelled_argument: "no argument 'chek'; did you mean 'check'?",
    the_model_in_place_of_the_trainer: "expected a Trainer of transformers, got an object of class 'LlamaForCausalLM'",
    checkpointing_on: "finds little to pack: torch.utils.checkpoint inside of the compiled function",
    a_total_below_the_weights: "leave nothing for a step. Shard or offload the weights",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_script_with_a_mistake_prints_its_sentence_in_the_first_lines(
    mistake: Callable[[], None], tmp_path: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__, mistake.__name__]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    mine = 3 * ("in <module>" in done.stdout)  # lines of a traceback's first frame, in this file, which no script has
    lines = done.stdout.splitlines()[: FIRST_LINES + mine]
    assert any(MISTAKES[mistake] in line for line in lines), done.stdout


if __name__ == "__main__":
    globals()[sys.argv[1]]()
