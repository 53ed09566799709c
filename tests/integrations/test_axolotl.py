"""`aot_hooks.integrations.axolotl`: the plugin, by its dotted name, with a real Trainer of transformers.

axolotl pins the versions of some 60 packages, so it is not in this environment. Where it can't be imported, a base
class with the methods of axolotl 0.19's stands in for it. `pip install --no-deps axolotl addict` brings its own.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("pydantic")

from trained import ATEN, TEXT, llama  # noqa: E402

from aot_hooks import errors, float8  # noqa: E402
from aot_hooks.planning.budget import budget  # noqa: E402

NAME = "aot_hooks.integrations.axolotl.AotHooksPlugin"
COMPILED = {"torch_compile": True}


class BasePlugin:
    """The methods of axolotl's that its PluginManager calls, as far as a trainer is concerned."""

    def register(self, cfg: Any) -> None: ...

    def get_input_args(self) -> str | None: ...

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None: ...


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin, made as axolotl makes one of the dotted names in its configuration."""
    try:
        importlib.import_module("axolotl.integrations.base")
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin  # type: ignore[attr-defined]
    module, _, name = NAME.rpartition(".")
    return getattr(importlib.import_module(module), name)()


def test_its_base_has_the_methods_that_it_overrides(plugin: Any) -> None:
    (base,) = type(plugin).__bases__
    own = [name for name in vars(type(plugin)) if not name.startswith("_")]
    assert own == ["register", "get_input_args", "post_trainer_create"]
    assert [name for name in own if not callable(getattr(base, name, None))] == []


def test_its_keys_are_a_schema(plugin: Any) -> None:
    module, _, name = plugin.get_input_args().rpartition(".")
    schema = getattr(importlib.import_module(module), name)
    keys = schema(aot_hooks_budget="24GiB", aot_hooks_max_error=0)
    assert keys.aot_hooks_budget == "24GiB" and keys.aot_hooks_policy is None
    with pytest.raises(ValueError, match="aot_hooks_policy"):
        schema(aot_hooks_policy=["float8()"])


@pytest.mark.usefixtures("stock_is_aten")
def test_a_trainer_gets_its_callback_and_trains_with_it(plugin: Any, tmp_path: Path) -> None:
    cfg = COMPILED | {"aot_hooks_policy": "float8()", "aot_hooks_options": ATEN}
    plugin.register(cfg)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no", torch_compile=True
    )
    data = [{"input_ids": row, "labels": row} for row in TEXT]
    trainer = transformers.Trainer(llama(), arguments, train_dataset=data)
    plugin.post_trainer_create(cfg, trainer)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert 0 < logged["aot_hooks/packed_mib"] < logged["aot_hooks/saved_mib"]


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        ({"aot_hooks_policy": "float8()"}, float8()),
        ({"aot_hooks_budget": "24GiB", "aot_hooks_max_error": 0.0}, budget("24GiB", max_error=0.0)),
        ({"aot_hooks_total": "fit"}, budget(total="fit")),
    ],
)
def test_keys_are_policies(plugin: Any, keys: dict[str, Any], policy: Any) -> None:
    callback_of = sys.modules[type(plugin).__module__].callback_of  # type: ignore[attr-defined]
    assert callback_of(keys).training.policy == policy
    assert callback_of(keys).keep_logits is None
    assert callback_of(keys | {"aot_hooks_keep_logits": False}).keep_logits is False


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (COMPILED, "expected one of aot_hooks_policy, aot_hooks_budget, aot_hooks_total .* got none"),
        (
            COMPILED | {"aot_hooks_policy": "float8()", "aot_hooks_total": "80GiB"},
            "got aot_hooks_policy, aot_hooks_to",
        ),
        (COMPILED | {"aot_hooks_policy": "float9()"}, "aot_hooks_policy 'float9.*NameError"),
        (COMPILED | {"aot_hooks_policy": "float8()", "aot_hooks_max_error": 0.1}, "max_error is for"),
        (COMPILED | {"aot_hooks_budget": "24"}, "did you mean '24GiB'"),
        ({"aot_hooks_budget": "24GiB"}, "expected `torch_compile: true`"),
        (COMPILED | {"aot_hooks_policy": "float8()", "activation_offloading": True}, "store the same tensors twice"),
    ],
)
def test_wrong_keys_are_refused_before_a_model_is_loaded(plugin: Any, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.OptionError, match=says):
        plugin.register(keys)
