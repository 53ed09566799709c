"""What a user is told of steps of many compiled calls under a budget."""

from __future__ import annotations

from ..errors import BudgetWarning, warn_user
from .budget import Budget

_MIB = 1 << 20


def kept(budget: Budget, count: int, nbytes: int, since: int) -> None:
    """`count` calls hold `nbytes` of saved tensors, and `since` calls have run after the first of them."""
    warn_user(
        f"aot_hooks: {budget!r}: {count} compiled calls hold {nbytes / _MIB:.1f} MiB of saved tensors, and {since} "
        "calls have run since the first of them. A step ends where nothing is saved, so none could be planned or "
        "checked. Such calls are left out from now on, and what they hold comes on top of the budget. Is the output of "
        "an evaluation kept? Compute it under torch.no_grad(), or keep output.detach()",
        BudgetWarning,
    )


def retained(budget: Budget, nbytes: int) -> None:
    """A backward is about to run with `retain_graph=True`; with all that it keeps, another one takes `nbytes`."""
    warn_user(
        f"aot_hooks: {budget!r}: a backward with retain_graph=True keeps what compiled calls have saved. A plan counts "
        f"it as released: a second backward may take {nbytes / _MIB:.1f} MiB, and gradients. Sum the losses and run "
        "one backward, or lower the peak",
        BudgetWarning,
    )


def over(budget: Budget, calls: int, nbytes: int, excess: int, why: str) -> None:
    """A step in which `calls` hold saved tensors at the same time takes `nbytes` as predicted, `excess` too many."""
    warn_user(
        f"aot_hooks: {budget!r}: a step with {calls} compiled calls that hold saved tensors at the same time takes "
        f"{nbytes / _MIB:.1f} MiB as predicted, {excess / _MIB:.1f} MiB more than the budget. Its functions are not "
        f"compiled again for it: {why}. Give steps the same number of calls, or lower the peak by that much",
        BudgetWarning,
    )
