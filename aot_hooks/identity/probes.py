"""Probes: Dynamo's guards tell which value a pair of functions is.

      probe(pack, unpack) = unpack(pack(example)), ...      compiled, but its graph returns a token and computes nothing
      first call with k = 2    --> traced: token 1
      made anew, k = 2         --> guards hold: token 1
      k = 3                    --> guards fail, traced: token 2

Guards cover the closures, globals, attributes and modules that the traced functions read. Tensors that they read are
inputs of the graph: the token holds their digests. An example is like a tensor that the functions were applied to.
Each probe has code of its own, and so a cache and a recompile limit of its own in Dynamo.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import AotHooksError, HookContractError, HookTraceError, error_behind
from ..torch_private import dynamo, dynamo_guards
from ..torch_private.dynamo import entries_of
from .frozen import PLAIN
from .tensors import tensor_digest

Token = tuple[Any, ...]  # the probe, the trace's number, digests of the tensors that it reads, plain defaults
Example = str  # the arguments of `torch.empty_strided`


def example_of(x: torch.Tensor, size_of: Any) -> Example:
    """The example for `x`; symbolic sizes by `size_of`, one row for dimensions of stride 0."""
    strides = tuple(map(size_of, x.stride()))
    shape = tuple(size_of(n) if stride else min(size_of(n), 1) for n, stride in zip(x.shape, strides, strict=True))
    return f"{shape}, {strides}, dtype={x.dtype}, device={str(x.device)!r}"


class Untraceable(HookTraceError):
    """Dynamo can't trace a pair of functions, so their changes would go unnoticed."""


class _Local(threading.local):
    token: Token | None = None
    functions: dict[str, Any] | None = None  # the probed functions by the names of the probe's arguments
    compiling: dynamo_guards.Compiling | None = None
    scope: Any = None  # the globals of the traced probe
    reached: list[tuple[str, Any, frozenset[str]]] | None = None  # to be filled by a trace


_local = _Local()
_numbers = itertools.count(1)
_KNOWN_METACLASSES = sys.stdlib_module_names | {"torch", "numpy"}  # modules whose metaclasses hold no user's numbers
# since 2.13 a function may have a limit of its own; past it Dynamo logs a warning and traces earlier values again
_HAS_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters
_LIMIT: dict[str, int] = {"recompile_limit": 64} if _HAS_LIMIT else {}


_probes: weakref.WeakSet[Probe] = weakref.WeakSet()


def forget() -> None:
    """Forget the traces that Dynamo has dropped, if it was reset. It then has no graph either that depends on them."""
    for probe in list(_probes):
        if not entries_of(probe.code):
            probe.oldest = next(_numbers)


class Probe:
    """The compiled probe for two code objects and some examples. `scope`: the globals of the functions, if Dynamo has
    to look for them in the probe's own; see `own_scope`."""

    def __init__(self, examples: Iterable[Example], scope: dict[str, Any] | None = None) -> None:
        self.examples, self.scope = frozenset(examples), scope
        # number of a trace -> the plain values that it read, by name, and the names of the tensors
        self.read: dict[int, tuple[dict[str, str], list[str]]] = {}
        number = next(_numbers)
        names = {"torch": torch, "empty": torch.empty_strided, "compiling": torch.compiler.is_dynamo_compiling}
        names |= {"comptime": dynamo.comptime, "begin": _begin, "end": _end}
        traced = "".join(f"unpack(pack(empty({example}))), " for example in sorted(self.examples))
        source = (
            f"def make({', '.join(names)}):\n"
            f"    def probe_{number}(pack, unpack):\n"  # Dynamo takes equal code objects for one
            "        if not compiling(): return\n"  # Dynamo is switched off: run nothing
            "        comptime(begin)\n"
            f"        results = ({traced})\n"
            "        comptime(end)\n"
            "        return results\n"
            f"    return probe_{number}\n"
        )
        made: dict[str, Any] = {}
        exec(source, made)
        probe = made["make"](**names)
        if self.scope is not None:
            probe = types.FunctionType(probe.__code__, self.scope, "probe", None, probe.__closure__)
        self.code = probe.__code__
        self.oldest = 0  # the number of the oldest trace that Dynamo may still have
        self.call = dynamo_guards.compiled_whole(probe, self._backend, **_LIMIT)
        _probes.add(self)

    def token(self, pack: Any, unpack: Any) -> Token:
        """The token of the pair's value; equal values have equal tokens.

        Raises:
            Untraceable: with Dynamo's reason and the ways out.
            HookContractError: the functions have a side effect.
        """
        _local.functions = {"pack": pack, "unpack": unpack}
        try:
            try:
                dynamo_guards.in_same_state(self.call, pack, unpack)
            except dynamo_guards.limit_error():  # before torch 2.13, where a function has no limit of its own
                with dynamo_guards.more_recompiles():
                    dynamo_guards.in_same_state(self.call, pack, unpack)
        except Exception as e:
            raise error_behind(e, AotHooksError) or Untraceable(dynamo_guards.reason_of(e)) from e
        finally:
            token, compiling = _local.token, _local.compiling
            _local.token = _local.functions = _local.compiling = _local.scope = None
            if compiling is not None:
                compiling.end()
        if token is None:
            raise Untraceable("Dynamo is switched off")
        return (*token, _plain((*dynamo_guards.defaults(pack), *dynamo_guards.defaults(unpack))))

    def _backend(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """The backend for Dynamo: notes what the trace has read, and returns a call that sets the token."""
        functions = _local.functions or {}
        number = next(_numbers)
        tensors_read = [dynamo_guards.user_name(name, functions) for name in dynamo_guards.input_names(gm)]
        outputs: Any = gm.graph.output_node().args[0]
        results = (torch.empty(0),) * len(outputs)
        guarded = dynamo_guards.guarded_values(functions, _local.scope)
        values = _plain((dynamo_guards.user_name(name, functions), value) for _, name, value in guarded)
        self.read[number] = dict(values), tensors_read
        if _local.reached is not None:
            for source, name, _ in guarded:
                path = dynamo_guards.objects_on_path(source, functions, _local.scope)
                _local.reached += ((dynamo_guards.user_name(name, functions), value, parts) for value, parts in path)

        def run(*tensors: Any) -> Any:
            _local.token = (self, number, *(tensor_digest(x) if isinstance(x, torch.Tensor) else x for x in tensors))
            return results

        return run

    def reached(self, pack: Any, unpack: Any) -> list[tuple[str, Any, frozenset[str]]]:
        """The objects that the functions reach, as name, object, and the parts that they read. For a new probe."""
        _local.reached = []
        try:
            self.token(pack, unpack)
            return _local.reached
        finally:
            _local.reached = None

    def is_forgotten(self, token: Token) -> bool:
        """Whether `token` is of a trace that Dynamo has dropped: the same functions have another token now."""
        return int(token[1]) < self.oldest

    def changed(self, token: Token, others: Iterable[Token]) -> list[str]:
        """The names of values that the trace of `token` read and that differ in one of `others`."""

        def texts(number: int, *digests: Any) -> dict[str, Any]:
            """The values that a trace read: plain ones, then tensors by their digests, then default arguments."""
            plain, names = self.read[number]
            *tensors, defaults = digests
            return plain | dict(zip(names, tensors, strict=False)) | dict(defaults)

        mine, *before = [texts(*rest) for probe, *rest in (token, *others) if probe is self]
        return [name for name, text in mine.items() if any(other.get(name, text) != text for other in before)]


def _plain(values: Iterable[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"{type(x).__name__}:{x!r}") for name, x in values if isinstance(x, PLAIN))


def _begin(_: Any) -> None:
    if _local.compiling is None:  # else Dynamo restarts the trace
        _local.compiling = dynamo_guards.Compiling()


def _end(context: Any) -> None:
    """Dynamo calls it when the probe is traced to its end: raises for what no guard covers, and for side effects."""
    _local.scope = dynamo_guards.global_scope(context)
    for name, value in dynamo_guards.classes(context):
        if type(value).__module__.partition(".")[0] not in _KNOWN_METACLASSES:
            name = dynamo_guards.user_name(name, _local.functions or {})
            raise Untraceable(f"no guard covers attributes of {type(value).__qualname__}, the metaclass of {name}")
    changed = dynamo_guards.side_effects(context)
    if changed is not None:
        raise HookContractError(
            f"tracing it changed {changed} (a side effect); expected pure functions, which are traced once and not "
            "called in each step. Take the side effect out, or run the hook eagerly with Hook(..., eager=True)"
        )
