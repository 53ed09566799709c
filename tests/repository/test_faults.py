"""Each fault that once gave wrong numbers, or a wrong warning, has a test that fails where it comes back."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REAL_LAYOUTS = "tests/passes/test_real_layouts.py"
FAULTS = {
    "gradients 0.77 off where batch norm returns other strides than its fake kernel": (
        f"{REAL_LAYOUTS}::test_exact_hooks_change_no_bit"
    ),
    "int4 and offload raised where a view was taken with strides of the trace": (
        f"{REAL_LAYOUTS}::test_rounding_hooks_err_no_more_than_in_eager_code"
    ),
    "offload changed last digits of operators of any kind": f"{REAL_LAYOUTS}::test_views_are_of_what_really_came",
    "values of rfftn took each other's place, where the trace predicts strides that overlap": (
        f"{REAL_LAYOUTS}::test_an_overlap_that_only_the_trace_has_is_none"
    ),
    "a schedule of foreach Adam's rate had other last digits in a whole step on CUDA": (
        "tests/cudagraph/test_whole_step_numbers.py::test_lists_are_divided_by_a_number_as_on_cuda"
    ),
    "angles of rotary embeddings and Fourier features, and step sizes of softplus, were rounded": (
        "tests/graphs/test_angles.py::test_what_no_relative_rounding_bounds_is_left_alone"
    ),
    "a row of reads may claim a bound that it has not": "tests/graphs/test_bounds.py",
    "dropout was drawn anew in the backward under torch's memory budget": (
        "tests/passes/test_repeats.py::test_random_numbers_are_those_of_the_forward_under_torchs_memory_budget"
    ),
    "a buffer written through .data was read again in the backward": (
        "tests/passes/test_repeats.py::test_a_buffer_is_read_as_it_was_in_the_forward"
    ),
    "a saved buffer that is written before the backward, in graph trees": (
        "tests/cudagraph/test_written_saved.py::test_gradients_are_of_what_the_forward_read"
    ),
    "a callable inside the body of a checkpoint entered the cache key by its name": (
        "tests/cache/test_by_name.py::test_what_changes_behind_a_name_is_compiled_again"
    ),
    "a changed byte inside of a cache entry's constant was a hit": (
        "tests/cache/test_damaged.py::test_a_changed_constant_in_an_entry_is_no_hit"
    ),
    "captured blocks of two kinds under a checkpoint read reused memory": (
        "tests/cudagraph/test_checkpointed.py::test_blocks_of_two_kinds"
    ),
    "a meta tensor among the inputs kept a graph from its launch": (
        "tests/cudagraph/test_programs.py::test_a_meta_tensor_among_the_inputs"
    ),
    "copies of weights under autocast were saved and rounded": (
        "tests/passes/test_casts.py::test_a_plan_counts_the_copies_before_and_not_after"
    ),
    "copies of weights stood in the way of a budget": (
        "tests/passes/test_casts.py::test_a_budget_may_compute_products_of_casts_again"
    ),
    "a budget that may round found a higher least than one that may not": (
        "tests/planning/test_more_means.py::test_what_exact_means_reach_is_reached_with_all_means"
    ),
    "a step of convolutions took more than its budget on a CPU": (
        "tests/graphs/test_workspaces.py::test_a_step_of_convolutions_takes_at_most_what_its_plan_says"
    ),
    "dropout's draws took more than a budget counted on a CPU": (
        "tests/graphs/test_workspaces.py::test_other_operators_take_at_most_what_plans_count"
    ),
    "a warning of a changed hook, where only shapes changed": (
        "tests/settings/test_recompiles.py::test_other_sizes_of_an_unchanged_hook_are_no_change"
    ),
    "a policy of the options was dropped in silence beyond Dynamo's recompile limit": (
        "tests/settings/test_recompiles.py::test_a_policy_of_the_options_that_dynamos_limit_drops_is_said_once"
    ),
    "a reset in an open context lost an own hook": (
        "tests/settings/test_recompiles.py::test_a_reset_in_an_open_context_forgets_nothing_of_the_hook"
    ),
    "each plan was kept until a reset": "tests/report/test_dry_run.py::test_no_plan_is_kept",
}


def test_each_fault_has_a_test_that_runs_without_a_gpu() -> None:
    for fault, test in FAULTS.items():
        path, _, name = test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        tests = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")]
        named = [f for f in tests if name in ("", f.name)]
        marks = {ast.unparse(mark).partition("(")[0] for f in named for mark in f.decorator_list}
        assert named, f"{fault}: {path} has no {name}"
        assert not marks & {"pytest.mark.gpu", "pytest.mark.skip", "pytest.mark.skipif"}, f"{fault}: {marks}"
