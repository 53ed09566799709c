"""conftest.py catches what it is there to catch: a file of tests runs under it in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

CONFTEST = Path(__file__).parents[1] / "conftest.py"
FAST = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # which imports Hypothesis anew in each run

TESTS = """
import logging, os
import pytest, torch

hooks = torch.autograd.graph.saved_tensors_hooks

def test_clean(): pass

def test_leaves_hooks(): hooks(lambda x: x, lambda x: x).__enter__()

def test_after_hooks(): pass

def test_disables_hooks(): torch._C._autograd._saved_tensors_hooks_disable("off for now")

def test_after_disabling():
    with hooks(lambda x: x, lambda x: x): pass

@pytest.mark.parametrize("n", range(2))
def test_seed(n):
    assert torch.initial_seed() == 0
    torch.manual_seed(1)

@pytest.mark.gpu
def test_on_gpu(): assert False

def test_graphs_are_printed_for_nobody():
    assert not logging.getLogger("torch.__trace").handlers

def test_guards_are_not_timed():
    assert torch._dynamo.guards.profile_guard_manager(None, {}, 1) == 0.0

def test_cache():
    cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    print("cache at", cache, os.path.isdir(cache))
"""


def test_what_is_left_behind_fails_the_test_that_left_it(pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers = gpu")
    pytester.makepyfile(TESTS)

    result = pytester.runpytest_subprocess("-rA", "-p", "no:cacheprovider", "-p", "no:xdist")

    result.assert_outcomes(passed=10, errors=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*AssertionError: saved-tensor hooks left on autograd's stack*",
            "*AssertionError: saved-tensor hooks left disabled: 'off for now'*",
            "ERROR *::test_leaves_hooks*",
            "ERROR *::test_disables_hooks*",
        ]
    )
    (cache,) = [line.split() for line in result.outlines if line.startswith("cache at")]
    assert cache[3] == "True"
    assert not os.path.exists(cache[2])  # it went with the run


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "commit", "-q", "--allow-empty", "-m", "one more")


SLOW = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("n", range(9))
def test_slow(n): print("case slow", n)

def test_quick(): print("case quick")
"""


EVERYTHING = {"test_quick", *(f"test_slow[{n}]" for n in range(9))}


@pytest.fixture
def checkout(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of two commits with slow tests in two folders, one of them tests/repository."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    slow")
    pytester.makepyfile(**{"tests/passes/test_one": SLOW, "tests/repository/test_two": SLOW})
    git(pytester.path, "init", "-q", "-b", "main")
    commit(pytester.path)
    commit(pytester.path)
    return pytester.path


Cases = tuple[str, set[str], set[str]]  # the line of the header, what is chosen of test_one.py and of test_two.py


def chosen_by_commit(pytester: pytest.Pytester, *arguments: str) -> Cases:
    result = pytester.runpytest_inprocess(
        *FAST, "-p", "no:xdist", "--slow-share", "by-commit", "--collect-only", *arguments
    )
    assert result.ret == 0
    (line,) = [line for line in result.outlines if line.startswith("slow tests:")]
    files = re.split(r"<Module (test_\w+)\.py>", str(result.stdout))
    found = dict(zip(files[1::2], (set(re.findall(r"<Function (.*)>", text)) for text in files[2::2]), strict=True))
    return line, found.get("test_one", set()), found.get("test_two", set())


def test_three_commits_in_a_row_run_each_slow_test_once(pytester: pytest.Pytester, checkout: Path) -> None:
    slow: list[str] = []
    for number, share in ((2, 3), (3, 1), (4, 2)):
        line, one, two = chosen_by_commit(pytester)
        expected = f"slow tests: share {share} of 3, and all of tests/repository/: it is the turn of commit {number}"
        assert line == expected and two == EVERYTHING and "test_quick" in one
        slow += one - {"test_quick"}
        commit(checkout)
    assert sorted(slow) == sorted(EVERYTHING - {"test_quick"})


def test_workers_run_the_share_that_the_controller_found(pytester: pytest.Pytester, checkout: Path) -> None:
    _, one, two = chosen_by_commit(pytester)
    result = pytester.runpytest_inprocess(*FAST, "-n", "1", "--slow-share", "by-commit")
    result.assert_outcomes(passed=len(one) + len(two))
    result.stdout.fnmatch_lines(["slow tests: share 3 of 3, *"])


def test_a_share_is_taken_of_what_markers_and_names_leave(pytester: pytest.Pytester, checkout: Path) -> None:
    _, share, _ = chosen_by_commit(pytester)
    assert chosen_by_commit(pytester, "-m", "not slow")[1:] == ({"test_quick"}, {"test_quick"})
    assert chosen_by_commit(pytester, "-k", "test_one")[1:] == (share, set())
    assert chosen_by_commit(pytester, "tests/passes")[1:] == (share, set())
    everything = pytester.runpytest_inprocess(*FAST, "-p", "no:xdist", "--collect-only")
    everything.stdout.fnmatch_lines(["slow tests: all", "*20 tests collected*"])


def test_two_torches_take_the_halves_of_quick_tests_in_turn(pytester: pytest.Pytester, checkout: Path) -> None:
    (checkout / "tests/passes/test_one.py").write_text(SLOW.replace("@pytest.mark.slow", ""))
    everything, seen = EVERYTHING, []
    for _ in range(2):
        halves = []
        for torch_ in ("newest", "oldest"):
            half, two = chosen_by_commit(pytester, "--half", torch_)[1:]
            assert 0 < len(half) < len(everything) and two == EVERYTHING  # tests/repository is never thinned
            halves.append(half)
        assert halves[0] | halves[1] == everything and not halves[0] & halves[1]
        seen.append(halves)
        commit(checkout)
    assert seen[0] == seen[1][::-1]


def test_no_half_is_left_out_where_commits_cannot_be_counted(conftest: Any, tmp_path: Path) -> None:
    assert conftest.half_by_commit(tmp_path, "newest") == conftest.half_by_commit(tmp_path, "oldest") == "all"


def test_a_merge_counts_as_one_commit(conftest: Any, checkout: Path) -> None:
    assert conftest.share_by_commit(checkout) == ("3", "it is the turn of commit 2")
    git(checkout, "checkout", "-q", "-b", "side")
    for _ in range(2):
        commit(checkout)
    git(checkout, "checkout", "-q", "main")
    git(checkout, "merge", "-q", "--no-ff", "-m", "merge", "side")
    assert conftest.share_by_commit(checkout) == ("1", "it is the turn of commit 3")
    (checkout / "not_committed.py").write_text("")
    assert conftest.share_by_commit(checkout) == ("1", "it is the turn of commit 3")


def test_all_shares_run_where_commits_cannot_be_counted(
    conftest: Any, checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    git(other, "clone", "-q", "--depth", "1", f"file://{checkout}", "shallow")
    assert conftest.share_by_commit(other / "shallow") == ("all", "a shallow clone can't count its commits")
    share, why = conftest.share_by_commit(other)
    assert share == "all" and "not a git repository" in why
    assert conftest.share_by_commit(checkout / "tests") == ("all", "this folder is no checkout of its own")
    git(other, "init", "-q")
    assert conftest.share_by_commit(other)[0] == "all"  # a checkout without a commit
    monkeypatch.setenv("PATH", "")
    share, why = conftest.share_by_commit(checkout)
    assert share == "all" and "git" in why


def test_a_test_that_is_added_moves_no_other(conftest: Any) -> None:
    """A share follows from the name: what it is today, so that no change of the rule goes unseen."""
    names = [f"tests/passes/test_live.py::test_{n}" for n in range(300)]
    sizes = Counter(map(conftest.share_of, names))
    assert sizes.keys() == {1, 2, 3} and min(sizes.values()) > 80
    assert [conftest.share_of(name) for name in names[:8]] == [2, 1, 1, 2, 1, 2, 2, 3]


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    return request.config.pluginmanager.get_plugin(str(CONFTEST))


def test_gpu_test_is_not_skipped_with_a_device(conftest, monkeypatch):
    item = SimpleNamespace(get_closest_marker={"gpu": pytest.mark.gpu}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    conftest.pytest_runtest_setup(item)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.skip.Exception, match="needs a CUDA device"):
        conftest.pytest_runtest_setup(item)
