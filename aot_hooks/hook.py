"""A `Hook` is a value: a name and two pure functions.

      saved tensor --pack--> pytree of tensors, symbolic ints, constants, None --unpack--> a tensor like the saved one

`pack` runs after the last use of a saved tensor in the forward, `unpack` before its first use in the backward. Both
are retraced for every saved tensor, so Python control flow on its shape, dtype, device and size costs nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec

import torch

from .errors import OptionError, bind, names_arguments
from .torch_private import dynamo

_compiler: contextvars.ContextVar[str] = contextvars.ContextVar("compiler of the graph a hook is traced into")


def compiled_by() -> str:
    """The compiler of the graph that a hook is being traced into: "inductor", "aten", or "eager" when it just runs.

    A hook may choose its form by it, as by the device; its results must be the same.
    """
    return _compiler.get("eager")


@contextlib.contextmanager
def compiling_for(compiler: str) -> Iterator[None]:
    """Hooks traced inside are compiled by `compiler`."""
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
        pack: `tensor -> pytree`. Pure: no side effects, no mutation, no reading of values. If it returns its argument,
            the tensor stays as it is.
        unpack: `pytree -> tensor` of the saved tensor's shape, dtype and device. Strides are restored by the package.
        lossy: True means that unpack returns rounded numbers. Then only floating-point tensors that the backward reads
            smoothly are packed. Decisions of the backward (comparisons, indices) are computed from the unrounded
            numbers and saved as bits beside the packed tensor. False packs every tensor.
        eager: True runs both functions untraced, at run time, on the tensors that the compiled graph saves. The way out
            for hooks that cannot be traced. They cannot fuse, and the compiled forward has written the tensor before
            they see it.
        cache_hash: a text that stands for the functions where Dynamo can't trace them, or where a graph does not define
            them (an operator of a library of one's own). Change it when they change. See docs/caching.md and
            docs/footguns.md.
        declines: `SavedTensor -> str | None`: the reason to leave a tensor as it is, for reports; None to pack it. It
            sees the operator and the module, unlike pack. It must use sizes as plain numbers only.
        error: how far the tensor that comes back is from the saved one: the norm of the difference over the norm of the
            tensor, on typical data. 0: every number comes back exactly. None: not known. A budget takes only hooks
            that state it, see `budget(allow=...)`.
        digits: how many significant binary digits a number has that comes back, 8 for bfloat16. None: as many as it
            had, or not known. Products of numbers with few digits take less power on GPUs; only times depend on it.
        relative: for a lossy hook, whether the error of each number is a share of that number, as of `float8` and
            `cast`. False: a share of the largest number beside it, as of `int8`. Then a tensor stays if the backward
            reads its small numbers alone.

    Raises:
        OptionError: for an argument of a wrong type.

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
    error: float | None = None
    digits: int | None = None
    relative: bool = False

    def __post_init__(self) -> None:
        for field, value, right, expected in (
            ("name", self.name, isinstance(self.name, str), "a str"),
            ("pack", self.pack, callable(self.pack), "a function `tensor -> pytree`"),
            ("unpack", self.unpack, callable(self.unpack), "a function `pytree -> tensor`"),
            ("eager", self.eager, isinstance(self.eager, bool), "True or False"),
            ("declines", self.declines, self.declines is None or callable(self.declines), "a function or None"),
            ("lossy", self.lossy, isinstance(self.lossy, bool), "True or False"),
            ("relative", self.relative, isinstance(self.relative, bool), "True or False"),
            ("error", self.error, _is_error(self.error), "None or a number of at least 0, such as 0.01"),
            ("digits", self.digits, _is_count(self.digits), "None or a whole number of at least 1"),
            ("cache_hash", self.cache_hash, isinstance(self.cache_hash, (str, type(None))), "a str or None"),
        ):
            if not right:
                raise OptionError(f"Hook({self.name!r}): {field} must be {expected}, got {value!r}")

    def why_not(self, saved: Any) -> str | None:
        """The reason why the hook leaves a `SavedTensor` as it is; None if it packs it."""
        if self.declines is not None and (declined := self.declines(saved)):
            return declined
        if not self.lossy:
            return None
        if not saved.dtype.is_floating_point:
            return f"{self.name} rounds: it leaves {str(saved.dtype).removeprefix('torch.')} as it is"
        bears = {"small"} if self.relative else ()
        reads = (read for read in saved.backward_reads if not read.answered and read.kind not in bears)
        return next((read.why() for read in reads), None)

    @property
    def is_own(self) -> bool:
        """Whether the functions are the user's."""
        return str(getattr(self.pack, "__module__", "")).split(".")[0] != __package__

    def __hash__(self) -> int:
        return hash((self.name, self.lossy, self.eager, self.cache_hash))  # a function of the user's may have no hash

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        """The call that makes it, for a hook of the package; else its name."""
        if self == KEEP:
            return "KEEP"
        call = _calls.get(self)
        return self.name if call is None else _text_of(call)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # KEEP is compared by identity, so copying and unpickling must return KEEP itself
        if self is KEEP:
            return "KEEP"
        call = _calls.get(self)
        return super().__reduce_ex__(protocol) if call is None else (call, ())


def _is_error(value: Any) -> bool:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return value is None or (number and 0 <= value < math.inf)


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _identity(x: Any) -> Any:
    return x


Hook.__init__ = names_arguments(Hook.__init__)  # type: ignore[method-assign]

KEEP = Hook("keep", _identity, _identity)
"""The hook that leaves a saved tensor as it is."""


@dataclass(frozen=True)
class Pack:
    """Base of the packs of this package. A user may take `hook.pack` out of its hook, and these fields go with it."""

    name: str
    declines: Callable[[Any], str | None]
    _: KW_ONLY
    lossy: bool = True
    error: float | None = None
    digits: int | None = None
    relative: bool = False

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


STATED = ("error", "digits", "relative")
"""What a pack of this package says of its rounding; fields of `Hook` with the same names."""


def hook_of(pack: Pack, unpack: Callable[[Any], torch.Tensor]) -> Hook:
    stated: dict[str, Any] = {field: getattr(pack, field) for field in ("declines", *STATED)}
    return Hook(pack.name, pack, unpack, lossy=pack.lossy, **stated)


def _text_of(call: functools.partial[Hook]) -> str:
    first = next(iter(inspect.signature(call.func).parameters), "")
    values = {name: "math.inf" if value == math.inf else repr(value) for name, value in call.keywords.items()}
    shown = (value if name == first else f"{name}={value}" for name, value in values.items())
    return f"{call.func.__name__}({', '.join(shown)})"


_Arguments = ParamSpec("_Arguments")
_made: dict[Any, Hook] = {}
_calls: dict[Hook, functools.partial[Hook]] = {}  # the call that made a hook of the package, without default arguments


def interned(make: Callable[_Arguments, Hook]) -> Callable[_Arguments, Hook]:
    """`make` with a cache: equal arguments, by position or keyword, make the same hook. 1 is not True, 32.0 not 32."""
    parameters = inspect.signature(make).parameters

    @functools.lru_cache(maxsize=None, typed=True)
    def made_as_called(*args: Any, **kwargs: Any) -> Hook:
        bound = bind(make, args, kwargs)
        bound.apply_defaults()
        key = (make, *((name, type(value), value) for name, value in bound.arguments.items()))
        hook = _made.get(key) or _made.setdefault(key, make(*args, **kwargs))
        changed = {name: value for name, value in bound.arguments.items() if value != parameters[name].default}
        _calls.setdefault(hook, functools.partial(made_once, **changed))
        return hook

    @dynamo.outermost_runs_in_python
    @functools.wraps(make)
    def made_once(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Hook:
        if torch.compiler.is_dynamo_compiling():  # Dynamo warns of functions with `lru_cache`
            return make(*args, **kwargs)
        try:
            return made_as_called(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError:  # an argument has no hash; `make` refuses it, and says why
            bind(make, args, kwargs)
            return make(*args, **kwargs)

    return made_once
