"""Accumulators: the nodes of autograd that add gradients to leaves. A capture needs ones that are made in it.

    w --> graph of a forward --> loss       the graph holds the accumulator of w, and w knows it as long as it lives
    loss.backward()                         runs the accumulator on the stream that it was made on

A leaf has one accumulator, which lives as long as a graph holds it; after that the next forward makes a new one. It
runs on the stream that it was made on, also in a backward on another stream. So one of the default stream breaks a
capture: the default stream would have to wait for a stream that captures. A program holds an old accumulator where it
keeps the loss of a step in eager mode, and DistributedDataParallel holds those of all its parameters.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..torch_private import cuda as torch_cuda
from ..torch_private.distributed import reduced_parameters, replicas_in, with_local_part
from ..tree.capture import CannotCapture

MARK = "cudagraph"  # in the metadata of a node, which live as long as the node in C++


def node_of(x: torch.Tensor) -> Any:
    """The accumulator of the leaf `x`: the one that it has, or else a new one."""
    return get_gradient_edge(x).node


def is_alive(x: torch.Tensor) -> bool:
    """Whether something holds the accumulator of the leaf `x`."""
    if not x.requires_grad:
        return False
    node_of(x).metadata[MARK] = True  # gone with the node, if nothing else holds it
    return bool(node_of(x).metadata.pop(MARK, False))


def is_referenced(x: torch.Tensor) -> bool:
    """Whether Python code has hooks on the accumulator of the leaf `x`, or a reference to it.

    A new accumulator would lack them. Hooks on `x` itself are no reason: any accumulator of `x` runs them.
    """
    if not is_alive(x):
        return False
    with torch.enable_grad():  # from torch 2.13 on, a node that is alive holds its Python object
        other = torch.empty(0, requires_grad=True)
        graph = other.clone()
    unheld = _references(other)
    del graph
    if _references(x) > unheld:
        gc.collect()  # the reference may be garbage
        if _references(x) > unheld:
            return True
    node = node_of(x)
    return _has_hooks(node.register_hook) or _has_hooks(node.register_prehook)


def _references(x: torch.Tensor) -> int:
    node = node_of(x)
    return sys.getrefcount(node)


def _has_hooks(register: Any) -> bool:
    """Whether a node has hooks of the kind that `register` registers."""
    handle = register(lambda *_: None)
    every = handle.hooks_dict_ref()  # all hooks of this kind, with the one just registered
    handle.remove()
    return len(every) > 0


def renew(x: torch.Tensor) -> None:
    """Have the leaf `x` forget its accumulator: the next forward makes a new one, on the stream of that time.

    Torch makes a leaf forget it where its data get another dtype. Here they get their own back at once: memory,
    version, `grad` and hooks of `x` are as before. A backward of a graph that holds the old one still adds to `x.grad`,
    but such a graph does not know `x` as an input of `torch.autograd.grad` any more.
    """
    data = x.data
    other = torch.float16 if x.dtype != torch.float16 else torch.float32
    empty = with_local_part(x, torch.empty(0, dtype=other, device=x.device))
    with torch_cuda.without_functions():  # under a mode an assignment runs Python code, which may be interrupted
        try:
            x.data = empty
        finally:
            x.data = data


def renew_for_capture(leaves: Mapping[str, torch.Tensor], objects: Collection[Any]) -> None:
    """Have the `leaves` of a step, by their paths, forget accumulators from before its capture.

    Those of replicated models among `objects` stay: their reducers have hooks on them, and were made anew on the stream
    of captures. Raises `CannotCapture` if somebody else has hooks on one.
    """
    replicas = replicas_in(objects)
    replicated = {id(x) for model in replicas for x in reduced_parameters(model)}
    old = {path: x for path, x in leaves.items() if id(x) not in replicated and is_alive(x)}
    if not old:
        return
    for path, x in old.items():
        if is_referenced(x):
            raise CannotCapture(why_referenced(path))
    if reason := why_shared(old, replicas):
        raise CannotCapture(reason)
    for x in old.values():
        renew(x)


def why_referenced(path: str) -> str:
    return (
        f"somebody has a hook on, or a reference to, the node of autograd that accumulates the gradient of {path}; "
        "a capture needs a new one. Use register_post_accumulate_grad_hook or register_hook of the tensor"
    )


def why_shared(leaves: Mapping[str, torch.Tensor], known: Collection[Any]) -> str | None:
    """Why the accumulators of `leaves` must stay: a replicated model that is not among `known` has hooks on them."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    for model in _other_replicas(known):
        theirs = {id(x) for x in model.parameters()}
        if shared := [path for path, x in leaves.items() if id(x) in theirs]:
            return f"{shared[0]} is a parameter of another DistributedDataParallel, which the step does not use"
    return None


def _other_replicas(known: Collection[Any]) -> list[torch.nn.parallel.DistributedDataParallel]:
    """Replicated models that are not among `known`. They have hooks on accumulators that only C++ sees."""
    ours, kind = set(map(id, known)), torch.nn.parallel.DistributedDataParallel
    is_frozen = gc.get_freeze_count() > 0  # then `get_objects` leaves out what was there before
    if is_frozen:
        gc.unfreeze()
    try:
        return [x for x in gc.get_objects() if issubclass(type(x), kind) and id(x) not in ours]
    finally:
        if is_frozen:
            gc.collect()  # what is garbage now would stay for ever
            gc.freeze()
