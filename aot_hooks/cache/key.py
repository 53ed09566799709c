"""The key of a compiled graph: everything that decides the result, and no names.

      Dynamo's graph    node by node, by position; constants by value            forward(self, L_x_, L_w_):
      its inputs        shape, stride, dtype, device, who shares whose memory        h = L_x_ @ L_w_      p_0 @ p_1
      settings          the library's arguments, programs of user's hooks   --> lines --sha256--> digest
      regions           which node is under which; names and modules that a policy may look at
      versions          this package by its sources, torch, Python

`key_of` makes it, with the program that a function of the user's traces to on one example. The programs on the saved
tensors themselves, and a policy's choices, are stored in the entry and compared (entry.py).

torch adds its own key (configuration, devices, its sources), made of `without_names(graph)`: renaming a model's
argument, attribute or variable changes no key. Symbolic sizes are numbered too. Both keys are linear in the graph.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.torch_private import symbols
from cudagraph.torch_private.autograd_cache import sources_digest
from cudagraph.torch_private.cache_contents import TORCH_OPERATORS

from .._version import __version__
from ..errors import PACKAGE, AotHooksError
from ..graphs.nodes import REGION, annotation
from ..graphs.saved import module_stack, place_of
from ..hook import Hook, compiling_for
from ..identity.canonical import canonical
from ..identity.frozen import described
from ..identity.records import recording
from ..passes.trace import trace_hook
from ..settings.names import name_given
from ..settings.setting import Setting, looks_at_modules
from ..torch_private import values as torch_values

Line = tuple[str, str]  # what, and its content


@dataclass(frozen=True)
class Key:
    """What decides the result of a compilation, as text."""

    lines: tuple[Line, ...]  # the content that is hashed
    # The ambient setting, None if there is none, then those of regions, in the order of the regions' first nodes.
    settings: tuple[Setting | None, ...]
    sizes: tuple[str, ...] = ()  # this program's names for symbols of sizes, in the order of their numbers
    # Operators of other packages that hooks call without a `cache_hash`; with one, the key is not used.
    opaque: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.lines).encode()).hexdigest()[:32]


def key_of(
    gm: GraphModule,
    inputs: Sequence[Any],
    ambient: Setting | None,
    regions: Mapping[str, Setting],
    *,
    options: Mapping[str, Any] | None = None,
    roots: Mapping[str, str] | None = None,
) -> Key:
    """The key of `gm`. Changes nothing in `gm`.

    Args:
        inputs: the example inputs that Dynamo passes with it.
        ambient, regions: the settings in force, see `context`.
        options: other options of the compilation; their `repr` is in the key.
        roots: modules by Dynamo's names, see `modules.roots`.
    """
    nodes = nodes_of(gm)
    order = dict.fromkeys(key for node in nodes if (key := annotation(node, REGION)) is not None)
    settings = (ambient, *(regions[key] for key in order))
    lines: list[Line] = [
        ("aot_hooks", PACKAGE_DIGEST),
        ("python", sys.version.split()[0]),
        ("torch", torch.__version__),
        *((f"option {name}", repr(value)) for name, value in sorted((options or {}).items())),
    ]
    opaque: list[str] = []
    lines += [(f"ambient {name}", text) for name, text in _setting_lines(ambient, opaque)]
    texts: dict[tuple[Line, ...], int] = {}  # of regions: equal ones have one number
    numbers = {k: texts.setdefault(tuple(_setting_lines(regions[k], opaque)), len(texts) + 1) for k in order}
    lines += [(f"region {number} {name}", value) for text, number in texts.items() for name, value in text]
    # a user's function sees the rows of saved tensors, with their lines and modules
    reads_anything = any(s is not None and described(s.rule).functions for s in settings)
    reads_modules = reads_anything or any(s is not None and looks_at_modules(s.rule) for s in settings)
    for i, node in enumerate(nodes):
        if (key := annotation(node, REGION)) is not None:
            lines.append((f"region of node {i}", str(numbers[key])))
        if (name := name_given(node)) is not None:
            lines.append((f"name of node {i}", name))
        if reads_modules:
            path, line = place_of(node, roots or {})
            lines.append((f"module of node {i}", f"{path} {module_stack(node)}"))
            if reads_anything:
                lines.append((f"line of node {i}", line))
    # as Dynamo traced them; their sizes may be symbolic
    traced = [
        n.meta.get("example_value", x) for n, x in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
    ]
    sizes = torch_values.SizeNumbers(traced)
    lines += [(f"node {i}", line) for i, line in enumerate(canonical(gm))]
    lines += _inputs(traced, inputs, sizes)
    return Key(tuple(lines), settings, tuple(map(str, sizes.names)), tuple(dict.fromkeys(opaque)))


def _setting_lines(setting: Setting | None, opaque: list[str]) -> Iterator[Line]:
    """The lines of a key for `setting`. Adds operators whose work is in no graph to `opaque`."""
    if setting is None:
        yield "scope", "none"
        return
    rule = described(setting.rule)
    yield "scope", str(setting.scope)
    yield "rule", rule.portable
    for i, hook in enumerate((*rule.hooks, *rule.graphs)):
        yield f"hook {i} cache_hash", repr(hook.cache_hash)
        yield from ((f"hook {i} {name}", text) for name, text in _program_lines(hook, opaque))


def _program_lines(hook: Hook, opaque: list[str]) -> Iterator[Line]:
    """The graphs that `hook` traces to on one example tensor. Most changes of its functions change these graphs."""
    with compiling_for("inductor"), recording(on=False):
        with torch_values.fake_tensor((4, 8), torch.float32, torch.device("cpu")) as example:
            try:
                traced = trace_hook(hook, example, "an example", decompositions=None)
            except (AotHooksError, RuntimeError):
                yield "program", "none on f32[4, 8]"
                return
    for part, gm in (("pack", traced.pack), ("unpack", traced.unpack)):
        if hook.cache_hash is None and (foreign := foreign_operator(gm)) is not None:
            opaque.append(foreign)
        for i, line in enumerate(canonical(gm)):
            yield f"{part} {i}", line


_COVERED = TORCH_OPERATORS | {"aot_hooks"}  # namespaces whose operators the versions in the key cover


def foreign_operator(gm: GraphModule) -> str | None:
    """An operator in `gm` that neither torch nor this package registers; None if there is none."""
    for node in gm.graph.nodes:
        if torch_values.is_operator(node.target) and str(node.target).split(".")[0] not in _COVERED:
            return str(node.target)
    return None


def nodes_of(gm: GraphModule) -> list[Node]:
    """The nodes of `gm` and of the graphs in it, in the order in which keys count them."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    return [node for graph in graphs for node in graph.nodes]


def _inputs(traced: Sequence[Any], inputs: Sequence[Any], sizes: torch_values.SizeNumbers) -> Iterator[Line]:
    """A line for each input. `traced` has what Dynamo saw; the real `inputs` show which of them share memory."""
    storages: dict[int, int] = {}
    for i, (value, real) in enumerate(zip(traced, inputs, strict=True)):
        text = type(real).__name__
        if not isinstance(value, torch.Tensor):
            text += f" {sizes.text(value)}"
        else:
            text += f" {value.dtype} [{', '.join(map(sizes.text, value.shape))}] {value.device} {value.requires_grad}"
            if value.layout is torch.strided and not torch_values.is_traceable_subclass(value):
                shares = storages.setdefault(torch_values.storage_key(real), i)
                stride = ", ".join(map(sizes.text, value.stride()))
                text += f" stride [{stride}] from {sizes.text(value.storage_offset())} of the memory of {shares}"
            else:
                text += f" {value.layout}"
        yield f"input {i}", text


_FOLDERS = (Path(PACKAGE), Path(symbols.__file__).parent)  # the second has what this package calls to compile
# read now, in 2 ms, not when the first graph is compiled: an edit until then changes the files, not this process
PACKAGE_DIGEST = f"{__version__} {sources_digest(*_FOLDERS)}"


# attributes of a graph module that hold the user's names: stacks of variables, and generated code
_NAMED = {"_code", "_lineno_map", "_prologue_start", "_source_to_user_stacks"}


def without_names(gm: GraphModule) -> GraphModule:
    """A copy of `gm` for torch's key: values, and those of the graphs in it, are named by their positions."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for i, node in enumerate(gm.graph.nodes):
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        target = f"n_{i}" if node.op == "placeholder" else node.target
        copies[node] = graph.create_node(node.op, target, args, kwargs, f"n_{i}", node.type)
        copies[node].meta = node.meta
    # each graph module has a class of its own; the base of Dynamo's generates code late
    kind: type[GraphModule] = type(gm).__bases__[0]
    copied = kind(gm, graph, type(gm).__name__)
    vars(copied).update({k: v for k, v in vars(gm).items() if k not in {"_graph", *_NAMED}})
    # without the pair of hooks that Dynamo puts there for torch's key: our part of the key has the functions' content
    modules = {k: m for k, m in vars(gm)["_modules"].items() if not k.startswith("saved_tensors_hooks_")}
    vars(copied)["_modules"] = {k: without_names(m) if isinstance(m, GraphModule) else m for k, m in modules.items()}
    return copied
