"""docs/architecture.md and CONTRIBUTING.md name every room, and no file that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from results import RESULTS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("aot_hooks", "cudagraph")
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [ARCHITECTURE, ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOP = (*PACKAGES, "tests", "benchmarks", "docs", "examples", "constraints")
NAMED = re.compile(rf"(?<![\w/.])(?:\.\./)?((?:{'|'.join(TOP)})/[\w./-]*)")  # in code, or as the target of a link
CODE = re.compile(r"`([^`\n]+)`")


def left_out(path: Path) -> bool:
    """Whether this is a result, and the checkout an unpacked source distribution, which has none."""
    return RESULTS in [path, *path.parents] and not RESULTS.is_dir()


def rooms(package: str) -> set[str]:
    """Folders and root modules of a package: "passes/", "library/loops/", "backend.py"."""
    sources = {path.relative_to(ROOT / package) for path in (ROOT / package).rglob("*.py")}
    return {f"{path.parent.as_posix()}/" if path.parent.parts else path.name for path in sources} - {"_version.py"}


def section(package: str) -> str:
    """The table of rooms of `package`."""
    return ARCHITECTURE.read_text().partition(f"| room of `{package}`")[2].partition("\n\n")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_in_its_table_and_no_other(package: str) -> None:
    first_cells = "\n".join(line.split("|")[1] for line in section(package).splitlines()[2:])
    assert set(CODE.findall(first_cells)) == rooms(package)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = {name.rstrip(".") for name in NAMED.findall(page.read_text())}
    assert [name for name in sorted(named) if not (ROOT / name).exists() and not left_out(ROOT / name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_or_headline_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, headline = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists() or left_out(file), f"{page.name}: {target}"
        if headline and file.exists():
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert headline in {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}, target
