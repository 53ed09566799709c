"""Saved-tensor hooks as a compiler feature for PyTorch. See the README; the mental model is in docs/."""

from . import errors, policies
from ._version import __version__ as __version__
from .backend import last_plans, reset
from .cache.lookup import cache_stats
from .cache.plan_files import load_plans, save_plans
from .context.entering import saved_tensors_hooks, saved_tensors_policy
from .enabled import disable, enable
from .errors import AotHooksError
from .graphs.saved import SavedTensor
from .graphs.speeds import Rates
from .hook import KEEP, Hook
from .library.bitmask import bitmask
from .library.cast import cast
from .library.float8 import float8
from .library.integer import int4, int8
from .library.lossless import lossless
from .offloading.hook import offload
from .offloading.stats import offload_stats
from .passes.plan import Decision, Plan
from .planning.budget import budget
from .report.dry_run import plan, saved_tensors
from .report.frontier import Frontier, frontier
from .report.gradients import GradientReport, GradientRow, check_gradients
from .report.text import format_report, print_report
from .settings.names import checkpoint_name
from .steps.schedule import Transfer

# Hooks, policies and contexts.
__all__ = ["KEEP", "Hook", "bitmask", "budget", "cast", "float8", "int4", "int8", "lossless", "offload", "policies"]
__all__ += ["checkpoint_name", "disable", "enable", "saved_tensors_hooks", "saved_tensors_policy"]
# Plans and reports.
__all__ += ["Decision", "Plan", "Rates", "SavedTensor", "Transfer", "last_plans", "plan", "saved_tensors"]
__all__ += ["Frontier", "GradientReport", "GradientRow", "check_gradients", "format_report", "frontier", "print_report"]
# The state of the process, and its files.
__all__ += ["AotHooksError", "cache_stats", "errors", "load_plans", "offload_stats", "reset", "save_plans"]
