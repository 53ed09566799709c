"""Saved-tensor hooks as a compiler feature for PyTorch. See the README; the mental model is in docs/."""

from . import errors, policies
from .backend import last_plans, reset
from .cache import cache_stats
from .check_gradients import GradientReport, GradientRow, check_gradients
from .context import saved_tensors_hooks, saved_tensors_policy
from .costs import Rates
from .errors import AotHooksError
from .hook import KEEP, Hook
from .library import bitmask, cast, float8, int4, int8, offload
from .lossless import lossless
from .names import checkpoint_name
from .plan import Decision, Plan
from .planning.dry_run import plan, saved_tensors
from .report import format_report, print_report
from .saved import SavedTensor
from .schedule import Transfer
from .transfers import offload_stats

__version__ = "0.1.0"

__all__ = [
    "KEEP",
    "AotHooksError",
    "Decision",
    "GradientReport",
    "GradientRow",
    "Hook",
    "Plan",
    "Rates",
    "SavedTensor",
    "Transfer",
    "bitmask",
    "cache_stats",
    "cast",
    "check_gradients",
    "checkpoint_name",
    "errors",
    "float8",
    "format_report",
    "int4",
    "int8",
    "last_plans",
    "lossless",
    "offload",
    "offload_stats",
    "plan",
    "policies",
    "print_report",
    "reset",
    "saved_tensors",
    "saved_tensors_hooks",
    "saved_tensors_policy",
]
