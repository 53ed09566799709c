"""What the package raises: `AotHooksError` and its children.

A message has four parts: what was expected, what came, where (the hook, the saved tensor, the user's line) and the
way out. Dynamo wraps what a backend raises in `BackendCompilerFailed`; ours is its `inner_exception` and `__cause__`.
"""

from __future__ import annotations

__all__ = [
    "AotHooksError",
    "CacheWarning",
    "HookContractError",
    "HookTraceError",
    "OptionError",
    "PolicyError",
    "RecompileWarning",
    "UnsupportedGraphError",
    "UnsupportedTorchError",
]


class AotHooksError(Exception):
    """Base of all errors of this package."""


class OptionError(AotHooksError, ValueError):
    """An unknown or ill-typed option, scope, mode or argument."""


class HookContractError(AotHooksError, RuntimeError):
    """A hook broke its contract: pack mutated its input, packed into nothing, read a value, had a side effect or hidden
    state; unpack did not give back the saved tensor's shape, dtype and device."""


class HookTraceError(AotHooksError, RuntimeError):
    """A hook raised, or did something that cannot be traced, while it was traced on a saved tensor."""


class PolicyError(AotHooksError, RuntimeError):
    """A policy raised, or answered with something that is not a `Hook`."""


class UnsupportedGraphError(AotHooksError, RuntimeError):
    """The forward and backward graphs have a form that this package does not know how to rewrite."""


class UnsupportedTorchError(AotHooksError, RuntimeError):
    """This torch lacks a symbol the package stands on."""


class CacheWarning(UserWarning):
    """A compiled graph cannot be cached, or a stored one cannot be used; what it computes is not affected."""


class RecompileWarning(UserWarning):
    """A hook or policy holds what changes from step to step, so that each step compiles."""
