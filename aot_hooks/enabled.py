"""`enable`: functions that `torch.compile` gives to torch's own backend "inductor" follow contexts, policies, budgets.

      torch.compile(model)  --call--> Dynamo's callback --exchanged--> backend.compile_for(..., policy)
                                            |
                                            `-- another backend, or nothing enabled: as it is

For trainers that know no other backend by name. Dynamo keeps the graphs of each backend apart, and an enabled one is
equal to another only if policy, scope and options are.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from . import unused
from .backend import compile_for
from .context.pairs import Pair, pair_of
from .errors import OptionError, UnusedWarning, names_arguments, warn_user
from .identity.frozen import described
from .identity.memo import Memo
from .options import Options, with_arguments
from .passes.plan import Plan
from .records import CompiledGraph, Summary, plans_of
from .settings.setting import Setting
from .torch_private import autograd, dynamo, dynamo_backends, inductor

_lock = threading.RLock()
_open: list[Enabled] = []  # the innermost last
_end: Callable[[], None] | None = None  # ends the exchange of callbacks; None while nothing is enabled
# for each callback of Dynamo: the wrapper of its function, None if that has another backend than "inductor"; and the
# callbacks that replace it, by the key of the `Enabled`
_exchanged: Memo[tuple[Any, dict[str, Any]]] = Memo()
_caller = threading.local()  # `wrapper`: weakly, of the compiled function that this thread called last
_SHARDED = "under FSDP2's fully_shard: there put the layers into a class of your own"
_borrows: Memo[bool] = Memo()  # wrappers of functions for which Dynamo runs graphs of equal ones


@dynamo.outermost_runs_in_python
@names_arguments
def enable(
    policy: Any = None,
    *,
    scope: str | None = None,
    options: Mapping[str, Any] | None = None,
    check: bool | float = False,
) -> Enabled:
    """Compile by this package what `torch.compile` gives to torch's own backend "inductor".

    It takes effect at once, for calls in the whole process, until `disable()` of what it returns is called or a `with`
    of it ends. A function that is compiled already gets new graphs, and its old ones serve it again after that. Keep it
    enabled until the backward has run.

    Args:
        policy: a hook, policy or `budget(...)` for saved tensors that no context covers. None: contexts alone say.
        scope: the scope of `policy`; "donated" by default.
        options: other options of the backend, see `Options`; "inductor" has settings that `torch.compile(options=...)`
            of the function overrides.
        check: compare the gradients of the first step with those without hooks, see docs/check.md. A number is the
            limit of the relative error, 0.1 by default.

    The logger "aot_hooks" says at level INFO, after the first step and at the end, how many graphs ran and what they
    save.

    May be nested; the innermost counts. `aot_hooks.disable()` ends all. Other backends are left alone. A call of a
    compiled function raises what backend="aot_hooks" raises, wrapped by Dynamo.

    Raises:
        OptionError: a wrong argument; inside a compiled function; while another thread has it enabled. From a call of a
            compiled function: the function has an Inductor partitioner of its own, or Dynamo stores it
            (`torch._dynamo.config.caching_precompile`).
        UnsupportedTorchError: this torch lacks what it needs.

    Warns:
        UnusedWarning: no graph that "inductor" compiles has run while it was the innermost. The warning comes when it
            ends. If nobody ends it, the warning comes at the end of the process, but only of one that has trained.
    """
    return Enabled(policy, scope, options, check)


def disable() -> None:
    """End all that `enable` has enabled, such as one whose switch is lost."""
    for enabled in list(_open):
        enabled.disable()


@atexit.register
def _end_with_the_process() -> None:
    """End each `Enabled` that the program has left open, so that its last line or its warning is printed.

    A process that has neither trained nor called a compiled function prints nothing: `script.py --help` is one, and a
    worker that imports the script. Nor does one that ends with an error, whose traceback shall stand last.
    """
    if hasattr(sys, "last_type") or multiprocessing.parent_process() is not None:
        return
    for enabled in list(_open):
        is_called = enabled.is_called or enabled.other_backends
        if is_called or autograd.next_sequence_number() > enabled._first_operator:
            with contextlib.suppress(UnusedWarning):  # nobody is left to catch one that is an error
                enabled.disable()


class Enabled:
    """What `enable` returns: a context manager, which may be entered once, and a switch."""

    def __init__(
        self, policy: Any, scope: str | None, options: Mapping[str, Any] | None, check: bool | float = False
    ) -> None:
        global _end
        if dynamo_backends.in_compiled_function():
            raise OptionError("enable was called inside a compiled function; call it around the compiled call")
        self.options = Options.parse(with_arguments(policy, scope, options, check))
        self.thread = threading.current_thread()
        self.is_called = False  # a function compiled for "inductor" was called while this was the innermost
        self.other_backends: set[str] = set()  # of other compiled functions that were called meanwhile
        self._left_before = dynamo.left_to_python()
        self._first_operator = autograd.next_sequence_number()  # of those that autograd records from here on
        self.inner = ""  # the last one that was enabled inside this one
        self.is_used = False  # "inductor" was to compile a graph, or one has run, while this was the innermost
        # since the last call of `runs`, while this was the innermost
        self._run_counts: Counter[CompiledGraph] = Counter()
        self._summary = Summary(repr(self))
        self.setting = None if policy is None else Setting(policy, self.options.scope)
        self.pair: Pair | None = None  # stands for what the policy is now, if that may change
        which = ""
        if self.setting is not None:
            self.pair = None if described(policy).frozen else pair_of(self.setting)
            which = self.setting.key if self.pair is None else f"pair {self.pair.number}"
        others = sorted((name, repr(value)) for name, value in {"check": check, **(options or {})}.items())
        self.key = f"{which} {others}"
        with _lock:
            for ended in [each for each in _open if not each.thread.is_alive()]:  # nobody else will
                ended.disable()
            if other := next((each for each in _open if each.thread is not self.thread), None):
                self._close()
                raise OptionError(
                    f"enable is for the whole process, and thread {other.thread.name!r} has {other!r} enabled: "
                    "disable that first, or use torch.compile(..., backend='aot_hooks')"
                )
            if _end is None:
                _end = dynamo_backends.exchange_callbacks(_callback_for)
            for outer in _open:
                outer.inner = repr(self)
            _open.append(self)

    @property
    def is_enabled(self) -> bool:
        return self in _open

    @property
    def run_count(self) -> int:
        """How many graphs have run since the last call of `runs`, with plans or without."""
        return self._run_counts.total()

    def runs(self) -> list[tuple[Plan, int]]:
        """The plans of graphs that ran since the last call, each with the number of its runs.

        Only runs while this was the innermost one count.
        """
        counts, self._run_counts = self._run_counts, Counter()
        return [(plan, n) for graph, n in counts.items() for plan in graph.plans]

    def _close(self) -> None:
        if self.pair is not None:
            self.pair.count_open(-1)

    def disable(self) -> None:
        """End it; of nested ones any may end first. A second call does nothing."""
        global _end
        with _lock:
            if not self.is_enabled:
                return
            _open.remove(self)
            self._close()
            if not _open and _end is not None:
                _end()
                _end = None
        self._summary.log_all()
        if self.setting is not None:
            unused.recomputed_outside(self.setting)
        if not self.is_used and sys.exc_info()[0] is None:
            warn_user(
                f"aot_hooks: {self!r} ended, and no graph that backend 'inductor' compiles has run while it was the "
                f"innermost, so it had no effect. {self.why_unused}",
                UnusedWarning,
            )

    @property
    def is_nothing_called(self) -> bool:
        """Whether no compiled function was called, and no other `enable` inside of it has taken the calls."""
        return not self.is_called and not self.other_backends and not self.inner

    @property
    def why_unused(self) -> str:
        """What to do if it had no effect."""
        if not self.is_called and self.inner:
            return f"Only the innermost counts, and {self.inner} was enabled inside this one"
        if not self.is_called and self.other_backends:
            names = ", ".join(map(repr, sorted(self.other_backends)))
            return (
                f"Functions that were called are compiled for another backend, {names}. Leave backend= out of "
                "torch.compile, or the backend out of the trainer's switch"
            )
        if not self.is_called:
            return (
                "No compiled function was called: compile the model (torch.compile, or the trainer's own switch, "
                "without another backend) and call it inside; a process that is started inside needs an enable of "
                "its own"
            )
        left = dynamo.left_to_python()
        new = [text for text, count in left.items() if count != self._left_before.get(text)]
        if new:
            # FSDP2's forward of a module calls it; the second text is of torch 2.15
            sharded = "function `disable`" in new[-1] or "skipping FSDP hooks" in new[-1]
            return (
                f"A compiled function was called, but Dynamo left it to Python: {_in_one_line(new[-1])} "
                f"{f'An nn.Sequential is not compiled {_SHARDED}. ' if sharded else ''}Compile the "
                "parts that it can trace. A context around the call packs what eager code saves"
            )
        earlier = f" Earlier it left a function to Python: {_in_one_line([*left][-1])}" if left else ""
        return (
            "A compiled function was called, but Dynamo ran none of its graphs. It compiles a function once for each "
            "policy, at most torch._dynamo.config.recompile_limit times: call torch._dynamo.reset(), or raise the "
            f"limit.{earlier} Before torch 2.15 nn.Sequential(...).compile() compiles nothing; torch.compile(module) "
            f"does, but not {_SHARDED}"
        )

    def __call__(self, *_: Any, **__: Any) -> Any:
        with _lock:
            self.is_used = True  # the error says enough
            self.disable()
        raise OptionError(
            "aot_hooks.enable(...) is no decorator: write `with aot_hooks.enable(...):` around the calls, or "
            "`hooks = aot_hooks.enable(...)` and, at the end, `hooks.disable()`"
        )

    def __enter__(self) -> Enabled:
        if not self.is_enabled:
            raise OptionError(f"{self!r} has ended; call aot_hooks.enable(...) anew")
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            dynamo.leave_out_library_frames(error)
        self.disable()

    def __repr__(self) -> str:
        return f"enable({'' if self.options.policy is None else repr(self.options.policy)})"


def _callback_for(callback: Any) -> Any:
    """Dynamo's callback for a call of a compiled function whose own callback is `callback`."""
    with _lock:
        enabled = _open[-1] if _open else None
    if enabled is None or callback in (None, False):
        return callback
    known = _exchanged.get(callback)
    wrapper, by_key = known or _exchanged.set(callback, (dynamo_backends.inductor_wrapper_of(callback), {}))
    if wrapper is None:
        if not enabled.other_backends:  # one name is enough for the message, and this is in each call
            enabled.other_backends.add(dynamo_backends.backend_name(callback))
        return callback
    enabled.is_called, _caller.wrapper = True, weakref.ref(wrapper)
    if enabled.pair is not None and enabled.setting is not None:
        enabled.pair.setting = enabled.setting  # an equal one may have been enabled inside this one
    if enabled.key not in by_key:
        backend = _Backend(wrapper, enabled)
        if dynamo_backends.is_precompiled(callback):
            # raised when it compiles: only after that torch puts back what it has set for the call
            backend.refusal = (
                "torch._dynamo.config.caching_precompile stores compiled functions without their hooks; switch it off"
            )
        by_key[enabled.key] = dynamo_backends.with_backend(callback, backend)
    return by_key[enabled.key]


def _in_one_line(explanation: str) -> str:
    """What Dynamo does not trace, the reason where it has one, and its first hint, without the lines that follow."""
    lines = [line.strip() for line in explanation.splitlines()]
    reasons = [after for line in lines for _, found, after in [line.partition("Reason: ")] if found]
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    return " ".join(f"{line.rstrip('.')}." for line in (*lines[:1], *reasons[:1], *hints[:1]))


class _Backend(dynamo_backends.InPlaceOf):
    """The backend that compiles one function with the hooks and options of an `enable`.

    Dynamo uses the graphs of an equal backend, so the same model made anew compiles nothing. `refusal` is why it
    compiles nothing, "" if it does.
    """

    def __init__(self, wrapper: Any, enabled: Enabled) -> None:
        super().__init__(wrapper)
        self.options, self.key, self.pair, self.refusal = enabled.options, enabled.key, enabled.pair, ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend) and self.key == other.key and bool(self.wrapper == other.wrapper)

    __hash__ = None  # type: ignore[assignment]  # as torch's own

    def __call__(
        self, gm: GraphModule, inputs: Sequence[Any], *, config_patches: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        for innermost in _open[-1:]:
            innermost.is_used = True
        settings = {**(self.options.inductor or {}), **self.settings, **(config_patches or {})}
        refusal = self.refusal
        if inductor.custom_partitioner(settings) is not None:
            refusal = inductor.TWO_PARTITIONERS
        if refusal:
            error = OptionError(f"enable: {refusal}, or don't enable hooks for this function")
            raise dynamo.backend_failure("inductor", error)
        before = list(plans_of(self.wrapper))  # a budget may take some out of it
        policy = self.options.policy if self.pair is None else self.pair.setting.rule
        options = replace(self.options, inductor=settings, policy=policy)
        compiled = compile_for(self.wrapper, gm, inputs, None, options, "inductor", self.pair)
        graph = CompiledGraph([plan for plan in plans_of(self.wrapper) if not any(plan is other for other in before)])

        def run(*args: Any) -> Any:
            enabled = _open[-1] if _open else None
            if enabled is not None:
                enabled.is_used = True
                enabled._run_counts[graph] += 1
            caller = _caller.wrapper() if hasattr(_caller, "wrapper") else None
            if caller is not None and caller is not self.wrapper:
                _lend(graph, caller)
            outputs = compiled(*args)
            if enabled is not None:
                enabled._summary.ran(graph, outputs)
            return outputs

        return run


def _lend(graph: CompiledGraph, wrapper: Any) -> None:
    """List the plans of `graph` for `wrapper` too, if Dynamo has compiled nothing for that function itself."""
    plans = plans_of(wrapper)
    if not plans:
        _borrows.set(wrapper, True)
    if _borrows.get(wrapper):
        plans += [plan for plan in graph.plans if not any(plan is other for other in plans)]
