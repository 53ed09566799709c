"""Hooks in axolotl, as one of its plugins. In its configuration file:

plugins:
  - aot_hooks.integrations.axolotl.AotHooksPlugin
torch_compile: true
gradient_checkpointing: false
aot_hooks_budget: 24GiB              or aot_hooks_total: 80GiB, or aot_hooks_policy: offload(then=float8())
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ..errors import OptionError
from ..planning.budget import budget
from ..report.expressions import evaluated
from .transformers import AotHooksCallback

_ONE_OF = ("aot_hooks_policy", "aot_hooks_budget", "aot_hooks_total")


class AotHooksArgs(BaseModel):  # type: ignore[misc, unused-ignore]  # no types where it is not installed
    """The keys of axolotl's configuration that `AotHooksPlugin` reads. One of the first three is needed.

    Attributes:
        aot_hooks_policy: a hook or policy in the names of aot_hooks: "float8()".
        aot_hooks_budget: the peak of a step over what is allocated before it: "24GiB".
        aot_hooks_total: what the process may have allocated in all: "80GiB".
        aot_hooks_max_error: of a budget, see `aot_hooks.budget`.
        aot_hooks_check: compare the gradients of the first step with those without hooks.
        aot_hooks_options: options of the backend, see `aot_hooks.enable`.
        aot_hooks_keep_logits: false lets the model return no logits in training, see `AotHooksCallback`.
    """

    aot_hooks_policy: str | None = None
    aot_hooks_budget: str | int | None = None
    aot_hooks_total: str | int | None = None
    aot_hooks_max_error: float | None = None
    aot_hooks_check: bool | float = False
    aot_hooks_options: dict[str, Any] | None = None
    aot_hooks_keep_logits: bool | None = None


class AotHooksPlugin(BasePlugin):  # type: ignore[misc, unused-ignore]
    """Adds an `AotHooksCallback` to the trainer that axolotl makes.

    Raises `OptionError` for wrong keys when axolotl reads its configuration, before it loads the model.
    """

    def register(self, cfg: Any) -> None:
        callback_of(cfg)  # raises now
        if not cfg.get("torch_compile"):
            raise OptionError(
                "AotHooksPlugin: expected `torch_compile: true` in axolotl's configuration, got "
                f"{cfg.get('torch_compile')!r}: hooks are put into compiled graphs"
            )
        if cfg.get("activation_offloading"):
            raise OptionError(
                "AotHooksPlugin: axolotl's `activation_offloading` and hooks of aot_hooks would store the same tensors "
                "twice; leave it out and write `aot_hooks_policy: offload()`"
            )

    def get_input_args(self) -> str:
        return f"{__name__}.{AotHooksArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        callback_of(cfg).add_to(trainer)


def callback_of(cfg: Any) -> AotHooksCallback:
    """The callback that the keys of axolotl's configuration ask for. Raises `OptionError` for wrong ones."""
    given = {name: cfg.get(name) for name in _ONE_OF if cfg.get(name) is not None}
    if len(given) != 1:
        raise OptionError(
            f"AotHooksPlugin: expected one of {', '.join(_ONE_OF)} in axolotl's configuration, got "
            f"{', '.join(given) or 'none'}"
        )
    max_error = cfg.get("aot_hooks_max_error")
    of_budget = {} if max_error is None else {"max_error": max_error}
    ((name, value),) = given.items()
    if name == "aot_hooks_policy":
        if of_budget:
            raise OptionError("AotHooksPlugin: aot_hooks_max_error is for aot_hooks_budget and aot_hooks_total")
        policy = evaluated(name, value)
    else:
        policy = budget(**{"peak" if name == "aot_hooks_budget" else "total": value}, **of_budget)
    return AotHooksCallback(
        policy,
        options=cfg.get("aot_hooks_options"),
        check=cfg.get("aot_hooks_check") or False,
        keep_logits=cfg.get("aot_hooks_keep_logits"),
    )
