"""Calls of compiled functions with another backend than `torch.compile` was given (2.11 to 2.15).

      compiled function --> its callback --`_callback_from_stance`--> the callback that Dynamo runs
                                                 `--exchanged--> the same with another backend, see `with_backend`

Dynamo compares the backend of a stored graph with that of the callback. So a function that is called with and without
the exchange has graphs of both, and uses the right ones. torch's own `torch.compiler.set_stance(force_backend=...)`
works by the same function, but for all backends alike, without their options, and without `fullgraph`.
"""

from __future__ import annotations

from typing import Any

from cudagraph.torch_private import compilers

from .symbols import need

exchange_callbacks = compilers.exchange_callbacks

Callback = Any  # of Dynamo; None and False stand for no compilation


def inductor_wrapper_of(callback: Callback) -> Any:
    """What `torch.compile(backend="inductor")` made, if `callback` is of such a function; else None."""
    backend = need("torch._dynamo.eval_frame.innermost_backend")(callback)
    return backend if type(backend) is need("torch._TorchCompileInductorWrapper") else None


def backend_name(callback: Callback) -> str:
    """The name of the backend that `callback` compiles for."""
    backend = need("torch._dynamo.eval_frame.innermost_backend")(callback)
    return str(getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__))


class InPlaceOf:
    """A backend in place of `wrapper`, which is of torch's "inductor" with the mode and options of a function."""

    compiler_name = "inductor"

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.get_compiler_config, self.reset = wrapper.get_compiler_config, wrapper.reset

    @property
    def settings(self) -> dict[str, Any]:
        """Inductor's settings of the function."""
        return dict(self.wrapper.config)


def with_backend(callback: Callback, backend: Any) -> Callback:
    """`callback` with another backend; `fullgraph` and limits as they are. As torch's own DDP optimizer does it."""
    convert = callback._torchdynamo_orig_backend
    debugged = need("torch._dynamo.eval_frame.get_compiler_fn")(backend)
    wrap = need("torch._dynamo.convert_frame.catch_errors_wrapper")
    return wrap(convert._clone_with_backend(debugged), callback.hooks)


def is_precompiled(callback: Callback) -> bool:
    """Whether Dynamo stores what `callback` compiles in a package (`caching_precompile`), which names a backend."""
    convert = callback._torchdynamo_orig_backend
    return getattr(getattr(convert, "_inner_convert", convert), "_package", None) is not None


def in_compiled_function() -> bool:
    """Whether Dynamo looks at each function that is called now."""
    return need("torch._C._dynamo.eval_frame.get_eval_frame_callback")() not in (None, False)
