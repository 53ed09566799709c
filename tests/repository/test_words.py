"""Names of the rooms have one meaning each, and a noun or a verb that says it.

    sources --ast--> names at the top level of a module, and of modules --> words that say nothing by themselves
                                                                       '--> names that two rooms of a package give

docs/architecture.md has the vocabulary, which is short. Local names and private ones are not looked at.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("aot_hooks", "cudagraph")
MOST_WORDS = 60  # rows of the glossary
# Words that stood for several things at once: a set, a number, a function and a state. Say which one, and of what.
VAGUE = {"again", "apart", "held", "kept", "least", "moments", "off", "over", "within"}
# These are left. A name goes from here when it is replaced; none is added.
VAGUE_NAMES = {
    "aot_hooks/planning/apart.py",
    "aot_hooks/planning/candidates.py: computed_again",
    "aot_hooks/planning/candidates.py: error_within",
    "aot_hooks/planning/chunks.py: Within",
    "aot_hooks/planning/program.py: MOST_OVER",
    "aot_hooks/planning/reasons.py: warn_of_least",
    "aot_hooks/planning/recipe.py: chosen_again",
    "aot_hooks/planning/simulated.py: held_on_average",
    "aot_hooks/planning/step.py: Apart",
    "aot_hooks/planning/step.py: KEPT",
    "aot_hooks/planning/versions.py: held_bytes",
    "aot_hooks/planning/within.py",
    "aot_hooks/planning/within.py: partition_within",
    "aot_hooks/steps/moments.py",
    "aot_hooks/steps/moments.py: moments_of",
}
# Files that hold one arithmetic in several forms, and files of which each one has these names.
ALIKE = ("aot_hooks/library/", "aot_hooks/integrations/", "aot_hooks/torch_private/", "cudagraph/torch_private/")
EACH_HAS = {"forget", "reset", "log"}
# Names with a meaning in each of two rooms. A name goes from here when one of them gets another; none is added.
SHARED_NAMES: dict[str, set[str]] = {
    "aot_hooks": {
        *("Call", "Limits", "Program", "Step"),
    },
    "cudagraph": set(),
}


def names_in(source: str) -> Iterator[str]:
    """The public names that a module gives at its top level; not those that it imports."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [each.id for each in targets if isinstance(each, ast.Name)]
        else:
            found = []
        yield from (name for name in found if not name.startswith("_"))


def words_of(name: str) -> set[str]:
    """compile_again, CompileAgain -> compile, again"""
    return {word.lower() for word in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)}


def sources_of(package: str) -> dict[str, str]:
    paths = sorted((ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def vague(sources: Mapping[str, str]) -> set[str]:
    """Modules, and names in them, with a word of `VAGUE`."""
    modules = {path for path in sources if words_of(Path(path).stem) & VAGUE}
    return modules | {
        f"{path}: {name}" for path, source in sources.items() for name in names_in(source) if words_of(name) & VAGUE
    }


def shared(sources: Mapping[str, str]) -> set[str]:
    """Functions and classes, written in lower or mixed case, that several modules of other rooms give."""
    files: dict[str, set[str]] = defaultdict(set)
    for path, source in sources.items():
        for name in names_in(source):
            if not path.startswith(ALIKE) and not name.isupper() and name not in EACH_HAS:
                files[name].add(path)
    return {name for name, paths in files.items() if len(paths) > 1}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_is_a_vague_word(package: str) -> None:
    found, known = vague(sources_of(package)), {each for each in VAGUE_NAMES if each.startswith(f"{package}/")}
    assert not found - known, f"say what it is of: {sorted(found - known)}"
    assert not known - found, f"gone; take them from VAGUE_NAMES: {sorted(known - found)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_of_two_modules_means_one_thing(package: str) -> None:
    found, known = shared(sources_of(package)), SHARED_NAMES[package]
    assert not found - known, f"two modules give these; give one of them another name: {sorted(found - known)}"
    assert not known - found, f"gone; take them from SHARED_NAMES: {sorted(known - found)}"


def test_the_glossary_is_short_and_explains_each_word_once() -> None:
    _, text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("\n## Glossary\n")
    parts = [re.findall(r"^\| (.+?) \| .+ \|$", part, flags=re.M) for part in text.split("\n**CUDA graphs**\n")]
    assert len(parts) == len(PACKAGES)  # those of cudagraph come last
    words = [[row for row in rows if row != "word"] for rows in parts]
    assert 0 < sum(map(len, words)) <= MOST_WORDS
    for rows in words:
        single = [word.strip() for row in rows for word in row.split(",")]
        assert len(single) == len(set(single)), single


def test_what_the_tests_find() -> None:
    sources = {
        "p/again.py": "def f(): ...",
        "p/a.py": "def compile_again(): ...\nclass HeldBytes: ...\n_over = 1\ndef g(): over = 1",
        "p/b.py": "MOST_KEPT: int = 1\ndef f(): ...\nheldout = 2",
    }
    assert vague(sources) == {"p/again.py", "p/a.py: compile_again", "p/a.py: HeldBytes", "p/b.py: MOST_KEPT"}
    assert shared(sources) == {"f"}
