"""Runs a program on fake tensors, and removes the traces that this leaves in Dynamo."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .dynamo import code_being_compiled, entries_of, invalidate
from .symbols import need
from .values import FakeTensor, is_traced_value, pytree


@functools.cache
def _all_fake_class() -> type:
    base = need("torch._subclasses.fake_tensor.FakeTensorMode")

    class AllFake(base):  # type: ignore[misc, valid-type]
        """A fake mode in which no operator runs, also none on real tensors alone: a buffer stays what it is."""

        supports_higher_order_operators = True  # torch finds rules for its own class only, not for a subclass

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args, kwargs = to_fake(self, (args, kwargs or {}))
            is_higher_order = isinstance(func, need("torch._ops.HigherOrderOperator"))
            if is_higher_order and func not in need("torch._higher_order_ops.utils.registered_hop_fake_fns"):
                return func.python_key_table[base](self, *args, **kwargs)
            return super().__torch_dispatch__(func, (FakeTensor,), args, kwargs)

    return AllFake


def to_fake(mode: Any, tree: Any) -> Any:
    """`tree` with each real tensor replaced by its fake in `mode`; the same tensor has the same fake."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t if is_traced_value(t) else mode.from_tensor(t), tree)


def fake_mode_for(tensors: Sequence[torch.Tensor]) -> Any:
    """The fake mode of `tensors`; if none of them is fake, a new mode in which no operator runs."""
    modes = (t.fake_mode for t in tensors if isinstance(t, FakeTensor))
    # some higher-order operators ask for a shape environment; in this one a size that depends on values still raises
    shape_env = need("torch.fx.experimental.symbolic_shapes.ShapeEnv")(
        allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
    )
    return next(modes, None) or _all_fake_class()(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)


def _devices_in_use() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def random_state_unchanged() -> contextlib.AbstractContextManager[None]:
    """Puts back the random state of the CPU, and of each CUDA device if CUDA is in use."""
    return torch.random.fork_rng(_devices_in_use())


def random_states() -> list[bytes]:
    """The states that `random_state_unchanged` puts back."""
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _devices_in_use())]
    return [state.numpy().tobytes() for state in states]


PLANNER = "aot_hooks_planner"  # the name of the backend that only plans


class DynamoTraces:
    """Removes on exit what Dynamo has stored since: cache entries of the code it compiled, and the sizes it saw.

    Dynamo would make a size dynamic that differs from one it saw. Where a code had other entries before, ours are
    invalidated instead, and count against the recompile limit. Goes when Dynamo can reset one function; 2.11 to 2.15.
    """

    def __init__(self) -> None:
        self.codes: dict[Any, bool] = {}  # code -> whether it had entries before
        self.thread = threading.get_ident()

    def __enter__(self) -> DynamoTraces:
        self.hook = need("torch._dynamo.convert_frame.register_bytecode_hook")(lambda code, _: self._note(code))
        self.sizes = copy.deepcopy(dict(need("torch._dynamo.pgo.get_code_state")()))
        return self

    def forget(self, fn: Callable[..., Any]) -> None:
        """Remove on exit all entries for the code of `fn`."""
        self.codes[fn.__code__] = False

    def note(self) -> None:
        """Remembers the code that Dynamo is compiling; call it in the backend."""
        if (code := code_being_compiled()) is not None:
            self._note(code)

    def _note(self, code: Any) -> None:
        """Remembers `code`, which Dynamo compiles in this thread, also if it makes no graph of it."""
        if threading.get_ident() == self.thread:
            self.codes.setdefault(code, bool(entries_of(code)))

    def __exit__(self, *exc: object) -> None:
        self.hook.remove()
        state = need("torch._dynamo.pgo.get_code_state")()
        state.clear()
        state.update(self.sizes)
        for code, others in self.codes.items():
            if not others:
                need("torch._C._dynamo.eval_frame.reset_code")(code)
            else:
                invalidate(code, "aot_hooks.plan is done", PLANNER)
