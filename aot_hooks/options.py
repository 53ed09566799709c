"""The options of the backend: `torch.compile(..., backend="aot_hooks", mode=..., options={...})`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import cudagraphs
from .errors import OptionError, did_you_mean
from .settings.setting import SCOPES, check_rule
from .torch_private import inductor

# of `check=True`: float8 and int8 move gradients of trained networks by less than half of it (docs/hooks.md)
LIMIT = 0.1


@dataclass(frozen=True)
class Options:
    """`torch.compile(..., options={...})`."""

    inner: str = "inductor"  # or "aten"
    cudagraphs: bool | Mapping[str, Any] = False  # True, or options of the `cudagraph` package, which gets the graphs
    policy: Any = None  # a policy or `Hook` for saved tensors that no context covers
    scope: str = "donated"  # of `policy`
    inductor: Mapping[str, Any] | None = None  # config patches
    recompute_pointwise: bool = False  # also what a product of the backward reads, see docs/hooks.md
    chunk: bool | int = False  # the last layer and its loss in chunks of tokens, see docs/chunk.md; or how many tokens
    tile: bool | int | str = (
        False  # parts of layers in tiles of tokens, see docs/tile.md; or how many tokens, or "backward"
    )
    check: bool | float = False  # compare the first step's gradients with those without hooks; or the limit of that

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Raises `OptionError` that names the unknown option and lists the valid ones."""
        values = _as_dict(options)
        valid = list(cls.__dataclass_fields__)
        if unknown := [k for k in values if k not in valid]:
            meant = did_you_mean(str(unknown[0]), valid)
            raise OptionError(f"unknown option {unknown[0]!r}{meant or ';'} valid options: {', '.join(valid)}")
        parsed = cls(**values)
        is_tile = _is_count(parsed.tile) or parsed.tile == "backward"
        tile = (
            "True, False, the number of tokens that a tile has at most, or 'backward' for tiles of the backward alone"
        )
        for name, is_right, expected in (
            ("inner", parsed.inner in ("inductor", "aten"), "'inductor' or 'aten'"),
            ("scope", parsed.scope in SCOPES, f"one of {', '.join(map(repr, SCOPES))}"),
            (
                "cudagraphs",
                isinstance(parsed.cudagraphs, bool | Mapping),
                "True or False, or a dict of cudagraph's options",
            ),
            ("recompute_pointwise", isinstance(parsed.recompute_pointwise, bool), "True or False"),
            ("chunk", _is_count(parsed.chunk), "True, False, or the number of tokens that a chunk has at most"),
            ("tile", is_tile, tile),
            ("inductor", isinstance(parsed.inductor, Mapping | None), "a dict of Inductor settings"),
        ):
            if not is_right:
                raise OptionError(f"options[{name!r}] must be {expected}, got {getattr(parsed, name)!r}")
        check_limit(parsed.check)
        cudagraphs.capture_options(parsed.inner, parsed.cudagraphs)
        if parsed.policy is not None:
            check_rule(parsed.policy, "options['policy'] must be a policy or a Hook")
        if wrong := [k for k in parsed.inductor or () if k not in inductor.config_keys()]:
            raise OptionError(f"options['inductor']: Inductor has no setting {wrong[0]!r}")
        return parsed


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def check_limit(check: Any) -> float | None:
    """The relative error above which `check` warns; None if nothing is to be compared. Raises `OptionError`."""
    if isinstance(check, bool):
        return LIMIT if check else None
    if isinstance(check, float) and 0 < check < math.inf:
        return check
    raise OptionError(
        f"check must be True (warn of gradients that are more than {LIMIT} off), another limit such as 0.05, or False; "
        f"got {check!r}"
    )


def with_arguments(
    policy: Any, scope: str | None, options: Mapping[str, Any] | None, check: bool | float = False
) -> dict[str, Any]:
    """The options of a function for which `policy`, `scope` and `check` are arguments; `check` may be in `options` in
    its place. Raises `OptionError` for a wrong one."""
    values = _as_dict(options)
    twice = ("policy", "scope") if check is False else ("policy", "scope", "check")
    if wrong := [name for name in twice if name in values]:
        raise OptionError(f"options has {wrong[0]!r}, which is an argument beside it: pass {wrong[0]}=... instead")
    values |= {"policy": policy} if scope is None else {"policy": policy, "scope": scope}
    if check is not False:
        values["check"] = check
    Options.parse(values)
    return values


def _as_dict(options: Any) -> dict[str, Any]:
    if not isinstance(options, Mapping | None):
        raise OptionError(f"options must be a dict such as {{'inner': 'aten'}}, got {options!r}")
    return dict(options or {})


def inductor_patches(options: Options, mode: str | None) -> dict[str, Any]:
    """Inductor's settings. Raises `OptionError` for an unknown mode, and for settings if Inductor does not run."""
    if options.inner != "inductor":
        if options.inductor:
            raise OptionError(
                "options['inductor'] needs options['inner'] = 'inductor', and so do mode and options of a function "
                f"under enable. inner is {options.inner!r}: leave out one or the other"
            )
        return {}
    try:
        patches = inductor.mode_options(mode)
    except RuntimeError as e:
        raise OptionError(f"mode={mode!r}: {e}") from e
    return patches | dict(options.inductor or {})
