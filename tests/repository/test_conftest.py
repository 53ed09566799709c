"""conftest.py catches what it is there to catch: a file of tests runs under it in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

CONFTEST = Path(__file__).parents[1] / "conftest.py"

TESTS = """
import os
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

    result.assert_outcomes(passed=8, errors=2, skipped=1)
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


def test_every_third_case_of_those_that_markers_leave(pytester, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    slow")
    pytester.makepyfile("""
import pytest

slow, gpu = pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.gpu)

@pytest.mark.parametrize("n", [slow, 1, gpu, *range(3, 9)])
def test_many(n): print("case", n)

def test_one(): print("case of none")
""")

    result = pytester.runpytest_subprocess("-rA", "-p", "no:xdist", "-m", "not slow", "--every", "3")

    assert [line for line in result.outlines if line.startswith("case")] == [
        "case 1",
        "case 5",
        "case 8",
        "case of none",
    ]
    result.assert_outcomes(passed=4, deselected=6)


def test_gpu_test_is_not_skipped_with_a_device(monkeypatch, request):
    conftest = request.config.pluginmanager.get_plugin(str(CONFTEST))
    item = SimpleNamespace(get_closest_marker={"gpu": pytest.mark.gpu}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    conftest.pytest_runtest_setup(item)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.skip.Exception, match="needs a CUDA device"):
        conftest.pytest_runtest_setup(item)
