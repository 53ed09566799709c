"""Every ```python block of README.md and docs/ runs, each by itself; not one whose fence says ```python notest.

Those whose fence says ```python integrations or torchtitan need other packages: tests/integrations/ runs them.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

import aot_hooks.options
import cudagraph.options

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
LANGUAGES = {"python", "python3", "py"}  # one that is spelled another way must not slip through

FENCE = re.compile(r"^ *(?P<marks>`{3,}|~{3,})(?P<info>[^`\n]*)$")


class Block(NamedTuple):
    line: int  # of its first line of code
    source: str
    runs: bool


def python_blocks(text: str) -> list[Block]:
    """The fenced Python blocks of a Markdown text, in order."""
    blocks: list[Block] = []
    opened: tuple[str, list[str], int] | None = None  # marks, words after them, line
    code: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened, code = (fence["marks"], fence["info"].split(), number), []
            continue
        marks, words, start = opened
        if not (fence and fence["marks"].startswith(marks) and not fence["info"].strip()):
            code.append(line)
            continue
        if words and words[0].lower() in LANGUAGES:
            source = textwrap.dedent("\n".join(code)) + "\n"
            blocks.append(Block(start + 1, source, runs=not {"notest", "integrations", "torchtitan"} & set(words[1:])))
        opened = None
    if opened is not None:
        raise ValueError(f"the fence opened on line {opened[2]} is never closed")
    return blocks


def run_block(block: Block, path: Path) -> None:
    """Execute a block as a program of its own; lines in a traceback are those of the file it stands in."""
    code = compile("\n" * (block.line - 1) + block.source, str(path), "exec")
    exec(code, {"__name__": "__main__"})


def readme_blocks() -> list[Block]:
    return python_blocks(README.read_text(encoding="utf-8")) if README.exists() else []


@pytest.mark.core
def test_readme_has_a_block_that_runs():
    assert README.exists(), "there is no README.md"
    assert [block for block in readme_blocks() if block.runs], "README.md shows no ```python block that runs"


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize("block", [pytest.param(b, id=f"line-{b.line}") for b in readme_blocks() if b.runs])
def test_readme_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what it writes stays out of the checkout
    run_block(block, README)


def docs_blocks() -> list[tuple[Path, Block]]:
    return [(path, block) for path in DOCS for block in python_blocks(path.read_text(encoding="utf-8")) if block.runs]


@pytest.mark.parametrize(
    ("path", "block"), [pytest.param(path, b, id=f"{path.stem}-{b.line}") for path, b in docs_blocks()]
)
def test_docs_block_runs(path, block, tmp_path, monkeypatch):
    """With graphs for which no code is generated: that takes most of the time, and the blocks of README.md do it."""
    for options in (aot_hooks.options.Options, cudagraph.options.Options):
        parse = options.parse
        monkeypatch.setattr(options, "parse", lambda given, parse=parse: parse({**(given or {}), "inner": "aten"}))
    monkeypatch.chdir(tmp_path)
    run_block(block, path)


def test_recipes_use_the_real_compiler_but_on_the_page_on_debugging():
    """Recipes are copied. Who trains with `inner="aten"` pays for packing that nothing fuses."""
    pages = {
        page.name for page in [README, *DOCS] for b in python_blocks(page.read_text("utf-8")) if 'aten"' in b.source
    }
    assert pages == {"debugging.md"}


EXAMPLE = """\
# Title

```python
x = 1
```

```python notest
raise SystemExit
```

1. indented:

   ~~~py
   if True:
       y = 2
   ~~~

````text
```python
not ours
```
````

```
plain
```
"""


def test_finds_blocks():
    assert python_blocks(EXAMPLE) == [
        Block(4, "x = 1\n", True),
        Block(8, "raise SystemExit\n", False),
        Block(14, "if True:\n    y = 2\n", True),
    ]


def test_text_without_blocks_has_none():
    assert python_blocks("# Title\n\nprose, `code`, ```inline```\n") == []


def test_unclosed_fence_raises():
    with pytest.raises(ValueError, match="line 2 is never closed"):
        python_blocks("\n```python\nx = 1\n")


def test_bad_block_fails_with_its_line():
    (block,) = python_blocks("text\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_block(block, README)
    assert caught.traceback[-1].lineno + 1 == 5
    assert Path(caught.traceback[-1].path) == README


def test_block_that_does_not_parse_fails():
    (block,) = python_blocks("```python\nx = = 1\n```\n")
    with pytest.raises(SyntaxError) as caught:
        run_block(block, README)
    assert caught.value.lineno == 2


def test_blocks_do_not_see_each_other():
    first, second = python_blocks("```python\nx = 1\n```\n```python\nx\n```\n")
    run_block(first, README)
    with pytest.raises(NameError):
        run_block(second, README)
