"""A `Hook` is a value: a name and two pure functions.

      saved tensor --pack--> pytree of tensors, symbolic ints, constants, None --unpack--> a tensor like the saved one

`pack` runs at the end of a saved tensor's life in the forward, `unpack` before its first use in the backward. Both are
retraced for every saved tensor, so Python control flow on its shape, dtype, device and size is free.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec

import torch

from .errors import OptionError, bind
from .torch_private import dynamo

__all__ = ["KEEP", "Hook", "compiled_by", "compiling_for", "interned"]

_compiler: contextvars.ContextVar[str] = contextvars.ContextVar("compiler of the graph a hook is traced into")


def compiled_by() -> str:
    """What will compile the graph that a hook is being traced into: "inductor", "aten", or "eager" when it just runs.

    A hook may choose its form by it, as by the device; what it computes must be the same.
    """
    return _compiler.get("eager")


@contextlib.contextmanager
def compiling_for(compiler: str) -> Iterator[None]:
    """Traces inside are for `compiler`."""
    token = _compiler.set(compiler)
    try:
        yield
    finally:
        _compiler.reset(token)


@dataclass(frozen=True)
class Hook:
    """How a saved tensor is stored.

    Args:
        name: shown in reports, logs and errors.
        pack: `tensor -> pytree`. Pure: no side effects, no mutation, no reading of values. Returning its argument
            unchanged leaves the tensor as it is.
        unpack: `pytree -> tensor` of the saved tensor's shape, dtype and device. Strides are restored by the package.
        lossy: True says that unpack gives rounded numbers. Then only floating-point tensors that the backward reads
            smoothly are packed. Its decisions (comparisons, indices) are answered from the unrounded numbers, in bits
            that are saved beside the packed ones. False packs every tensor, as asked.
        eager: True runs both functions as they are, at run time, on the tensors that the compiled graph saves, instead
            of tracing them into the graph. The way out for hooks that cannot be traced; they cannot fuse, and the
            compiled forward has written the tensor before they see it.
        cache_hash: says what both functions do where Dynamo can't trace them or a graph does not hold it (an operator
            of a library of one's own): change it when they change. See docs/caching.md and docs/footguns.md.
        declines: `SavedTensor -> str | None`, why the hook leaves a tensor as it is, for reports; None if it takes it.
            Sees what a pack cannot: the operator, the module. Must use sizes as plain numbers only.

    Raises:
        OptionError: for an argument of another type.

    Source: `torch.autograd.graph.saved_tensors_hooks` has the same pair for eager mode.
    """

    name: str
    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]
    _: KW_ONLY
    lossy: bool = False
    eager: bool = False
    cache_hash: str | None = None
    declines: Callable[[Any], str | None] | None = None

    def __post_init__(self) -> None:
        for field, value, right, expected in (
            ("name", self.name, isinstance(self.name, str), "a str"),
            ("pack", self.pack, callable(self.pack), "a function `tensor -> pytree`"),
            ("unpack", self.unpack, callable(self.unpack), "a function `pytree -> tensor`"),
            ("eager", self.eager, isinstance(self.eager, bool), "True or False"),
            ("declines", self.declines, self.declines is None or callable(self.declines), "a function or None"),
            ("lossy", self.lossy, isinstance(self.lossy, bool), "True or False"),
            ("cache_hash", self.cache_hash, isinstance(self.cache_hash, (str, type(None))), "a str or None"),
        ):
            if not right:
                raise OptionError(f"Hook({self.name!r}): {field} must be {expected}, got {value!r}")

    def why_not(self, saved: Any) -> str | None:
        """Why the hook leaves a `SavedTensor` as it is, in words; None if it takes it."""
        if self.declines is not None and (declined := self.declines(saved)):
            return declined
        if not self.lossy:
            return None
        if not saved.dtype.is_floating_point:
            return f"{self.name} rounds: it leaves {str(saved.dtype).removeprefix('torch.')} as it is"
        return next((read.why() for read in saved.backward_reads if not read.answered), None)

    @property
    def is_own(self) -> bool:
        """Whether the functions are the user's, not of this package."""
        return str(getattr(self.pack, "__module__", "")).split(".")[0] != __package__

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        """What one types for it, where the package made it; else its name."""
        if self == KEEP:
            return "KEEP"
        call = _call_of(self)
        return self.name if call is None else call.typed()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # KEEP is told by identity, so copies of it and what is unpickled are KEEP itself
        if self is KEEP:
            return "KEEP"
        call = _call_of(self)
        return super().__reduce_ex__(protocol) if call is None else (_made_again, (call,))


def _same(x: Any) -> Any:
    return x


KEEP = Hook("keep", _same, _same)
"""The hook that leaves a saved tensor as it is."""


@dataclass(frozen=True)
class _Call:
    """By which call of which function a hook was made."""

    module: str
    function: str
    arguments: tuple[tuple[str, Any], ...]  # those that are not the defaults
    first: str  # the name of the first, which is typed without it

    def typed(self) -> str:
        each = (_typed(value) if name == self.first else f"{name}={_typed(value)}" for name, value in self.arguments)
        return f"{self.function}({', '.join(each)})"


def _call_of(hook: Hook) -> _Call | None:
    try:
        return _calls.get(hook)
    except TypeError:  # functions without a hash: none of the package's
        return None


def _made_again(call: _Call) -> Hook:
    hook: Hook = getattr(importlib.import_module(call.module), call.function)(**dict(call.arguments))
    return hook


def _typed(value: Any) -> str:
    return "math.inf" if value == math.inf else repr(value)


_Arguments = ParamSpec("_Arguments")
_made: dict[Any, Hook] = {}
_calls: dict[Hook, _Call] = {}


def interned(make: Callable[_Arguments, Hook]) -> Callable[_Arguments, Hook]:
    """`make`, which gives the same hook for the same arguments, by position or by keyword; 1 is no True, 32.0 no 32.

    Not `functools.cache`: Dynamo warns of it where a compiled function makes the hook. What is known already is kept
    outside of the function.
    """

    @dynamo.outermost_runs_in_python
    @functools.wraps(make)
    def made_once(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Hook:
        if torch.compiler.is_dynamo_compiling():
            return make(*args, **kwargs)
        said = (make, args, tuple(map(type, args)), tuple((k, type(v), v) for k, v in kwargs.items()))
        try:
            hash(said)
        except TypeError:
            bind(make, args, kwargs)
            return make(*args, **kwargs)  # which says what is wrong with them
        if said not in _made:
            bound = bind(make, args, kwargs)
            bound.apply_defaults()
            each = (make, *((name, type(value), value) for name, value in bound.arguments.items()))
            hook = _made.get(each) or make(*args, **kwargs)
            _made[said] = _made.setdefault(each, hook)
            parameters = inspect.signature(make).parameters
            given = tuple((n, v) for n, v in bound.arguments.items() if v != parameters[n].default)
            call = _Call(make.__module__, make.__name__, given, next(iter(parameters), ""))
            _calls.setdefault(hook, call)
        return _made[said]

    return made_once
