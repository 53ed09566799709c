"""Saved-tensor hooks as a compiler feature for PyTorch. See the README; the mental model is in docs/."""

from . import errors, policies
from ._version import __version__ as __version__
from .backend import last_plans, reset
from .cache.lookup import cache_stats
from .context import saved_tensors_hooks, saved_tensors_policy
from .errors import AotHooksError
from .graphs.roofline import Rates
from .graphs.saved import SavedTensor
from .hook import KEEP, Hook
from .library import bitmask, cast, float8, int4, int8
from .library.lossless import lossless
from .offloading.hook import offload
from .offloading.schedule import Transfer
from .offloading.transfers import offload_stats
from .passes.plan import Decision, Plan
from .report.dry_run import plan, saved_tensors
from .report.gradients import GradientReport, GradientRow, check_gradients
from .report.text import format_report, print_report
from .settings.names import checkpoint_name

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
