"""A trial run: one call of a function under `torch.compile` that leaves no trace.

fn --trial--> compiled by the given backend, Dynamo's entries for it forgotten
              random state as before, an optimizer step refused, errors of this package unwrapped
"""

from __future__ import annotations

import contextlib
import inspect
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import OptionError, unwrapped
from ..torch_private import dry_run as torch_dry_run
from ..torch_private import dynamo


@contextlib.contextmanager
def trial(
    caller: str, fn: Callable[..., Any], backend: Callable[..., Any], dynamic: bool | None
) -> Iterator[Callable[..., Any]]:
    """`fn` compiled by `backend(gm, inputs)`, for one call inside. Raises `OptionError` if `fn` steps an optimizer."""
    traces = torch_dry_run.DynamoTraces()

    running = [
        (traces, backend)
    ]  # emptied at the end: Dynamo keeps each backend, and all in its closure, until a reset

    def noting_backend(gm: GraphModule, inputs: Any) -> Any:
        (noting, compile_graph) = running[0]
        noting.note()
        return compile_graph(gm, inputs)

    def program(*args: Any, **kwargs: Any) -> Any:
        # an outermost frame of our own: entries and decisions of Dynamo for `fn` are stored with it, and forgotten
        return fn(*args, **kwargs)

    def refuse_step(optimizer: Any, *_: Any) -> None:
        raise OptionError(
            f"{caller} got a function that steps an optimizer ({type(optimizer).__name__}); give it the part of the "
            "step that is compiled: the model or the loss function"
        )

    # no entry of another trial is taken for this one, and none counts against Dynamo's limit
    noting_backend.__name__ = torch_dry_run.PLANNER
    traces.forget(program)
    no_step = register_optimizer_step_pre_hook(refuse_step)
    python_random_state = random.getstate()  # layer drop and the like draw from it
    try:
        with torch.compiler.set_stance("default"), traces, torch_dry_run.random_state_unchanged():
            yield torch.compile(program, backend=noting_backend, dynamic=dynamic)
    except Exception as e:
        if (ours := unwrapped(e)) is not None:
            raise ours from None
        raise
    finally:
        running.clear()
        no_step.remove()
        random.setstate(python_random_state)


def unwrap_compiled(caller: str, fn: Any) -> tuple[Any, dict[str, Any], bool | None]:
    """The function or module inside of `fn`, a result of `torch.compile`, the options of our backend, and `dynamic`.
    Raises `OptionError` if `fn` is not callable."""
    fn, wrapper = dynamo.uncompiled(fn)
    if not callable(fn):
        raise OptionError(f"{caller}: expected a module or function, got {fn!r}")
    options = None if wrapper is None else dynamo.options_of(wrapper)
    return fn, options or {}, getattr(wrapper, "dynamic", None)


def reachable_values(fn: Any) -> dict[str, Any]:
    """The globals and closure variables that the code of `fn` names, by name.

    The name "" has `fn` itself if it is a module, and the object if it is a method.
    """
    function = getattr(fn, "__func__", fn)
    values = {"": fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)}
    if isinstance(function, types.FunctionType):
        values |= {name: function.__globals__.get(name) for name in function.__code__.co_names}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                values[name] = cell.cell_contents
    return values


def signature_of(fn: Any) -> inspect.Signature:
    """Raises `TypeError` or `ValueError` for a function of C."""
    return inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
