"""The recipes of docs/trainers.md for LLaMA-Factory and ms-swift, as printed, on a small Llama.

Both pin versions of what they need, so neither is in the environment of the other tests. On top of that one:

    pip install --no-deps llamafactory==0.9.5 trl==0.24.0 transformers==5.6.0 tokenizers==0.22.2 'huggingface_hub<2'
    pip install --no-deps ms-swift==4.6.0

and what their imports name as missing. Where no torchaudio is for this torch, an empty module of that name does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def recipe(heading: str) -> str:
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    section = page[page.index(f"\n## {heading}\n") :]
    found = re.search(r"^```python notest\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a small Llama, and of a tokenizer that has a word for each character."""
    transformers = pytest.importorskip("transformers")
    import tokenizers
    from trained import llama

    words = {"<pad>": 0, "<end>": 1, **{chr(code): code - 30 for code in range(32, 127)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    folder = tmp_path / "model"
    names = {"pad_token": "<pad>", "eos_token": "<end>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    small = llama()
    small.config.max_position_embeddings = 2048  # its angles have no table
    small.save_pretrained(folder)
    return folder


def logged(folder: Path, command: list[str]) -> dict[str, str]:
    """The numbers of this package in what `command` logs after a step."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory's, of packages that pip has checked
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    numbers = dict(re.findall(r"'aot_hooks/(\w+)': '?([\d.e+]+)", done.stdout))
    assert done.returncode == 0 and numbers, done.stdout[-4000:]
    return numbers


SHARED: dict[str, Any] = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no"}


@pytest.mark.skipif(importlib.util.find_spec("llamafactory") is None, reason="LLaMA-Factory is not installed")
def test_llama_factory(tmp_path: Path, model: Path) -> None:
    rows = [{"instruction": "say hello", "input": "", "output": "hello there " * 4}] * 16
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    settings = SHARED | {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "rows",
        "dataset_dir": str(tmp_path),
        "template": "llama2",
        "cutoff_len": 64,
        "output_dir": str(tmp_path / "out"),
        "report_to": "none",
        "use_cpu": True,
    }
    (tmp_path / "sft.yaml").write_text(json.dumps(settings))  # JSON is YAML
    (tmp_path / "train.py").write_text(recipe("LLaMA-Factory"))
    switches = ["torch_compile=true", "disable_gradient_checkpointing=true"]
    numbers = logged(tmp_path, ["train.py", "sft.yaml", *switches])
    assert float(numbers["saved_mib"]) > 0 and float(numbers["budget_mib"]) == pytest.approx(24 * 1024, rel=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("swift") is None, reason="ms-swift is not installed")
def test_ms_swift(tmp_path: Path, model: Path) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there " * 4}]
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps({"messages": messages})] * 16))
    (tmp_path / "hooks.py").write_text(recipe("ms-swift"))
    settings = SHARED | {
        "model": model,
        "model_type": "llama",
        "template": "chatml",
        "system": "x",
        "dataset": "rows.jsonl",
        "split_dataset_ratio": 0,
        "max_length": 2000,
        "tuner_type": "full",
        "torch_dtype": "float32",
        "attn_impl": "sdpa",
        "output_dir": "out",
        "report_to": "none",
        "use_cpu": "true",
        "external_plugins": "hooks.py",
        "callbacks": "aot_hooks",
        "torch_compile": "true",
        "gradient_checkpointing": "false",
    }
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    program = "import sys; from swift.pipelines import sft_main; sft_main(sys.argv[1:])"
    numbers = logged(tmp_path, ["-c", program, *words])
    assert float(numbers["saved_mib"]) > 0 and float(numbers["budget_mib"]) == pytest.approx(24 * 1024, rel=1e-3)
