"""What holds for every test: a fresh Dynamo, a fixed seed, no saved-tensor hook left behind, no code compiled before.

`gpu` tests skip where there is no CUDA device. `--slow-share by-commit` runs a third of the slow tests, with each
commit another. `--half newest` and `--half oldest` run a half of the tests that are not slow, for the torches beside
the main one: what one of them leaves out the other runs, and with the next commit they change halves.

    commit     ... 1201     1202     1203     1204 ...
    share             2        3        1        2        three commits in a row run all slow tests
    newest            b        a        b        a        each test runs on one of the two torches with each commit,
    oldest            a        b        a        b        and on both within two commits

test_conftest.py shows that what is checked here can fail.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
VECTORS_WORK = "TORCHINDUCTOR_VEC_ISA_OK"
WHY_SHARE = pytest.StashKey[str]()


SHARES = 3
HALVES = ("newest", "oldest")
NEVER_THINNED = "tests/repository/"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-share",
        default="all",
        choices=["all", "by-commit", *map(str, range(1, SHARES + 1))],
        help="which of the slow tests run: all, one share of three, or the share whose turn it is at this commit",
    )
    parser.addoption(
        "--half",
        default="all",
        choices=["all", *HALVES, "0", "1"],
        help="which half of the tests that are not slow runs: that of the newest torch or of the oldest at this commit",
    )


def share_of(nodeid: str) -> int:
    """The share of a slow test. It follows from its name alone, so a test that is added moves no other."""
    return zlib.crc32(nodeid.encode()) % SHARES + 1


def half_of(nodeid: str) -> int:
    return zlib.crc32(nodeid.encode()) % len(HALVES)


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit_count(root: Path) -> tuple[int | None, str]:
    """The number of the commit, or None and why commits can't be counted: then no later run has what is left out.

    Counted are the commits of the main line: a merge is one, whatever it brings. What is not committed does not count.
    """
    try:
        if Path(git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None, "this folder is no checkout of its own"
        if git(root, "rev-parse", "--is-shallow-repository") != "false":
            return None, "a shallow clone can't count its commits"
        number = int(git(root, "rev-list", "--count", "--first-parent", "HEAD"))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        return None, f"git can't count commits here: {reason}"
    return number, f"it is the turn of commit {number}"


def share_by_commit(root: Path) -> tuple[str, str]:
    """The share whose turn it is, and why. All of them where commits can't be counted."""
    number, why = commit_count(root)
    return ("all" if number is None else str(number % SHARES + 1)), why


def half_by_commit(root: Path, torch: str) -> str:
    """The half that runs on the "newest" or the "oldest" torch now. All where commits can't be counted."""
    number, _ = commit_count(root)
    return "all" if number is None else str((number + HALVES.index(torch)) % len(HALVES))


def pytest_report_header(config: pytest.Config) -> list[str]:
    share, half = config.getoption("--slow-share"), config.getoption("--half")
    which = "all" if share == "all" else f"share {share} of {SHARES}, and all of {NEVER_THINNED}"
    header = [f"slow tests: {which}{config.stash.get(WHY_SHARE, '')}"]
    if half != "all":
        header.append(f"other tests: half {half}, and all of {NEVER_THINNED}")
    return header


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`: of what these leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, half = config.getoption("--slow-share"), config.getoption("--half")

    def runs(item: pytest.Item) -> bool:
        if item.nodeid.startswith(NEVER_THINNED):
            return True
        if item.get_closest_marker("slow") is not None:
            return share in ("all", str(share_of(item.nodeid)))
        return half in ("all", str(half_of(item.nodeid)))

    left = [item for item in items if not runs(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def pytest_configure(config: pytest.Config) -> None:
    if config.option.slow_share == "by-commit":  # workers get the share that is found here
        config.option.slow_share, why = share_by_commit(config.rootpath)
        config.stash[WHY_SHARE] = f": {why}"
    if config.option.half in HALVES:
        config.option.half = half_by_commit(config.rootpath, config.option.half)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers are the parallelism
    # Inductor compiles a program for each instruction set of the processor, to see whether the compiler knows it, too:
    # 11.5 s of processor time for each new cache directory, which many a test has for itself.
    os.environ.setdefault(VECTORS_WORK, "1")
    # What an older checkout compiled must not answer for this one. Workers get the controller's choice by environment;
    # to keep a cache between runs, set the variable yourself.
    if INDUCTOR_CACHE not in os.environ:
        cache_dir = tempfile.mkdtemp(prefix="aot-hooks-tests-")
        os.environ[INDUCTOR_CACHE] = cache_dir

        def remove_cache() -> None:
            shutil.rmtree(cache_dir, ignore_errors=True)
            del os.environ[INDUCTOR_CACHE]

        config.add_cleanup(remove_cache)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def take_left_hooks() -> list[object]:
    """Pop every saved-tensor hook pair off autograd's stack, innermost first, and return them."""
    left = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        left.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return left


def matmul_precision() -> tuple[str, str, str]:
    """What `torch.set_float32_matmul_precision` sets: its own value, and those of two backends that start as "none".

    torch refuses to read its own value after a backend was set beside it, as transformers does with a GPU: "mixed".
    """
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = "mixed"
    return precision, torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def set_matmul_precision(precision: tuple[str, str, str]) -> None:
    torch.set_float32_matmul_precision(precision[0])
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = precision[1:]


@pytest.fixture(autouse=True, scope="session")
def quick_torch() -> None:
    """Two things of torch's that nobody reads here took a third of the time of a test that compiles a small function.

    Dynamo times the guards of each function, and empties the processor's cache for that: 27 ms. And torch prints each
    graph for its structured trace while that has a handler; pytest gives one to every logger that does not propagate.
    """
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    if "TORCH_TRACE" not in os.environ:
        trace = logging.getLogger("torch.__trace")
        trace.handlers.clear()
        trace.propagate = True


@pytest.fixture(autouse=True, scope="module")
def young_heap(quick_torch: None) -> None:
    """Let collections look only at what the tests of this file make: torch's own objects take 0.5 s each time.

    What the file before left is collected first: garbage that is frozen stays, and what it holds is never seen to die.
    What was alive before it stays frozen, else each of 200 files would take these 0.5 s.
    """
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_torch() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    precision = matmul_precision()
    yield
    # It is in the keys of torch's caches: a test that leaves another makes what other processes stored a miss.
    if matmul_precision() != precision:
        set_matmul_precision(precision)
    # Popped before the assertion: a leak fails the test that made it, not those after it.
    left = take_left_hooks()
    assert not left, f"saved-tensor hooks left on autograd's stack, innermost first: {left}"
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if disabled is not None:
        torch._C._autograd._saved_tensors_hooks_enable()
    assert disabled is None, f"saved-tensor hooks left disabled: {disabled!r}"


@pytest.fixture
def model() -> torch.nn.Module:
    """A model of exact integer arithmetic, whose gradients with a lossy hook can be computed by hand."""
    from sentinel import Chain  # late: test_conftest.py runs this file where no helpers are

    return Chain(3, 5, 4, 2)


@pytest.fixture
def x() -> torch.Tensor:
    from sentinel import integers

    return integers(6, 3).requires_grad_()


@pytest.fixture
def the_next_hook_is_unaffected(model: torch.nn.Module, x: torch.Tensor) -> Iterator[None]:
    """For tests of errors: afterwards nothing is left of the hook that raised, and the next one works."""
    from sentinel import assert_same, compiled, gradients, hand_gradients, quadruple

    from aot_hooks import saved_tensors_hooks

    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    torch._dynamo.reset()
    with saved_tensors_hooks(*quadruple):
        assert_same(gradients(compiled(model), model, x), hand_gradients(model, x, h=4))
        assert_same(gradients(model, model, x), hand_gradients(model, x, h=4))


@pytest.fixture(params=["compiled", "eager"])
def wrap(request: pytest.FixtureRequest) -> Any:
    """What a test gives its function to: hooks mean the same either way."""
    import sentinel

    return getattr(sentinel, request.param)


@pytest.fixture(params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What the tests of CUDA graph trees run on, the same on both; without trees and marks of tests before."""
    from tree_programs import World

    from cudagraph.tree import dispatch

    # The device's tree outlives a test. Dynamo keeps what it compiles of a module's functions, after its reset too.
    for tree in (tree for trees in dispatch.every_thread for tree in trees.values()):
        tree.functions.clear()
    dispatch.reset()
    yield World(request.param)
    dispatch.reset()


@pytest.fixture
def stock_is_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions for torch's own backend "inductor" run as AOTAutograd makes them: generating code takes long."""
    from aot_hooks.partitioner import partition_without_hooks
    from aot_hooks.torch_private.aot import compile_graph

    def aten(self: Any, gm: Any, inputs: Any, **_: Any) -> Any:
        return compile_graph(gm, inputs, partition_without_hooks)

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", aten)
