"""Which settings are in force in a graph that Dynamo hands the backend: of contexts, of the options, of `enable`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from .. import unused
from ..cache.key import nodes_of
from ..errors import OptionError
from ..graphs.nodes import REGION, annotation
from ..options import Options
from ..planning.assignment import fitted
from ..planning.budget import Budget
from ..settings import recompiles
from ..settings.setting import Setting, SettingsOfGraph
from ..torch_private import autograd, dynamo
from . import pairs, region


@dataclass(frozen=True)
class InForce(SettingsOfGraph):
    """The settings of a graph, with the pairs that stand for the one around the call."""

    pair: Any  # the object on torch's stack of hooks that stands for the context; None for the options
    enabled: pairs.Pair | None  # of `enable`, if `setting` is its policy


def in_force(gm: GraphModule, inputs: Sequence[Any], options: Options, enabled: pairs.Pair | None) -> InForce:
    """The settings in force in `gm`, while Dynamo compiles it. The innermost context wins over the options.

    `enabled`: the pair of an `enable` whose policy may change, if its policy is that of the options.

    Raises `OptionError` for an eager policy in the options, and for a budget inside of the graph.
    """
    setting, pair = pairs.ambient()
    if setting is None and options.policy is not None and autograd.top_hooks() is None:
        setting = Setting(options.policy, options.scope)
        recompiles.warn_of_limit(dynamo.code_being_compiled(), setting)
    else:
        enabled = None
    if setting is None and options.policy is not None and (top := autograd.top_hooks()) is not None:
        asked = Setting(options.policy, options.scope)
        if autograd.is_checkpointed():
            unused.checkpointed(asked, dynamo.code_being_compiled())
        elif not isinstance(top[0], pairs.EagerPack) and _saves(inputs):
            unused.covered(asked, top[0])
    if setting is not None and setting.eager:
        raise OptionError(f"options['policy']: '{setting.rule!r}' is to run eagerly, which a context can ask for only")
    if setting is not None and isinstance(setting.rule, Budget):
        devices = (x.device for x in inputs if isinstance(x, torch.Tensor))
        setting = Setting(fitted(setting.rule, devices, inputs), setting.scope)
    return InForce(setting and setting.in_scope(options.scope), _regions(gm, options), pair, enabled)


def _saves(inputs: Sequence[Any]) -> bool:
    """Whether a graph of `inputs` may save tensors for a backward, as that of an evaluation does not."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _regions(gm: GraphModule, options: Options) -> dict[str, Setting]:
    """The settings of the contexts inside of `gm`, by the keys that its nodes are annotated with."""
    keys = dict.fromkeys(key for node in nodes_of(gm) if (key := annotation(node, REGION)) is not None)
    regions = {key: region.regions[key].setting.in_scope(options.scope) for key in keys}
    for inside in regions.values():
        if isinstance(inside.rule, Budget):
            raise OptionError(f"{inside.title} is for whole compiled functions; put its context around the call")
    return regions
