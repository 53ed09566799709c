"""Known ways to break the code, each of which the tests of `make test` notice. `make mutations` shows it.

    a copy of the tree --named tests--> they pass
    one text replaced  --named tests--> they fail                  for each mutation, one after another
    the text put back

A mutation whose text is not in its file exactly once ends the script before any test runs: the code has changed, so the
mutation has to change as well. The named tests are not slow, so that each run of `make test` has them.

    python tests/support/mutations.py                all mutations
    python tests/support/mutations.py host float8    those whose name has one of these words
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("aot_hooks", "cudagraph", "tests", "pyproject.toml")
HOST = "cudagraph/step/host.py"
HOST_TESTS = ("tests/cudagraph/test_whole_step_host.py",)


class Mutation(NamedTuple):
    name: str  # what is broken; CONTRIBUTING.md lists it
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # for pytest; at least one of them must fail


def deleted(name: str, comparison: str) -> Mutation:
    """The deletion of one comparison of `HostState.unchanged`."""
    return Mutation(f"host state: {name} not compared", HOST, comparison, "", HOST_TESTS)


MUTATIONS = (
    Mutation(
        "a private part of torch in a pass",
        "aot_hooks/passes/inline.py",
        "from .units import Packing, Unit, leaf_bytes_of\n",
        "from .units import Packing, Unit, leaf_bytes_of\n\n_tracing = torch._C._get_tracing_state\n",
        ("tests/repository/test_private_torch.py",),
    ),
    Mutation(
        "the backward of ReLU is asked whether a number is below zero, not whether it is at most zero",
        "aot_hooks/graphs/read_tables.py",
        '"aten.threshold_backward.default": (1, lambda g, x, c: (Test("le", (c,)),)),',
        '"aten.threshold_backward.default": (1, lambda g, x, c: (Test("lt", (c,)),)),',
        ("tests/graphs/test_backward_reads.py::test_answers_decide_the_result_bit_by_bit",),
    ),
    Mutation(
        "a permuted tensor comes back in the order in which it was packed",
        "aot_hooks/graphs/layout.py",
        "return y.permute(sorted(range(len(permutation)), key=lambda d: permutation[d]))",
        "return y.permute(*permutation)",
        ("tests/graphs/test_layout.py",),
    ),
    Mutation(
        "inputs and outputs of a graph are packed in the narrowest scope",
        "aot_hooks/settings/setting.py",
        '    if scope == "donated" and (saved.is_input or saved.is_output):\n',
        "    if False:\n",
        ("tests/settings/test_context.py::test_an_output_is_packed_in_the_wider_scopes_only",),
    ),
    Mutation(
        "the program of a region is no part of the cache key",
        "aot_hooks/cache/key.py",
        'lines.append((f"region of node {i}", str(numbers[key])))',
        "pass",
        ("tests/cache/test_cache_key.py::test_what_changes_the_result_changes_the_key",),
    ),
    Mutation(
        "a hook that traces to another program is taken from the cache",
        "aot_hooks/cache/entry.py",
        "        if row.traces_to != traces_to:\n",
        "        if False:\n",
        ("tests/cache/test_stored.py::test_a_hook_that_depends_on_something_outside_is_refused",),
    ),
    Mutation(
        "a scale of float8 twice as small",
        "aot_hooks/library/scales.py",
        "    return _as_bits(smallest) + (above_one & EXPONENT_MASK), EXPONENT_STEP - 1 - above_one\n",
        "    return _as_bits(smallest) + (above_one & EXPONENT_MASK), -1 - above_one\n",
        ("tests/library/test_float8.py::test_finite_values_keep_the_stated_bound_and_others_come_back",),
    ),
    Mutation(
        "a tensor that stays on the device is not copied before the program writes to it",
        "aot_hooks/offloading/transfers.py",
        "_kept[host.data_ptr()] = x.detach().clone()",
        "_kept[host.data_ptr()] = x.detach()",
        ("tests/offloading/test_offload_values.py::test_what_stays_on_the_device_is_not_written_over_in_place",),
    ),
    Mutation(
        "a saved tensor that was changed in place is read in an eager part",
        "aot_hooks/eager/packing.py",
        "    if tensor._version != value.version:\n",
        "    if False:\n",
        ("tests/eager/test_eager_autograd.py::test_a_kept_tensor_changed_in_place_raises_as_in_stock",),
    ),
    Mutation(
        "a norm in eager code reads rounded numbers with statistics of others",
        "aot_hooks/eager/packing.py",
        "return with_statistics(found, groups, value.statistics[groups]) if groups in value.statistics else found",
        "return found",
        ("tests/passes/test_norm_inputs.py::test_two_norms_and_a_product_of_one_tensor",),
    ),
    Mutation(
        "a budget may round more than max_error",
        "aot_hooks/planning/solver.py",
        "_UNITS * max_error**2 + 1e-9",
        "_UNITS * max_error",
        ("tests/planning/test_solver.py::test_it_finds_what_trying_every_choice_finds",),
    ),
    Mutation(
        "outputs of a recording in the same memory do not count writes together",
        "cudagraph/tree/node.py",
        "made[position] = alias_sharing_versions(made[base], where)",
        "made[position] = tensor_on(made[base].untyped_storage(), where)",
        (
            "tests/cudagraph/test_programs_writes.py::test_a_write_to_an_output_that_a_backward_needs_raises_in_replays_too",
        ),
    ),
    Mutation(
        "a replay does not ask whether the memory that it reuses is held",
        "cudagraph/tree/node.py",
        "            if not self.watch_dead.none_held():\n",
        "            if False:\n",
        ("tests/cudagraph/test_invariants.py::test_it_holds",),
    ),
    Mutation(
        "a forward that waits for its backward does not keep the step going",
        "cudagraph/tree/steps.py",
        "if call.is_marked or not ran or node.waits_for_backward() or torch_cuda.graph_task_id() != -1:",
        "if call.is_marked or not ran or torch_cuda.graph_task_id() != -1:",
        ("tests/cudagraph/test_programs.py::test_two_forwards_in_flight",),
    ),
    deleted(
        "versions of dicts",
        "self._are_full_dicts_as_before()\n            and ",
    ),
    deleted("dicts that were empty", "            and not any(self._empty_dicts)\n"),
    deleted("lengths of lists", "            and [*map(len, self._lists)] == self._lengths\n"),
    deleted("items of lists", "            and all(map(is_, chain.from_iterable(self._lists), self._items))\n"),
    deleted("orders", "            and all(map(is_, chain.from_iterable(self._ordered_dicts), self._keys_in_order))\n"),
    deleted("classes", "            and all(map(is_, map(type, self._objects), self._classes))\n"),
    deleted("attributes", "            and all(map(is_, map(ATTRIBUTES, self._owners), self._attribute_dicts))\n"),
    deleted("hooks", "            and [*map(torch_cuda.gradient_hooks, self._differentiable)] == self._hooks\n"),
    deleted(
        "gradients of spread tensors", "            and [x.requires_grad for x in self._spread] == self._require\n"
    ),
    deleted("parts of spread tensors", "            and all(map(is_, map(local_part, self._spread), self._parts))\n"),
    deleted("views", "            and all(_same(read(), saved) for read, _, saved in self._views)\n"),
    deleted("arrays", "            and [*map(_content, self._arrays)] == self._contents\n"),
    deleted("tensors on the CPU", "            and [x._version for x in self.on_cpu] == self._cpu_versions\n"),
    Mutation(
        "a number by which a step decides is not asked for again",
        "cudagraph/step/numbers.py",
        "self._is_filled, self._holds = False, self.broken_condition() is None",
        "self._is_filled = False",
        ("tests/cudagraph/test_whole_step_numbers.py",),
    ),
    Mutation(
        "a replay of a step does not ask whether gradients in its memory are held",
        "cudagraph/step/gradients.py",
        "        if not self._watch.none_held():\n            self.move_out(driver)\n",
        "",
        ("tests/cudagraph/test_whole_step_functions.py",),
    ),
    Mutation(
        "a replay of a step does not ask where the gradients are that it uses",
        "cudagraph/step/gradients.py",
        "return self._guard(*used) and torch_cuda.pointers_equal(used, self._addresses, self._indices)",
        "return True",
        ("tests/cudagraph/test_whole_step_functions.py",),
    ),
    Mutation(
        "a replay does not set the flags that the step sets",
        "cudagraph/step/recording.py",
        "            container, key = self.host.flags[path]\n            container[key] = value\n",
        "            pass\n",
        ("tests/cudagraph/test_whole_step_functions.py",),
    ),
    Mutation(
        "a scheduler that a step calls is not noticed",
        "cudagraph/step/recording.py",
        "refusing_schedules(host.schedulers)",
        "contextlib.nullcontext()",
        ("tests/cudagraph/test_whole_step_loops.py",),
    ),
    Mutation(
        "nothing stands in for what a step has stored in the step before",
        "cudagraph/step/outputs.py",
        "container[key] = self._covers[path] = torch_cuda.unflatten(wires, spec)",
        "self._covers[path] = torch_cuda.unflatten(wires, spec)",
        ("tests/cudagraph/test_whole_step_outputs.py",),
    ),
)


def not_applicable(mutations: Collection[Mutation], root: Path) -> list[str]:
    """What is wrong with the mutations themselves: their texts, files and tests."""
    wrong = []
    for mutation in mutations:
        source = root / mutation.file
        count = source.read_text(encoding="utf-8").count(mutation.old) if source.exists() else 0
        if count != 1:
            wrong.append(
                f"{mutation.name}: {mutation.file} has this text {count} times, expected once: {mutation.old!r}"
            )
        missing = [test for test in mutation.tests if not (root / test.partition("::")[0]).exists()]
        wrong += [f"{mutation.name}: there is no {test}" for test in missing]
    return wrong


def copy_tree(into: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, into / name)


def run_tests(root: Path, tests: Sequence[str]) -> tuple[int, str]:
    """The exit code of pytest in the copy at `root`, and its last lines."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    environment = os.environ | {"PYTHONPATH": str(root), "HYPOTHESIS_STORAGE_DIRECTORY": str(root / ".hypothesis")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests], cwd=root, env=environment, capture_output=True, text=True
    )
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-30:])


def outcome(root: Path, mutation: Mutation) -> str:
    """Apply `mutation` to the copy at `root`, run its tests, and put the text back. Returns "" if they noticed."""
    source = root / mutation.file
    original = source.read_text(encoding="utf-8")
    source.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
    compiled = Path(importlib.util.cache_from_source(str(source)))
    try:
        compiled.unlink(missing_ok=True)  # Python compares seconds and sizes: a mutation may change neither
        code, text = run_tests(root, mutation.tests)
    finally:
        source.write_text(original, encoding="utf-8")
        compiled.unlink(missing_ok=True)
    if code == 0:
        return "SURVIVED: no test failed"
    if code == 1 and re.search(r"^=* ?.*\b\d+ failed", text, re.MULTILINE):
        return ""
    return f"NO ANSWER: the tests did not run (pytest's exit code {code})\n{text}"


def main(words: Sequence[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    if not chosen:
        print(f"no mutation has one of these words in its name: {', '.join(words)}")
        return 2
    if wrong := not_applicable(MUTATIONS, ROOT):
        print(
            "mutations that do not fit the code any more; mend them in tests/support/mutations.py:", *wrong, sep="\n  "
        )
        return 2
    failed = 0
    with tempfile.TemporaryDirectory(prefix="aot-hooks-mutations-") as folder:
        root = Path(folder).resolve()
        copy_tree(root)
        code, text = run_tests(root, sorted({test for mutation in chosen for test in mutation.tests}))
        if code != 0:
            print(f"the named tests fail without any mutation\n{text}")
            return 2
        for mutation in chosen:
            start = time.monotonic()
            result = outcome(root, mutation)
            failed += bool(result)
            print(f"{time.monotonic() - start:5.0f} s  {mutation.name}: {result or 'noticed'}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} mutations were noticed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
