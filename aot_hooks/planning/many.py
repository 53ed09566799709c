"""A step of many compiled calls under one budget: recorded, planned as one, its functions compiled once more.

      1st step    A.  B.  B.  B.   B'  B'  B'  A'      each `.` a forward, each `'` the end of its backward: the trace
                  whole budget | the least
      after it    for A and B: how many other calls of it hold saved tensors, and the bytes of all else   moments_of
      2nd step    A and B are compiled with their moments; the others count with what their plans hold
                  if it is faster, B in two versions: the first calls hold the least, the last ones more

A graph that is compiled first takes the budget as its own, which is right if it is the whole step. Once calls hold a
quarter of the budget, functions are compiled again for the least that they can hold: nobody knows how many calls
follow. When all backwards of the step have run, its trace is known. If a plan is needed, graphs whose least is not
known are compiled for that first. The share of a graph is then least + s * (stock - least), with the largest s for
which all graphs fit together. A graph that is planned later may use what earlier graphs left of their shares. Each
call chooses its version when it runs, by what other calls hold then.

A step is what one thread runs between two points at which nothing is saved. Bytes are predicted, on all devices. Calls
that hold something while their graphs run forward and backward again are left out: the output of an evaluation is kept.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import BudgetWarning, warn_user
from ..identity.canonical import canonical
from ..passes.plan import Plan
from ..steps.memory import ALONE, Bytes, Moment
from ..steps.moments import Instant, between, instants_of, latest, moments_of, shares, tight_peak
from ..steps.parameters import frees_inputs, gathered_bytes, gradient_bytes, leaf_bytes
from ..steps.recorder import Call, Phase, Recorder, Step, Trace
from ..torch_private import aot, autograd, dynamo
from ..torch_private.values import is_traced_value, pytree
from .apart import averaged, tried_counts
from .assignment import UNSEEN, Assignment, TightCalls
from .before_step import BeforeStep
from .budget import mib
from .in_step import bytes_of, own_bytes
from .measured import StepCheck, StepTime, counters_of, step_check
from .recipe import Recipe
from .simulated import Whole, whole_of
from .sizes import DataSizes
from .versions import Mode, Version, freed_inputs, held_bytes

_SMALL = 0.25  # of the budget: calls that hold less together change nothing
_MOST_COMPILED = 6  # times that a graph is compiled for plans of steps
_MOST_TRACES = 8
_MOST_BUSY, _WARNS_AGAIN = 8, 1.25  # steps in a row before a warning of busy threads; times what the last one said
_FORWARD_SHARE = 1 / 3  # of the time of a call: a backward has twice the products of its forward
_HEADROOM = 1.25  # of sizes that have grown more than once: they may grow slowly
_NOT_KNOWN = Bytes(0, 0, 0)
_DEVICE_NUMBER = re.compile(r"cuda(:|', index=)\d+")  # "cuda:1", or as `repr` of a device has it
Products = Mapping[Any, int]  # of symbolic sizes, see sizes.py

_lock = threading.RLock()
_groups: dict[Assignment, Group] = {}


@dataclass(eq=False)
class Graph:
    """A graph of Dynamo under a budget, in all versions that it is compiled to.

    Attributes:
        mode: what to compile it for next.
        stock, least: bytes of a call without hooks, and of one that holds the least; None: not known.
        share: bytes that a call may take in the step that is planned, or takes if it is compiled for it (`is_fixed`);
            on average, if some calls hold less than others.
        ms: the time of a call without hooks, as predicted.
        least_ms: the time of a call that holds the least, if that is one graph without larger sizes; 0.0: not known.
        is_nested: in all planned steps, its calls run backward in the reverse order of their forwards. Else they are
            alike: a call that holds the least takes much in its backward, while those that hold more still hold it.
        calls: how many hold something at the same time in the planned step.
        compiled_count: how often it was compiled for a step of many calls.
        sizes: the products of symbolic sizes that its bytes are for. A call of larger ones gets a graph of its own.
        grown: how many graphs for smaller sizes were before it.
        frees_inputs: nothing else holds what passes from one of its calls to the next, see steps/parameters.py.
        keeps_inputs: a planned step has shown that something does, until the backward.
        data: its sizes that only the data give; None if there are none.
        digest: of its content, but for the number of its device: the same on all ranks of a host.
        program: the digest of what its plans depend on, see stored.py; "" if nobody asked for it.
        recipe, tight_recipe: loaded plans of its versions, to be made in place of a search.
        codes: weak references to the code of its functions.
        listed: for each version, the list that reports read, and its plans; `stale`: likewise for dropped versions.
    """

    group: Group
    mode: Mode = Mode.ALONE
    stock: Bytes = _NOT_KNOWN
    least: Bytes | None = None
    share: Bytes = _NOT_KNOWN
    ms: float = 0.0
    least_ms: float = 0.0
    is_nested: bool = True
    calls: int = 1
    is_fixed: bool = False
    compiled_count: int = 0
    was_planned: bool = False
    sizes: Products = field(default_factory=dict)
    grown: int = 0
    frees_inputs: bool = False
    keeps_inputs: bool = False
    data: DataSizes | None = None
    digest: str = ""
    program: str = ""
    recipe: Recipe | None = None
    tight_recipe: Recipe | None = None
    codes: list[weakref.ref[types.CodeType]] = field(default_factory=list)
    listed: list[tuple[list[Plan], list[Plan]]] = field(default_factory=list)
    stale: list[tuple[list[Plan], list[Plan]]] = field(default_factory=list)

    def data_sizes(self) -> Mapping[str, int]:
        """What sizes are planned as that only the data give."""
        return {} if self.data is None else self.data.planned

    def share_of(self, sizes: Products) -> float:
        """A lower bound of the bytes of a call at `sizes`, as a share of its bytes at `self.sizes`."""
        return min((n / self.sizes[k] for k, n in sizes.items()), default=1.0)

    def rule(self, given: Assignment, sizes: Products) -> Assignment:
        """The budget to compile the graph with at symbolic `sizes`: all bytes are scaled by `share_of(sizes)`."""
        with _lock:
            part = self.share_of(sizes)
            less = int((1 - part) * (given.peak_bytes or 0))
            tentative = self.data is not None and not self.data.most and not self.data.steps  # they may never cross
            outgrown = self.data is not None and self.data.grown
            lenient = bool(self.grown or outgrown or tentative)
            given = replace(given, over=given.over + less, lenient=lenient, tentative=tentative)
            self.group.recorder.release_dropped()
            step = self.group.step  # the peak may be below 0, after a step took far more than predicted
            if self.mode is Mode.ALONE and step.holding and held_bytes(step) > _SMALL * self.group.peak_bytes:
                self.mode, self.recipe = Mode.LEAST, None
            if self.mode is Mode.LEAST:
                return self._least_rule(given)
            if self.mode is Mode.PLANNED:
                fewest = self._moments(of=lambda graph: graph.share if graph.is_fixed else graph.least or graph.stock)
                moments, at_least = (tuple(m.times(part) for m in ms) for ms in (self._moments(), fewest))
                instants = (instant for trace in self.group.traces for instant in trace)
                estimated = any(instant.gathered_bytes or instant.loss_bytes for instant in instants)
                return replace(
                    given,
                    free=self.group.budget.free,
                    over=less + self.group.over,  # what one call took as the whole step says nothing here
                    moments=moments,
                    moments_at_least=() if at_least == moments else at_least,
                    lenient=given.lenient or self.was_planned or estimated,
                    apart=self._apart() if part == 1 else None,
                    wholes=self._wholes() if part == 1 else (),
                )
            return given

    def _moments(self, tight: int = 0, of: Callable[[Any], Bytes] = lambda graph: graph.share) -> tuple[Moment, ...]:
        held = self.least.held if self.least is not None else 0
        return moments_of(self, self.group.traces, of, (tight, held))

    def _apart(self) -> TightCalls | None:
        least = self.least
        if not self.least_ms or least is None or not self.is_nested or aot.cuts_for_ddp():
            return None
        peak = self.group.room
        counts = tuple((n, self._moments(n), self._tight_peak(least, n)) for n in tried_counts(self.calls))
        return TightCalls(self.least_ms, self.calls, peak, counts)

    def _wholes(self) -> tuple[Whole, ...]:
        """The steps around the graph's calls; () if ways that a user can type are not to be tried."""
        traces = [trace for trace in self.group.traces if any(instant.runs is self for instant in trace)]
        if self.sizes or not traces or aot.cuts_for_ddp():
            return ()
        saved: Counter[Graph] = Counter()
        for instant in traces[-1]:
            if instant.runs is not None:
                saved[instant.runs] += instant.runs.stock.held
        link_share = self.group.time.link_share * saved[self] / max(1, saved.total())

        def ms(graph: Graph, phase: str) -> float:
            return graph.ms * (_FORWARD_SHARE if phase == "forward" else 1 - _FORWARD_SHARE)

        found = [whole_of(self, trace, lambda graph: graph.share, ms, self.group.room, link_share) for trace in traces]
        said: dict[str, Any] = {"frees_inputs": self.frees_inputs, "slowness": self.group.time.slowness}
        wholes = tuple(replace(whole, **said) for whole in found if whole is not None)
        return wholes if len(wholes) == len(found) else ()

    def _tight_peak(self, nbytes: Bytes, count: int) -> int:
        traces = self.group.traces
        return max((tight_peak(self, trace, lambda graph: graph.share, count, nbytes) for trace in traces), default=0)

    def tight_rule(self, given: Assignment, plans: Sequence[Plan]) -> Assignment | None:
        """The budget to compile a second version with, for the calls that hold less; None: all are alike."""
        share = plans[0].in_step if plans else None
        with _lock:
            if share is None or not share.tight_calls:
                return None
            return replace(self._least_rule(given), recipe=self.tight_recipe)

    def _least_rule(self, given: Assignment) -> Assignment:
        moments = self._moments(of=lambda graph: graph.least or graph.stock) if self.group.counted else ALONE
        return replace(given, free=None, least=True, moments=moments)

    def compiled(
        self, plans: list[Plan], listed: list[Plan] | None, tight_plans: Sequence[Plan], sizes: Products
    ) -> Version | None:
        """Note a version that was compiled with `rule()`; None if no plan of it says how many bytes it holds.

        `tight_plans` are those of `tight_rule()`. Then the plan in `plans` gets the time of a call on average.
        `sizes` are those of `rule()`.
        """
        found = [plan for plan in plans if plan.live_after]
        if not found:
            return None
        code = dynamo.code_being_compiled()
        with _lock:
            for old, gone in self.stale:
                old[:] = [plan for plan in old if all(plan is not each for each in gone)]
            self.stale = []
            if code is not None and all(ref() is not code for ref in self.codes):
                self.codes.append(weakref.ref(code))
            # another thread may have changed the mode
            mode = Mode.PLANNED if found[0].in_step is not None else self.mode
            growth = 1 / self.share_of(sizes)
            nbytes, ms = Bytes.total(map(own_bytes, found)).times(growth), sum(plan.after_ms for plan in found)
            drops_others = any(plan.recipe is not None and plan.recipe.drops_others for plan in found)
            freed = sum(map(freed_inputs, found)) if self.frees_inputs else 0
            version = Version(self, mode, nbytes, ms=ms, drops_others=drops_others, freed_inputs=freed)
            if len(found) == 1:
                version.sizes = found[0].sizes
                version.has_hooks = found[0].packed_bytes < found[0].saved_bytes
            self.group.compiled(plans)
            if mode is Mode.PLANNED:
                self.was_planned, self.is_fixed, self.share = True, True, version.nbytes
                if tight_plans:
                    version.tight = Version(
                        self, mode, own_bytes(tight_plans[0]), is_tight=True, ms=tight_plans[0].after_ms
                    )
                    as_planned = self.least is not None and version.tight.nbytes.held <= self.least.held
                    version.tight_calls = plans[0].in_step.tight_calls if plans[0].in_step else 0
                    version.loose_calls = self.calls - version.tight_calls if as_planned else 0
                    peak = self._tight_peak(version.tight.nbytes, version.tight_calls)
                    plans[0], self.share = averaged(plans[0], tight_plans[0], version, peak)
                instants = [i for trace in self.group.traces for i in trace]  # none if it comes from the cache
                stock = max((instant.nbytes(lambda graph: graph.stock) for instant in instants), default=0)
                for i, plan in enumerate(plans):
                    if plan.in_step is not None:
                        plans[i] = replace(plan, in_step=replace(plan.in_step, stock_bytes=stock))
                self.group.check = step_check(self.group.budget, plans, tighter=self.group.over > 0)
            else:
                self.stock = Bytes.total(bytes_of(plan.live_before) for plan in found).times(growth)
                self.ms = sum(plan.before_ms for plan in found)
                self.group.unplanned_check = step_check(self.group.budget, plans, tighter=False)
            if listed is not None:
                self.listed.append((listed, list(plans)))
            if mode is Mode.LEAST:
                one = len(plans) == 1 and growth == 1
                self.least, self.least_ms = version.nbytes, plans[0].after_ms if one else 0.0
            return version

    def note_peak(self, nbytes: int) -> None:
        """The step takes `nbytes`, as predicted: have the plans say so. A plan counts the shares of graphs that were
        planned after it, which may take less."""
        for shown, known in self.listed:
            for plan in [*known]:
                if plan.in_step is not None and plan.in_step.elsewhere_bytes > nbytes:
                    lower = replace(plan, in_step=replace(plan.in_step, elsewhere_bytes=nbytes))
                    for each in (shown, known):
                        each[:] = [lower if one is plan else one for one in each]

    def compile_again(self, mode: Mode) -> None:
        """Have the next calls compile the graph again for `mode`. Nothing changes if they can't."""
        if self.why_not_again():
            return
        self.mode = mode
        self.recipe = self.tight_recipe = None  # they were for another step
        self.compiled_count += 1
        self.stale += self.listed
        self.listed = []
        for code in self._codes():
            dynamo.compile_anew(code, while_running=True)

    def why_not_again(self) -> str:
        """Why `compile_again` would do nothing; "" if it would work."""
        codes = self._codes()
        return next(filter(None, map(dynamo.why_not_anew, codes)), "") if codes else "they are gone"

    def _codes(self) -> list[types.CodeType]:
        return [code for ref in self.codes if (code := ref()) is not None]


class _OfThread(threading.local):
    recorder: Recorder | None = None
    decided: Version | None = None  # what the last call runs


@dataclass(eq=False)
class Group:
    """All graphs under one budget, and what is known of their steps.

    Attributes:
        budget: as users write it; of "fit" with the bytes that were free before the first graph was compiled.
        on_cuda: a graph has an input there, so a part of the budget is left free, see `UNSEEN`.
        traces: steps that are planned for, one at least for each planned graph; the last with `planned_peak` bytes.
        over: bytes of the budget that no plan may take, because a measured step took more than predicted.
        predicted: bytes of the last step that fits.
        check: compares measured steps with the budget. `unplanned_check`: takes its place once a step of several calls
            fits without a plan.
        accepted: the last steps that need no other plan: the trace, and the bytes of gradients that it made.
        accumulates: a noted step began with gradients, so it made none. A later one may.
        awaits_gradients: a plan waited for a step that begins with gradients.
        notes_parameters: whether calls note their parameters, to find the bytes of gradients.
        needs_plan: whether a step is to be planned.
        gathered_bytes: what is gathered for the first call, see steps/parameters.py.
        before: measures what steps allocate before their first call, until the peak was compared with the budget.
        eager_bytes: what the last measured step allocated before its first call.
        loss_bytes: what the last measured step took between its forwards and its backwards.
        ended: how many steps have ended.
        why: why graphs were compiled again last, for the log.
        incomplete: how many steps in a row had calls without a backward.
        counted: whether `least` is planned for the number of calls in `traces`, not for an unknown number.
        data: the sizes of graphs that only the data give, by the digests of the graphs.
        time: how long a step takes over its prediction, and how fast its link is.
        restored: graphs of loaded plans that were not compiled yet, by their programs.
    """

    budget: Assignment
    on_cuda: bool = False
    graphs: dict[str, Graph] = field(default_factory=dict)
    traces: list[Sequence[Instant]] = field(default_factory=list)
    planned_peak: int = 0
    over: int = 0
    predicted: int = 0
    check: StepCheck | None = None
    unplanned_check: StepCheck | None = None
    accepted: deque[tuple[Trace, int]] = field(default_factory=lambda: deque(maxlen=_MOST_TRACES))
    accumulates: bool = False
    awaits_gradients: bool = False
    notes_parameters: bool = True
    needs_plan: bool = False
    gathered_bytes: int = 0
    before: BeforeStep | None = None
    eager_bytes: int = 0
    loss_bytes: int = 0
    ended: int = 0
    why: str = ""
    incomplete: int = 0
    counted: bool = False
    data: dict[str, DataSizes] = field(default_factory=dict)
    time: StepTime = field(default_factory=StepTime)
    restored: dict[str, Graph] = field(default_factory=dict)
    busy: int = 0
    warned_bytes: int = 0
    warned_of_retained: bool = False
    warned_of_data: bool = False
    local: _OfThread = field(default_factory=_OfThread)

    @property
    def peak_bytes(self) -> int:
        return (self.budget.peak_bytes or 0) - self.over

    @property
    def room(self) -> int:
        """The bytes that a step may take as predicted."""
        return int((1 - UNSEEN) * self.peak_bytes) if self.on_cuda else self.peak_bytes

    def known_programs(self) -> set[str]:
        return {graph.program for graph in (*self.graphs.values(), *self.restored.values())}

    @property
    def recorder(self) -> Recorder:
        """The steps of this thread."""
        if self.local.recorder is None:
            effect = "what they hold comes on top of the budget"
            title, on_end = repr(self.budget), self.on_step_end
            self.local.recorder = Recorder(title, effect, BudgetWarning, on_end, lambda version: version.graph, _lock)
        return self.local.recorder

    @property
    def step(self) -> Step:
        """The step of this thread."""
        return self.recorder.step

    def on_forward_start(self) -> None:
        with _lock:
            step = self.recorder.before_call()
            if not step.events:
                step.notes_parameters = self.notes_parameters
                step.began = self.time.begins()
                step.eager_bytes = self._measure_eager_bytes()
                if self.check is not None and (allocated := self.check.begins()) is not None:
                    # what is gathered before the first call, and for it, is of the step
                    step.allocated = allocated - max(self.gathered_bytes, step.eager_bytes)

    def compiled(self, plans: Sequence[Plan]) -> None:
        """A version of a graph was compiled, with `plans`."""
        self.time.compiled(plans)
        if self.before is None and (counters := counters_of(plans)) is not None:
            self.before = BeforeStep(counters)

    def _measure_eager_bytes(self) -> int:
        """The bytes that the new step has allocated so far. 0 if no parameters are gathered: they may be inputs."""
        if self.before is not None and (found := self.before.eager_bytes()) is not None:
            self.eager_bytes = found
            if self.check is not None and self.check.done:
                self.before.close()
        return self.eager_bytes if self.gathered_bytes else 0

    def on_forward_end(self, version: Version, args: Sequence[Any], outputs: Any) -> None:
        if (node := autograd.node_behind(outputs)) is None:
            return
        recorder, step = self.recorder, self.step
        with _lock:
            if version.graph.data is not None:
                version.graph.data.note(version.sizes, node.symints)
            if self.accumulates and not step.events:
                step.notes_parameters |= any(x.is_leaf and x.grad is None for x in _with_gradient(args))
            noted = (args, pytree.tree_leaves(outputs)) if step.notes_parameters else ((), ())
            call = recorder.saves(version, *map(_with_gradient, noted))
            if len(step.holding) > 1 and (loss := self._loss_of(step)) is not None:
                loss.forward_ended()
            alone = version.mode is version.graph.mode is Mode.ALONE
            held = held_bytes(step)
            if alone and len(step.holding) > 1 and held > _SMALL * self.peak_bytes:
                self.why = f"step {self.ended + 1} holds {mib(held)} of {mib(self.peak_bytes)}, and may go on"
                version.graph.compile_again(Mode.LEAST)
        autograd.at_end_of_backward(
            outputs,
            functools.partial(recorder.drop, call),
            functools.partial(self.on_backward_end, recorder, call),
            functools.partial(self.on_backward_begin, step, call),
        )

    def _loss_of(self, step: Step) -> BeforeStep | None:
        """What measures the loss of `step`; None if nothing is to restart the counters in it, or no plan follows it."""
        return self.before if step.notes_parameters and self.check is None and not self.traces else None

    def on_backward_end(self, recorder: Recorder, call: Call) -> None:
        with _lock:
            recorder.release_dropped()
            if recorder.reads(call) and recorder.step.release(call) and not recorder.step.holding:
                recorder.end()

    def on_backward_begin(self, step: Step, call: Call, retains: bool) -> None:
        """Note what of the call's outputs is free, and what the program holds of others. If a second backward may come
        (`retains`), warn if that one, beside all saved tensors, would exceed the peak."""
        with _lock:
            loss = self._loss_of(step)
            if loss is not None and (found := loss.loss_bytes()) is not None:
                step.loss_bytes = max(step.loss_bytes or 0, found)
            call.keeps_inputs |= call.what.keeps_inputs(call)
            if not retains:
                dropped = call.what.drops_others  # these bytes count nothing already
                own = 0 if dropped else sum(nbytes for memory, nbytes in call.returned if memory.expired())
                held = dict(pair for other in step.calls if other.freed_bytes is not None for pair in other.returned)
                others = held.keys() - {memory for memory, _ in call.returned}
                call.freed_bytes = own - sum(held[memory] for memory in others if not memory.expired())
                return
            versions = [call.what for call in step.calls]
            if self.warned_of_retained or any(v.mode is Mode.LEAST or v.mode is not v.graph.mode for v in versions):
                return  # the next step has another plan
            held, working = (
                sum(v.nbytes.held for v in versions),
                max(v.nbytes.backward - v.nbytes.held for v in versions),
            )
            taken = held + working + leaf_bytes(step)  # their gradients have as many
            if taken > self.peak_bytes:
                self.warned_of_retained = True
                warn_user(
                    f"aot_hooks: {self.budget!r}: a backward with retain_graph=True keeps what compiled calls have "
                    "saved. A plan counts it as released: a second backward may take "
                    f"{mib(taken)}. Sum the losses and run one backward, or lower the peak",
                    BudgetWarning,
                )

    def on_step_end(self, step: Step) -> None:
        """Plan for `step`, if it is not one that fits."""
        self.ended += 1
        self.time.ends()
        if self.follows_data(step):
            self.notes_parameters = self.needs_plan = True
            return
        gathered, gathered_first = gathered_bytes(step)
        self.gathered_bytes = max(self.gathered_bytes, gathered_first)
        trace, gradients = step.trace(), gradient_bytes(step, made_before=self.budget.asks_device)
        if any(trace == known and gradients[-1] <= made for known, made in self.accepted):
            self.measure(step)
            return
        if step.is_part or not any(call.was_read for call in step.calls):
            return
        self.incomplete = self.incomplete + 1 if step.dropped else 0
        if 0 < self.incomplete < 3:  # an exception may have ended it
            return
        if step.most < 2:
            self.accepted.append((trace, gradients[-1]))
            self.notes_parameters = self.notes_parameters and self.needs_plan
            self.why = f"step {self.ended} has one call at a time"
            for graph in {v.graph: None for v in trace.calls if v.mode is v.graph.mode is Mode.LEAST}:
                graph.compile_again(Mode.ALONE)  # compiled while calls held something that never had a backward
            return
        self.notes_parameters = self.needs_plan = not step.notes_parameters
        if step.notes_parameters:  # else the next one like it tells
            before = itertools.takewhile(lambda event: event.phase is Phase.FORWARD, step.events)
            self.accumulates |= any(any(step.calls[event.call].accumulates) for event in before)
            for graph in {version.graph for version in trace.calls}:
                graph.keeps_inputs |= any(call.keeps_inputs for call in step.calls if call.what.graph is graph)
                graph.frees_inputs = not graph.keeps_inputs and frees_inputs(step, graph)
            gathered += max(step.eager_bytes - gathered_first, 0)
            freed = [call.freed_bytes or 0 for call in step.calls]
            if step.loss_bytes is not None:
                self.loss_bytes = step.loss_bytes
            beside: Any = gradients, gathered, freed, self.loss_bytes
            self.plan_or_accept(step, trace, lambda key: instants_of(trace, key, *beside))

    def follows_data(self, step: Step) -> bool:
        """Whether graphs of `step` are compiled again for the sizes that the data gave them."""
        versions = dict.fromkeys(call.what for call in step.calls)
        smaller = {v.graph for v in versions if v.has_hooks or v.nbytes.peak(ALONE) > self.peak_bytes}
        of_data: dict[int, list[Graph]] = {}
        for graph in dict.fromkeys(version.graph for version in versions):
            if graph.data is not None:
                of_data.setdefault(id(graph.data), []).append(graph)
        due: list[Graph] = []
        for graphs in of_data.values():
            data, found = graphs[0].data, [graph for graph in graphs if graph in smaller]
            if data is not None and data.is_due() and found:
                data.plan()
                due += found
        if any(graph.data is not None and graph.data.grown for graph in due):
            self.warn_of_data()
        for graph in due:
            self.why = f"step {self.ended} has shown the sizes that only the data give"
            graph.compile_again(graph.mode)
        return bool(due)

    def warn_of_data(self) -> None:
        if not self.warned_of_data:
            self.warned_of_data = True
            warn_user(
                f"aot_hooks: {self.budget!r}: in step {self.ended} the data gave sizes, as of the tokens of an expert, "
                "that are larger than planned: more than those of the first steps by a quarter. It may have taken more "
                "than the budget. Plans are made for larger sizes from now on. Leave room for such steps, or take "
                "grouped_mm, whose sizes don't depend on the data",
                BudgetWarning,
            )

    def plan_or_accept(self, step: Step, trace: Trace, instants: Callable[..., list[Instant]]) -> None:
        """Accept a `step` that fits, or that no plan can make smaller; else have its graphs compiled again.

        Where they can't be compiled again, the step is accepted with a warning. If Dynamo is only busy, a later step is
        planned. `instants` returns those of `trace`, see `instants_of`.
        """
        taken = max(instant.nbytes(lambda version: version.nbytes) for instant in instants(lambda version: version))
        of_graphs = instants(lambda version: version.graph)
        known = trace, of_graphs[-1].gradient_bytes
        versions = dict.fromkeys(trace.calls)
        graphs = list(dict.fromkeys(version.graph for version in versions))
        bounded = all(version.mode is Mode.PLANNED or not version.graph.sizes for version in versions)  # by guards
        kept = [memory for call in step.calls if call.keeps_inputs for memory in call.inputs]
        no_least = all(version.mode is not Mode.LEAST for version in versions)
        planned = all(version.mode is version.graph.mode is Mode.PLANNED for version in versions)
        if taken <= self.peak_bytes and bounded and no_least and not kept:
            self.accepted.append(known)
            self.predicted, self.check = taken, self.check or self.unplanned_check
            if len(self.traces) == 1 and self.has_plan_for(of_graphs):
                for graph in graphs:
                    graph.note_peak(taken)
            self.measure(step)
        elif planned and not kept and self.has_plan_for(of_graphs):
            self.accepted.append(known)  # nothing is tighter, which was a warning when it was compiled
            self.predicted = taken
        else:
            why = next(filter(None, (graph.why_not_again() for graph in graphs)), "")
            if any(graph.compiled_count >= _MOST_COMPILED for graph in graphs):
                why = f"they were, {_MOST_COMPILED} times"
            self.busy = self.busy + 1 if why == dynamo.BUSY else 0
            predicted_ms = sum(call.what.ms for call in step.calls)
            program = f"{self.budget!r} {[graph.digest for graph in graphs]}"
            if not why and "offload" in self.budget.allow and self.time.waits(step.began, predicted_ms, program):
                self.notes_parameters = self.needs_plan = True
                return
            if not why:
                self.why = f"step {self.ended} peaks at {mib(taken)} of {mib(self.peak_bytes)}"
                self.plan(trace, of_graphs, graphs)
            if kept and not 0 < self.busy < _MOST_BUSY:
                self.warn_of_kept(sum(nbytes for call in step.calls for m, nbytes in call.returned if m in kept), why)
            if not why or self.busy:
                self.notes_parameters = self.needs_plan = True  # the next step is checked, or planned
            else:
                self.accepted.append(known)
            if why and not 0 < self.busy < _MOST_BUSY:
                self.warn(taken, step, why)

    def measure(self, step: Step) -> None:
        """Compare what `step` took with the budget, unless calls of it wait for a plan; once it is over, plan less.

        A call that is the whole step is measured where it runs, see `measured.checked`.
        """
        if self.check is None or step.most < 2 or any(call.what.mode is Mode.LEAST for call in step.calls):
            return
        if (excess := self.check.ended(step.allocated, self.predicted)) > 0:
            self.over, self.notes_parameters, self.needs_plan = excess, True, True
            self.accepted.clear()  # the next step is over what is left, and gets another plan

    def has_plan_for(self, instants: Sequence[Instant]) -> bool:
        """Whether the graphs have been planned for a step of these instants.

        It must have had at least as many bytes of gradients, and outputs that free no more than these.
        """

        def calls(instants: Sequence[Instant]) -> list[Any]:
            return [(instant.phase, instant.runs, instant.holding) for instant in instants]

        def takes_as_much(planned: Sequence[Instant]) -> bool:
            freed = all(a.freed_bytes <= b.freed_bytes for a, b in zip(planned, instants, strict=True))
            return freed and planned[-1].gradient_bytes >= instants[-1].gradient_bytes

        found = [each for each in self.traces if calls(each) == calls(instants)]
        return self.planned_peak == self.peak_bytes and any(map(takes_as_much, found))

    def plan(self, trace: Trace, instants: list[Instant], graphs: Sequence[Graph]) -> None:
        """Have the graphs compiled again for a step like `trace`, of these instants."""
        stock = {graph: graph.stock for graph in graphs}
        least = {graph: graph.least or graph.stock for graph in graphs}
        share = shares(instants, least, stock, self.peak_bytes)
        if share < 1 and (unknown := [graph for graph in graphs if graph.least is None]):
            for graph in unknown:
                graph.compile_again(Mode.LEAST)
            return
        if share < 0 and not self.accumulates and not self.awaits_gradients:
            self.awaits_gradients = any(instant.gradient_bytes for instant in instants)
            if self.awaits_gradients:  # the first step makes them; whether each does, the next one shows
                return
        if share < 0 and not self.counted:
            # What holds the least may take much while it runs: which is right depends on the number of calls.
            self.counted, self.traces = True, latest([*self.traces, instants], 1)
            for graph in graphs:
                graph.compile_again(Mode.LEAST)
            return
        self.traces, self.planned_peak = latest([*self.traces, instants], _MOST_TRACES), self.peak_bytes
        is_nested = trace.is_nested(lambda version: version.graph)
        for graph in graphs:
            graph.share, graph.is_fixed = between(least[graph], stock[graph], max(0.0, share)), False
            most = max(instant.holding.get(graph, 0) + (instant.runs is graph) for instant in instants)
            graph.calls, graph.is_nested = max(graph.calls, most), graph.is_nested and is_nested
            graph.compile_again(Mode.PLANNED)

    def warn_of_kept(self, nbytes: int, why: str) -> None:
        again = f"not compiled again: {why}. Lower the peak by that much" if why else "compiled again for that"
        warn_user(
            f"aot_hooks: {self.budget!r}: the program holds what compiled calls return until their backward, as a loss "
            f"of each layer does that is not compiled. The plan has them freed, so a step took {mib(nbytes)} more than "
            f"predicted, at most. Its functions are {again}",
            BudgetWarning,
        )

    def warn(self, taken: int, step: Step, why: str) -> None:
        if taken <= max(self.peak_bytes, _WARNS_AGAIN * self.warned_bytes):
            return
        self.warned_bytes = taken
        warn_user(
            f"aot_hooks: {self.budget!r}: a step with {step.most} compiled calls that hold saved tensors at the same "
            f"time takes {mib(taken)} as predicted, {mib(taken - self.peak_bytes)} more than the budget. Its functions "
            f"are not compiled again: {why}. Give steps the same number of calls, or lower the peak by that much",
            BudgetWarning,
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _with_gradient(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def group_of(rule: Assignment) -> Group | None:
    """All graphs under the budget `rule`; None if its peak is not in bytes."""
    if rule.peak_bytes is None:
        return None
    with _lock:
        budget = replace(rule, over=0)  # a tighter plan of a graph that was the whole step is for the same budget
        group = _groups.setdefault(replace(budget, free=None), Group(budget))
        if rule.free is not None:  # in the middle of a step less is free
            group.budget = replace(group.budget, free=max(rule.free, group.budget.free or 0))
        return group


def graph_of(
    rule: Assignment,
    gm: GraphModule,
    inputs: Sequence[Any],
    sizes: Products,
    program: str = "",
    of_data: Mapping[str, int] = MappingProxyType({}),
) -> Graph | None:
    """The graph `gm` under the budget `rule`; None if its peak is not in bytes.

    Equal graphs are one, but for those with symbolic `sizes` that are too large for its plans, and for those that are
    planned for other sizes `of_data`. The first one of a `program` that has a loaded plan is the graph of that plan.
    """
    if (group := group_of(rule)) is None:
        return None
    inputs_like = [
        (str(x.shape), str(x.stride()), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else type(x)
        for x in (n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder"))
    ]
    training = [x.requires_grad for x in inputs if isinstance(x, torch.Tensor)]
    content = (canonical(gm), inputs_like, training, torch.is_grad_enabled())
    digest = _digest(repr(content))
    with _lock:
        data = group.data.setdefault(digest, DataSizes(of_data, of_data)) if of_data else None
        if data is not None:
            digest = _digest(repr((content, data.planned)))
        group.on_cuda |= any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs)
        restored = None if digest in group.graphs else group.restored.get(program)
        if restored is not None and all(n <= restored.sizes.get(k, 0) for k, n in sizes.items()):
            group.graphs[digest] = group.restored.pop(program)
        is_one_of_many = data is not None and any(
            g.data is data and g.mode is not Mode.ALONE for g in group.graphs.values()
        )
        mode = Mode.LEAST if is_one_of_many else Mode.ALONE  # as it was with other sizes of the data
        graph = group.graphs.setdefault(digest, Graph(group, mode, sizes=sizes))
        if any(n > graph.sizes.get(k, 0) for k, n in sizes.items()):
            headroom, grown = _HEADROOM if graph.grown else 1, graph.grown + 1
            graph = Graph(group, sizes={k: int(headroom * n) for k, n in sizes.items()}, grown=grown)
            group.graphs[digest] = graph
        graph.data = data
        graph.digest, graph.program = _digest(_DEVICE_NUMBER.sub("cuda", repr(content))), program
        return graph


def by_call(loose: Callable[..., Any], tight: Callable[..., Any], version: Version) -> Callable[..., Any]:
    """Two compiled forwards as one: each call runs what `noted` has decided. `version` is that of `loose`, which may be
    the only one."""

    def run(*args: Any) -> Any:
        return (loose if version.graph.group.local.decided is version else tight)(*args)

    return loose if version.tight is None else run


def noted(run: Callable[..., Any], version: Version) -> Callable[..., Any]:
    """`run`, a compiled forward, with its calls noted."""
    group = version.graph.group

    def run_and_note(*args: Any) -> Any:
        if any(isinstance(a, torch.Tensor) and is_traced_value(a) for a in args):  # while DDP's graphs are cut
            return run(*args)
        group.on_forward_start()
        group.local.decided = now = version.for_next_call(group.step)
        outputs = run(*args)
        group.on_forward_end(now, args, outputs)
        return outputs

    return run_and_note


def forget() -> None:
    """Forget all steps."""
    with _lock:
        for group in _groups.values():
            if group.before is not None:
                group.before.close()
        _groups.clear()
