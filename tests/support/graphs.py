"""For tests: a forward and a backward graph before and after the rewrite, and how to print and run them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from aot_hooks import Hook, Plan
from aot_hooks.graphs.layout import layout_of
from aot_hooks.passes.edits import finished
from aot_hooks.passes.rewrite import RewriteOptions, rewrite
from aot_hooks.settings.setting import Setting, SettingsOfGraph

EXACT = Hook("exact", lambda x: x.clone(), lambda p: p)
HALF = Hook("half", lambda x: (x.half(), x.dtype), lambda p: p[0].to(p[1]))
FLOAT8 = Hook("float8", lambda x: (x.to(torch.float8_e5m2), x.dtype), lambda p: p[0].to(p[1]))


@dataclass
class Pair:
    """A forward and a backward graph, and after `apply` what was decided for them."""

    fw: GraphModule
    bw: GraphModule
    num_fwd_outputs: int
    plan: Plan | None = None

    @property
    def saved(self) -> list[Any]:
        """What the forward returns for the backward."""
        return list(outputs(self.fw))[self.num_fwd_outputs :]

    @property
    def packed(self) -> list[Any]:
        """The same without the strides of what was packed."""
        return [node for node in self.saved if node.target is not layout_of]

    def copy(self) -> Pair:
        return Pair(_copy(self.fw), _copy(self.bw), self.num_fwd_outputs, self.plan)

    def apply(self, hook: Any, scope: str = "donated", static_inputs: Any = ()) -> Pair:
        """Rewrite both graphs with a hook, a policy or a Setting, in place; gives itself."""
        setting = Setting(hook, scope) if hook is not None and not isinstance(hook, Setting) else hook
        self.plan = rewrite(
            self.fw,
            self.bw,
            SettingsOfGraph(setting, {}),
            RewriteOptions(for_inductor=False),
            num_fwd_outputs=self.num_fwd_outputs,
            static_inputs=static_inputs,
        )
        finished(self.fw, self.bw)
        return self

    def run(self, *inputs: torch.Tensor, seed: int = 1) -> tuple[list[Any], list[Any]]:
        """The user's outputs, and the gradients for random tangents."""
        out = list(self.fw(*inputs))
        user, saved = out[: self.num_fwd_outputs], out[self.num_fwd_outputs :]
        generator = torch.Generator().manual_seed(seed)
        tangents = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in user]
        syms = [s for s in saved if not isinstance(s, torch.Tensor)]
        return user, list(self.bw(*syms, *(s for s in saved if isinstance(s, torch.Tensor)), *tangents))


def capture(
    fn: Callable[..., Any], *args: Any, hook: Any, scope: str = "donated", dynamic: bool = False
) -> tuple[Pair, Pair]:
    """`fn`'s graphs from AOTAutograd, as partitioned and with `hook` put in."""
    found: list[tuple[Pair, Pair]] = []
    setting = Setting(hook, scope)

    def partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        fw, bw = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        after = Pair(fw, bw, kwargs["num_fwd_outputs"])
        before = after.copy()
        found.append((before, after.apply(setting, static_inputs=kwargs.get("static_lifetime_input_indices") or ())))
        return fw, bw

    torch._dynamo.reset()
    torch.compile(
        fn, backend=aot_autograd(fw_compiler=lambda gm, _: gm.forward, partition_fn=partition), dynamic=dynamic
    )(*args)
    (one,) = found
    return one


def by_hand(
    forward: Callable[..., Any], backward: Callable[..., Any], *inputs: torch.Tensor, num_fwd_outputs: int = 1
) -> Pair:
    """Graphs of two functions: `forward(*inputs) -> (*outputs, *saved)`, `backward(*saved, *tangents) -> gradients`."""
    mode = FakeTensorMode()
    fw = make_fx(forward)(*(mode.from_tensor(x) for x in inputs))
    values = [node.meta["val"] for node in outputs(fw)]
    with mode:
        tangents = [torch.empty_like(v) for v in values[:num_fwd_outputs]]
    bw = make_fx(backward)(*values[num_fwd_outputs:], *tangents)
    return Pair(fw, bw, num_fwd_outputs)


def _copy(gm: GraphModule) -> GraphModule:
    new = torch.fx.Graph()
    env: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        env[node] = new.node_copy(node, env.__getitem__)
    return GraphModule(gm, new)


def outputs(gm: GraphModule) -> tuple[Any, ...]:
    return tuple(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def inputs(gm: GraphModule) -> list[Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def ops(gm: GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def text(*gms: GraphModule) -> str:
    """Graphs, one node a line: `name dtype[shape] = op(args)`.

    What operators make is numbered anew and symbols are a, b, ..., because torch's own counts differ between versions.
    """
    symbols: dict[str, str] = {}

    def symbol(match: re.Match[str]) -> str:
        return symbols.setdefault(match[0], "abcdefgh"[len(symbols)])

    return re.sub(r"\bs\d+\b", symbol, "--\n".join(_lines(gm) for gm in gms))


def _lines(gm: GraphModule) -> str:
    names: dict[Node, str] = {}
    seen: Counter[str] = Counter()

    def kind(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
        return str(value)

    lines = []
    for node in gm.graph.nodes:
        shown = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: Named(names[n]))
        if node.op == "output":
            lines.append("return " + ", ".join(map(str, shown[0][0])))
            continue
        base = node.name if node.op == "placeholder" else re.sub(r"_\d+$", "", node.name)
        names[node] = base if not seen[base] else f"{base}_{seen[base]}"
        seen[base] += 1
        call = ", ".join([*map(repr, shown[0]), *(f"{k}={v!r}" for k, v in shown[1].items())])
        target = node.target.__name__ if isinstance(node.target, FunctionType) else node.target
        what = "input" if node.op == "placeholder" else f"{target}({call})"
        lines.append(f"{names[node]} {kind(node.meta['val'])} = {what}")
    return "\n".join(lines) + "\n"


class Named(str):
    """A node's name where a node stood; prints without quotes."""

    def __repr__(self) -> str:
        return str(self)
