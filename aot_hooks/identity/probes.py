"""Which value a pair of functions is, by Dynamo's guards.

      probe(pack, unpack) = unpack(pack(example)), ...      compiled, and never run: its graph gives a token away
      first call with k = 2    --> traced: token 1
      made anew, k = 2         --> guards hold: token 1
      k = 3                    --> guards fail, traced: token 2

Guards cover closures, globals, attributes, modules; what they read is what the traced functions read. Tensors that they
read are inputs of the graph: the token holds their digests. Examples are as the tensors that the functions were applied
to, because control flow on shape and dtype picks what is read. Each probe has code of its own, hence its own cache in
Dynamo and its own limit of recompilations.
"""

from __future__ import annotations

import inspect
import itertools
import re
import threading
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..dynamo import _compat as dynamo
from ..errors import AotHooksError, HookContractError, HookTraceError
from .tensors import tensor_digest

__all__ = ["Example", "Probe", "Token", "Untraceable", "example_of"]

Token = tuple[Any, ...]  # number of what was traced, digests of the tensors that it reads


class Example(NamedTuple):
    """A tensor to trace on: dense or not, as its strides say."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def source(self) -> str:
        return f"empty({self.shape}, {self.stride}, dtype={self.dtype}, device={str(self.device)!r})"


def example_of(x: torch.Tensor, size_of: Any) -> Example:
    """The example for `x`, symbolic sizes by `size_of`; dimensions of stride 0 hold one row."""
    strides = tuple(map(size_of, x.stride()))
    shape = tuple(size_of(n) if stride else min(size_of(n), 1) for n, stride in zip(x.shape, strides, strict=True))
    return Example(shape, strides, x.dtype, x.device)


class Untraceable(HookTraceError):
    """Dynamo can't trace a pair of functions, so nothing would tell when they change."""


class _Local(threading.local):
    token: Token | None = None
    pair: tuple[Any, Any] | None = None
    compiling: dynamo.Compiling | None = None
    scope: Any = None  # the globals of the probe that Dynamo traces
    reached: list[tuple[str, Any, frozenset[str]]] | None = None  # to be filled, if somebody asks

    def done(self) -> tuple[Token | None, dynamo.Compiling | None]:
        """What a call came to."""
        found = self.token, self.compiling
        self.token = self.pair = self.compiling = self.scope = None
        return found


_local = _Local()
_numbers = itertools.count(1)
# since 2.13 a function may have a limit of its own; past it Dynamo logs a warning, and earlier values are traced again
_LIMIT: dict[str, Any] = (
    {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
)


class Probe:
    """The compiled probe for one pair of code objects and some examples."""

    def __init__(self, examples: Iterable[Example]) -> None:
        self.examples = frozenset(examples)
        self.read: dict[int, dict[str, str]] = {}  # number of a token -> the numbers that it read, by name
        self.tensors: dict[int, list[str]] = {}  # and the names of the tensors
        self._compile()

    def _compile(self) -> None:
        traced = "".join(f"unpack(pack({example.source()})), " for example in sorted(self.examples, key=repr))
        source = (
            "def probe(pack, unpack):\n"
            "    if not compiling(): return\n"  # Dynamo is switched off: run nothing
            "    comptime(begin)\n"
            f"    results = ({traced})\n"
            "    comptime(end)\n"
            "    return results\n"
        )
        names: dict[str, Any] = {
            "torch": torch,
            "empty": torch.empty_strided,
            "compiling": torch.compiler.is_dynamo_compiling,
            "comptime": dynamo.comptime,
            "begin": _begin,
            "end": _end,
        }
        exec(source, names)
        self.call = torch.compile(names["probe"], backend=self._backend, fullgraph=True, **_LIMIT)

    def token(self, pack: Any, unpack: Any) -> Token:
        """Which value the pair is; the same token for the same value.

        Raises:
            Untraceable: with Dynamo's reason and the ways out.
            HookContractError: the functions change something that they did not make.
        """
        _local.pair = (pack, unpack)
        try:
            dynamo.in_same_state(self.call, pack, unpack)
        except dynamo.limit_error():
            self.read.clear()
            self._compile()  # with a cache of its own again; earlier tokens do not come back
            return self.token(pack, unpack)
        except Exception as e:
            ours = _ours(e)
            if ours is not None:
                raise ours from None
            raise Untraceable(dynamo.reason_of(e)) from e
        finally:
            token, compiling = _local.done()
            if compiling is not None:
                compiling.end()
        if token is None:
            raise Untraceable("Dynamo is switched off")
        return token

    def _backend(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert _local.pair is not None
        functions = dict(zip(("pack", "unpack"), _local.pair, strict=True))
        number = next(_numbers)
        self.tensors[number] = [_name(name, functions) for name in dynamo.input_names(gm)]
        given: Any = gm.graph.output_node().args[0]
        results = (torch.empty(0),) * len(given)
        guarded = dynamo.guarded_values(functions, _local.scope)
        read = ((_name(name, functions), _text(value)) for _, name, value in guarded)
        self.read[number] = {name: text for name, text in read if text is not None}
        if _local.reached is not None:
            for source, name, _ in guarded:
                way = dynamo.on_the_way(source, functions, _local.scope)
                _local.reached += ((_name(name, functions), value, parts) for value, parts in way)

        def run(*tensors: Any) -> Any:
            _local.token = (number, *(tensor_digest(x) if isinstance(x, torch.Tensor) else x for x in tensors))
            return results

        return run

    def reached(self, pack: Any, unpack: Any) -> list[tuple[str, Any, frozenset[str]]]:
        """The objects that the functions reach, and what is read of each: name, object, parts. For a new probe."""
        _local.reached = []
        try:
            self.token(pack, unpack)
            return _local.reached
        finally:
            _local.reached = None

    def changed(self, token: Token, others: Iterable[Token]) -> list[str]:
        """The names of what the value of `token` read that was otherwise for one of `others`."""
        mine = self._read(token)
        before = [self._read(other) for other in others]
        return [name for name, text in mine.items() if any(other.get(name, text) != text for other in before)]

    def _read(self, token: Token) -> dict[str, str]:
        number, *tensors = token
        return {**self.read.get(number, {}), **dict(zip(self.tensors.get(number, ()), tensors, strict=False))}


def _begin(_: Any) -> None:
    if _local.compiling is None:  # or Dynamo begins the trace again
        _local.compiling = dynamo.Compiling()


def _end(context: Any) -> None:
    _local.scope = dynamo.global_scope(context)
    what = dynamo.side_effects(context)
    if what is not None:
        raise HookContractError(
            f"tracing it changed {what} (a side effect); expected pure functions, which are traced once and not called "
            "in each step. Take the side effect out, or run the hook eagerly with Hook(..., eager=True)"
        )


def _ours(e: BaseException | None) -> AotHooksError | None:
    """The error that was raised while Dynamo traced, which it wraps or turns into text."""
    while e is not None:
        if isinstance(e, AotHooksError):
            return e
        if (inner := getattr(e, "inner_exception", None)) is not None:
            return _ours(inner)
        if "HookContractError: " in str(e):
            return HookContractError(str(e).split("HookContractError: ")[-1].splitlines()[0])
        e = e.__cause__ or e.__context__
    return None


# --- what was read, by the names that its author knows it by ----------------------------------------------------------


def _name(source: str, functions: dict[str, Any]) -> str:
    """`L['pack'].__closure__[0].cell_contents.k` as `q.k`, for a function that closes over `q`."""
    for label, fn in functions.items():
        fn = getattr(fn, "__func__", fn)
        code = getattr(fn, "__code__", None)
        if isinstance(code, types.CodeType):
            free, arguments = code.co_freevars, code.co_varnames[: code.co_argcount]
            here = re.escape(f"L['{label}']") + r"(\.__func__)?"
            source = re.sub(here + r"\.__closure__\[(\d+)\]\.cell_contents", lambda m: free[int(m[2])], source)  # noqa: B023
            defaults = arguments[len(arguments) - len(fn.__defaults__ or ()) :]
            source = re.sub(here + r"\.__defaults__\[(\d+)\]", lambda m: defaults[int(m[2])], source)  # noqa: B023
            source = source.replace(f"L['{label}'].__self__", arguments[0] if arguments else label)
        source = source.replace(f"L['{label}']", label)
    source = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source)
    return re.sub(r"G\['(?:__import_)?(\w+)'\]\.?", "", source) if source.startswith("G[") else source


def _text(value: Any) -> str | None:
    return f"{type(value).__name__}:{value!r}" if isinstance(value, _PLAIN) else None


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
