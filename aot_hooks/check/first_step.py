"""Runs the first step of a compiled function without hooks, too, and compares the gradients.

      forward    inputs, random state --noted--> runs with hooks
      backward   runs with hooks: gradients g --------------------------------------+
                 the same inputs, random state and incoming gradients               +--> |g - g0| / |g0|
                 --the graph without hooks, forward and backward--> gradients g0 ---+
      its end    one line in the log
                 above the limit: g0 in place of g, a warning with the causes, and the function is compiled once more

The second run begins when the first has its gradients. So it holds the tensors of one graph at a time, nothing of the
program runs out of memory because of it, and all that it writes to are copies. Each graph gets the gradients that came
in with hooks: an error that one graph passes on to the next is not the next one's.

A model of many graphs is compared graph by graph, and all calls of a backward pass have one line.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from ..eager.modules import running_modules
from ..eager.packing import rounded_by
from ..errors import GradientWarning, warn_user
from ..graphs.saved import Kind
from ..hook import Hook
from ..identity.memo import Memo
from ..passes.plan import NOTHING, Plan, Unpacked
from ..settings.setting import Setting
from ..torch_private import autograd, dynamo
from ..torch_private import values as torch_values
from .causes import Causes, Kinds, find, rounded_kinds
from .comparison import ONE, Deviation, Error, deviations

log = logging.getLogger("aot_hooks")
_lock = threading.RLock()
_SAMPLE = 1024  # elements of an output that are compared: they show another random mask, and take no memory
_SAME = 1e-6  # relative error of such a sample: rounding in another order
_ANOTHER = 0.1  # relative error of such a sample: more than rounding in another order, less than another mask
_SHOWN = 4  # causes that a warning describes

# by the code that Dynamo compiles: by settings, what stays unpacked
_unpacked: Memo[dict[Any, Unpacked]] = Memo()


def unpacked(code: CodeType | None, settings: Sequence[Setting]) -> Unpacked:
    """What earlier checks of the function with `code` leave unpacked under `settings`."""
    with _lock:
        return (_unpacked.get(code) or {}).get(_asked(settings), NOTHING)


def _asked(settings: Sequence[Setting]) -> Any:
    return tuple((setting.scope, setting.text) for setting in settings)


def why_not(gm: GraphModule) -> str:
    """Why the graph `gm` of Dynamo can't run a second time in a backward; "" if it can."""
    if dynamo.process_count() == 1:
        return ""
    inputs = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
    distributed = any(isinstance(x, torch.Tensor) and torch_values.is_traceable_subclass(x) for x in inputs)
    if distributed or any("c10d" in str(node.target) for node in gm.graph.nodes):
        return "its graph communicates with other processes, which may not run it a second time"
    return ""


def warn_not_compared(why: str) -> None:
    """Warn that a graph is not compared."""
    warn_user(
        f"aot_hooks: check: gradients of a compiled function are not compared with those without hooks: {why}. "
        "aot_hooks.check_gradients(model, *inputs, policy=...) compares them in a run of its own",
        GradientWarning,
    )


def forget() -> None:
    """Forget what is left unpacked."""
    with _lock:
        _unpacked.known.clear()


@dataclass(eq=False)
class Checked:
    """A compiled graph with hooks whose first backward is compared with one without.

    Attributes:
        limit: the largest relative error that is no warning.
        plans, listed: of the graph, and the list that has them for reports.
        without: the same graph compiled without hooks, and its plan.
        names: what the graph's inputs are called in the program.
        written: inputs that the forward writes to.
        left: what stayed unpacked when the graph was compiled.
        done: compared, or given up.
        failed: compared, and above the limit. Other calls whose backward comes later take gradients without hooks.
        gives_up: the function can't be compiled again, so the graph without hooks runs from now on.
    """

    limit: float
    settings: Sequence[Setting]
    code: CodeType | None
    plans: list[Plan]
    listed: list[Plan] | None
    without: tuple[Callable[..., Any], Plan]
    names: Sequence[str]
    written: set[int]
    left: Unpacked
    done: bool = False
    failed: bool = False
    gives_up: bool = False

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        """`run(*args)`, the compiled forward with hooks, whose backward is compared if it is the first one."""
        if self.gives_up:
            return self.without[0](*args)
        if self.done or not torch.is_grad_enabled():
            return run(*args)
        if any(isinstance(a, torch.Tensor) and torch_values.is_traced_value(a) for a in args):
            return run(*args)  # torch traces the parts into which it has cut the graph for DDP
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return run(*args)
        call = _Call.begin(self, args)
        outputs = run(*args)
        if (node := autograd.node_behind(outputs)) is not None:
            call.note_forward(outputs)
            call.names = [call._label(edge) for edge, _ in node.next_functions]
            node.register_hook(functools.partial(_compare_backward, call))  # without the node, which would hold itself
        return outputs

    def leave(self, causes: Causes, error: Error) -> None:
        """Have the function compiled again without the hooks of `causes`; if nothing explains it, without any."""
        reason = "check: gradients were {:.2g} off with it"
        kinds = {Kind.of(kinds.saved): reason.format(alone) for kinds, alone in causes.found}
        seen = error.most if error.most > self.limit else error.of_one
        everything = "" if kinds else f"{reason.format(seen)}, and no rounding explains that"
        if self.code is None or not (kinds.keys() - dict(self.left.kinds) if kinds else not self.left.everything):
            self.gives_up = True
            return
        with _lock:
            known = _unpacked.get(self.code) or _unpacked.set(self.code, {})
            before = known.get(_asked(self.settings), NOTHING)
            merged = tuple({**dict(before.kinds), **kinds}.items())
            known[_asked(self.settings)] = Unpacked(merged, before.everything or everything)
        self.gives_up = not dynamo.compile_anew(self.code, while_running=True)
        if self.listed is not None and not self.gives_up:
            self.listed[:] = [p for p in self.listed if not any(p is own for own in self.plans)]


@dataclass(eq=False)
class _Call:
    """One call of a checked graph, from its forward to its backward."""

    checked: Checked
    args: list[Any]  # detached; copies of those that the forward writes to
    needs: list[bool]  # which of them require grad
    labels: dict[int, str]  # names of tensors by id
    versions: list[int]
    random: _RandomState
    random_after: _RandomState | None = None
    samples: list[torch.Tensor] = field(default_factory=list)
    names: list[tuple[str, bool]] = field(default_factory=list)  # of its gradients, and whether each is a leaf's
    problem: str = ""  # why it can't be compared

    @staticmethod
    def begin(checked: Checked, args: Sequence[Any]) -> _Call:
        """A call that is about to run its forward on `args`."""
        tensors = (a for a in args if isinstance(a, torch.Tensor) and a.device.type == "cuda")
        devices = tuple(dict.fromkeys(t.device for t in tensors))
        named = {id(p): name for module in running_modules()[:1] for name, p in module.named_parameters()}
        named = {key: name.replace("_orig_mod.", "") for key, name in named.items()}
        labels = {id(a): named.get(id(a), name) for a, name in zip(args, checked.names, strict=False)}
        copied = [_detached(a, copy=i in checked.written) for i, a in enumerate(args)]
        needs = [isinstance(a, torch.Tensor) and a.requires_grad for a in args]
        return _Call(checked, copied, needs, labels, [_version(a) for a in args], _RandomState.now(devices))

    def note_forward(self, outputs: Any) -> None:
        """Note, after the forward: inputs that it wrote to, random states, and samples of its `outputs`."""
        now = [_version(a) for a in self.args]
        changed = {i for i, v in enumerate(now) if i not in self.checked.written and v != self.versions[i]}
        if changed:  # the next call copies it
            self.problem = f"the forward writes to its input '{self.checked.names[min(changed)]}'"
            self.checked.written |= changed
        self.versions = now
        self.random_after = _RandomState.now(self.random.devices)
        self.samples = _samples(outputs)

    @contextlib.contextmanager
    def run_without(self, hook_of: Callable[[int], Hook | None]) -> Iterator[tuple[Any, autograd.Rerun]]:
        """The graph's forward without hooks, on the same values: its outputs, and its backward.

        `hook_of`: the hook that rounds the saved tensor at a position, asked when a backward reads it.
        """
        count = 0

        def pack(x: torch.Tensor) -> tuple[int, torch.Tensor]:
            nonlocal count
            count += 1
            return count - 1, x.detach()

        def unpack(packed: tuple[int, torch.Tensor]) -> torch.Tensor:
            hook = hook_of(packed[0])
            return packed[1] if hook is None else rounded_by(hook, packed[1])

        written = self.checked.written
        leaves = [_detached(a, copy=i in written) for i, a in enumerate(self.args)]
        for leaf, needs in zip(leaves, self.needs, strict=True):
            if needs:
                leaf.requires_grad_()
        # a leaf that requires grad may not be written to
        args = [
            a.clone() if needs and i in written else a
            for i, (a, needs) in enumerate(zip(leaves, self.needs, strict=True))
        ]
        with autograd.innermost_hooks(pack, unpack), torch_values.no_autocast():
            outputs = self.checked.without[0](*args)
            node = autograd.node_behind(outputs)
            yield outputs, autograd.Rerun(node, [a for a, needs in zip(leaves, self.needs, strict=True) if needs])

    def compare(self, found: Sequence[Any], incoming: Sequence[Any]) -> tuple[list[Deviation], Any, _Wrong | None]:
        """The errors of the gradients `found`; those without hooks; and what is wrong if the limit is exceeded.

        Raises `RuntimeError` if it can't be done.
        """
        with self.random.restored(), torch.enable_grad():
            with self.run_without(lambda _: None) as (outputs, backward):
                difference = _difference(self.samples, _samples(outputs))
                after = self.random_after
                repeated = (after is not None and after.is_now()) or difference < _SAME
                if repeated and difference > _ANOTHER:
                    raise RuntimeError(f"its outputs differ from call to call, by {difference:.2g}")
                without = backward(incoming, keep=False)
                del outputs, backward
            kinds = rounded_kinds(self.checked.plans, self.checked.without[1])
            if not repeated:  # hooks draw random numbers: what they round is compared in a run of its own
                found = self._rounded(kinds, incoming)
            errors = self._deviations(without, found)
            error = Error.of(errors)
            if not error.above(self.checked.limit):
                return errors, None, None
            if self.checked.failed:  # another call was above the limit: the causes are known
                return errors, without if repeated else None, None
            causes = self._causes(kinds, without, incoming, error)
        return errors, without if repeated else None, _Wrong(self.checked, error, causes, repeated)

    def _deviations(self, without: Sequence[Any], found: Sequence[Any]) -> list[Deviation]:
        return deviations(self.names, without, found, {d.saved.dtype for d in self.checked.without[1].decisions})

    def _rounded(self, kinds: dict[Kind, Kinds], incoming: Sequence[Any]) -> Sequence[Any]:
        hooks = {i: each.hook for each in kinds.values() for i in each.positions}
        with self.random.restored(), self.run_without(hooks.get) as (_, backward):
            return backward(incoming, keep=False)

    def _causes(
        self, kinds: dict[Kind, Kinds], without: Sequence[Any], incoming: Sequence[Any], error: Error
    ) -> Causes:
        rounded: dict[int, Hook] = {}  # by position; set before each backward
        with self.random.restored(), self.run_without(rounded.get) as (_, backward):

            def error_with(some: Collection[Kind]) -> Error:
                rounded.clear()
                rounded.update({i: kinds[kind].hook for kind in some for i in kinds[kind].positions})
                return Error.of(self._deviations(without, backward(incoming, keep=True)))

            return find(kinds, error_with, error, self.checked.limit)

    def _label(self, edge: Any) -> tuple[str, bool]:
        tensor = getattr(edge, "variable", None)
        return ("gradients that are passed on", False) if tensor is None else (self.labels.get(id(tensor), "?"), True)


@dataclass
class _Wrong:
    checked: Checked
    error: Error
    causes: Causes
    is_mended: bool  # in the step that was compared


@dynamo.untraced  # a backward may run where Dynamo compiles each function that is called
def _compare_backward(call: _Call, found: Sequence[Any], incoming: Sequence[Any]) -> Any:
    """Autograd calls it after the backward of `call`, with the gradients `found` and those that came in.

    Returns gradients to take in place of those found; None to keep them.
    """
    if (call.checked.done and not call.checked.failed) or not call.args:
        return None
    this = _Pass.running()
    try:
        if problem := call.problem or _why_not_now(call):
            this.problems[problem] += 1
            return None
        errors, instead, wrong = call.compare(found, incoming)
    except RuntimeError as e:  # no check may end a training that would have gone on without it
        what = "memory ran out" if isinstance(e, torch.OutOfMemoryError) else f"{type(e).__name__}: {e}"
        this.problems[what.splitlines()[0]] += 1
        this.seen.add(call.checked)
        return None
    finally:
        if not autograd.keeps_graph():  # else another backward may come, of a check that has failed by then
            call.args = []
    this.seen.add(call.checked)
    this.errors += errors
    this.count += 1
    if wrong is not None:
        this.wrong.append(wrong)
    if instead is None:
        return None
    return tuple(None if g is None else g0 for g, g0 in zip(found, instead, strict=True))


def _why_not_now(call: _Call) -> str:
    """Why `call` can't be compared in the backward that runs; "" if it can."""
    if torch.is_grad_enabled():
        return "the backward makes a graph (create_graph=True)"
    if autograd.in_compiled_autograd():
        return "compiled autograd runs the backward"
    if [_version(a) for a in call.args] != call.versions:
        return "inputs of the graph were written to between forward and backward"
    return ""


class _Pass:
    """What was compared in one backward pass."""

    def __init__(self) -> None:
        self.errors: list[Deviation] = []
        self.count = 0
        self.seen: set[Checked] = set()
        self.wrong: list[_Wrong] = []
        self.problems: collections.Counter[str] = collections.Counter()

    @staticmethod
    def running() -> _Pass:
        number = autograd.current_backward()
        with _lock:
            if (found := _passes.get(number)) is None:
                _passes[number] = found = _Pass()
                autograd.at_end_of_pass(found.ended)
            return found

    def ended(self) -> None:
        """Log or warn of the pass, and have functions compiled again whose gradients are above the limit."""
        for checked in self.seen:
            checked.done = True
        if self.problems:
            (problem, count), *_ = self.problems.most_common(1)
            way_out = (
                "the run without hooks holds all that one graph saves: compile the blocks of the model one by one, or "
                "take a smaller batch for the first step"
                if problem == "memory ran out"
                else "aot_hooks.check_gradients(model, *inputs, policy=...) runs by itself"
            )
            warn_user(
                f"aot_hooks: check: {sum(self.problems.values())} calls of compiled functions were not compared with "
                f"those without hooks, {count} of them because {problem}. The training goes on; {way_out}",
                GradientWarning,
            )
        if self.count == 0:
            return
        error = Error.of(self.errors)
        calls = "" if self.count == 1 else f" ({self.count} compiled calls, compared one by one)"
        worst = "" if error.worst is None else f"; worst {error.worst.name} {error.worst.error:.2g}"
        log.info("check: gradients are within %.2g of those without hooks%s%s", error.leaves, worst, calls)
        messages: dict[Any, str] = {}
        for wrong in _once_each(self.wrong):
            wrong.checked.failed = True
            wrong.checked.leave(wrong.causes, wrong.error)
            same = (wrong.checked.code, frozenset(Kind.of(kinds.saved) for kinds, _ in wrong.causes.found))
            messages.setdefault(same, _message(wrong))  # a function may have several graphs
        for message in messages.values():
            warn_user(message, GradientWarning)


_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()


def _once_each(found: Sequence[_Wrong]) -> list[_Wrong]:
    """The worst call of each graph, the worst first."""
    worst: dict[Checked, _Wrong] = {}
    for each in found:
        known = worst.setdefault(each.checked, each)
        if each.error.severity > known.error.severity:
            worst[each.checked] = each
    return sorted(worst.values(), key=lambda each: each.error.severity, reverse=True)


def _message(wrong: _Wrong) -> str:
    checked, found = wrong.checked, wrong.causes.found
    titles = " and ".join(dict.fromkeys(setting.title for setting in checked.settings))
    described = [
        f"{kinds.saved.describe()}{f' and {n} like it' if (n := len(kinds.positions) - 1) else ''}, made by "
        f"{kinds.saved.op}{f' in {kinds.saved.module_path}' if kinds.saved.module_path else ''}: {alone:.2g} off by "
        f"'{kinds.hook.name}' alone"
        for kinds, alone in found[:_SHOWN]
    ]
    more = f"; {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    what = (
        f"These saved tensors cause it, and stay unpacked from now on: {'; '.join(described)}{more}."
        if found
        else f"Rounding explains only {wrong.causes.all_together:.2g} of it, so the graph stays unpacked as a whole: a "
        "hook that was traced gives other numbers than the hook itself."
    )
    step = (
        "This step took the gradients without hooks"
        if wrong.is_mended
        else "This step took them as they are: the hooks draw random numbers, so a run without them takes others"
    )
    worst = "" if (o := wrong.error.worst) is None else f"worst {o.name} {o.error:.2g}"
    off = (
        f"gradients with {titles} are {wrong.error.most:.2g} off those without hooks, above the limit {checked.limit:g}"
        f"{f' ({worst})' if worst else ''}"
        if wrong.error.most > checked.limit
        else f"one gradient with {titles} is off the one without hooks by more than {ONE} times the limit "
        f"{checked.limit:g}: {worst} (all together {wrong.error.most:.2g})"
    )
    again = " The function can't be compiled again now, so its graph runs without hooks." if checked.gives_up else ""
    return (
        f"aot_hooks: check: {off}. {what}{again} {step}. If so much is expected of the hook, raise the limit: "
        "check=0.3, say"
    )


# --- the state of a call ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _RandomState:
    """The random states of the CPU, and of the CUDA `devices` of a call."""

    devices: tuple[torch.device, ...]
    states: tuple[torch.Tensor, ...]

    @staticmethod
    def now(devices: tuple[torch.device, ...]) -> _RandomState:
        return _RandomState(devices, (torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)))

    def is_now(self) -> bool:
        return all(map(torch.equal, self.states, _RandomState.now(self.devices).states))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """This state inside, the one from before after it."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.states[0])
            for device, state in zip(self.devices, self.states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def _detached(value: Any, *, copy: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if copy else value.detach()


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _samples(outputs: Any) -> list[torch.Tensor]:
    """Some elements of each output with a gradient."""
    found = []
    for x in torch_values.pytree.tree_leaves(outputs):
        if isinstance(x, torch.Tensor) and x.requires_grad and x.layout is torch.strided and x.numel():
            positions = torch.linspace(0, x.numel() - 1, min(_SAMPLE, x.numel()), dtype=torch.float64).long()
            where = torch.unravel_index(positions.to(x.device), x.shape) if x.dim() else ()
            found.append(x.detach()[where].clone())
    return found


def _difference(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The largest relative error of samples; infinite numbers don't count."""
    errors = [0.0]
    for a, b in zip(some, others, strict=True):
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        off, norm = float(torch.linalg.vector_norm(b - a)), float(torch.linalg.vector_norm(a))
        errors.append(off / norm if norm else 0.0)
    return max(e if e == e else 0.0 for e in errors)
