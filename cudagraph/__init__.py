"""CUDA graph trees for compiled functions, with a small host cost for each call.

torch.compile(f, backend="cudagraph_tree", options={...})
torch._inductor.config.cudagraph_policy = cudagraph.Policy()    # torch 2.13 and later, for Inductor's own users
"""

from typing import TYPE_CHECKING, Any

from .backend import cudagraph_tree, reset
from .counters import stats
from .errors import (
    CudaGraphError,
    NotCapturableError,
    OptionError,
    RanksError,
    StaleOutputError,
    UnsupportedTorchError,
)
from .explain import ExplainedPart, Explanation, explain
from .graph.blockers import Blocker, register_host_operator
from .options import Options
from .placeholder import PlaceholderInfo, placeholder_info
from .step.decorator import whole_step
from .step.waits import StepExplanation, Wait
from .tree.capture import Capture, capturing
from .tree.dispatch import mark_step_begin

if TYPE_CHECKING:
    from .compile.inductor_policy import Policy

# What users call.
__all__ = ["Options", "Policy", "cudagraph_tree", "explain", "mark_step_begin", "reset", "stats", "whole_step"]
__all__ += ["Capture", "capturing", "placeholder_info", "register_host_operator"]
# What they get.
__all__ += ["Blocker", "ExplainedPart", "Explanation", "PlaceholderInfo", "StepExplanation", "Wait"]
__all__ += ["CudaGraphError", "NotCapturableError", "OptionError", "RanksError", "StaleOutputError"]
__all__ += ["UnsupportedTorchError"]


def __getattr__(name: str) -> Any:
    if name == "Policy":  # imported late: it derives from a class of Inductor's, which takes seconds to import
        from .compile.inductor_policy import Policy

        return Policy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
