"""What is built of a checkout: a wheel with all of both packages, a source distribution that can be tested."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("aot_hooks", "cudagraph")
NEEDED = ("tests", "examples", "docs", "benchmarks", "constraints", *PACKAGES)  # folders
FILES = (
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
    "MANIFEST.in",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Files in each, built by the setuptools that is installed: no package index is asked."""
    source = tmp_path_factory.mktemp("source")
    for name in NEEDED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    (sdist,), (wheel,) = (source / "dist").glob("*.tar.gz"), (source / "dist").glob("*.whl")
    with tarfile.open(sdist) as tar:
        members = {name.partition("/")[2] for name in tar.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(next(n for n in archive.namelist() if n.endswith("entry_points.txt"))).decode()
        return {"sdist": members, "wheel": set(archive.namelist()), "entry points": set(text.splitlines())}


def files_of(*folders: str) -> set[str]:
    found = {path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_wheel_has_both_packages_whole_and_nothing_else(built: dict[str, set[str]]) -> None:
    assert {name for name in built["wheel"] if ".dist-info/" not in name} == files_of(*PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= built["wheel"]
    assert any(name.endswith("licenses/LICENSE") for name in built["wheel"])
    expected = {"aot_hooks = aot_hooks.backend:aot_hooks", "cudagraph_tree = cudagraph.backend:cudagraph_tree"}
    assert {"[torch_dynamo_backends]", *expected} <= built["entry points"]


def test_the_source_distribution_has_what_its_tests_and_docs_need(built: dict[str, set[str]]) -> None:
    results = {name for name in files_of("benchmarks") if name.startswith("benchmarks/results/")}
    assert (files_of(*NEEDED) | set(FILES)) - results <= built["sdist"]
    assert not any(name.startswith("benchmarks/results") for name in built["sdist"])


def test_the_citation_has_the_version_of_the_package() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text().splitlines()
