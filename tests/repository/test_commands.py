"""Each command line that README.md, CONTRIBUTING.md and docs/ print is one that the program, or the Makefile, takes."""

from __future__ import annotations

import re
import shlex

import pytest
from test_readme import DOCS, README, ROOT

from aot_hooks.__main__ import main, parser_of_commands

PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS]
COMMAND = re.compile(r"(?:^|`)(?:python|torchrun|accelerate)\b[^`\n]*?-m aot_hooks ([^`\n]+)", re.MULTILINE)
WITHOUT_ARGUMENTS = {"report", "run", "frontier", "explain-miss"}  # as names of commands, in prose


def printed(text: str) -> list[str]:
    """What follows `-m aot_hooks` in the command lines of a page."""
    return [line for line in COMMAND.findall(text) if line not in WITHOUT_ARGUMENTS]


LINES = sorted({line for page in PAGES for line in printed(page.read_text(encoding="utf-8"))})


def test_they_are_found() -> None:
    assert printed("`python -m aot_hooks env`, `torchrun -m aot_hooks run -x`") == ["env", "run -x"]
    assert printed("```bash\naccelerate launch -m aot_hooks run a.py -- --n 3\n```\n`python -m aot_hooks run`") == [
        "run a.py -- --n 3"
    ]
    assert {line.split()[0] for line in printed(README.read_text(encoding="utf-8"))} == {
        "report",
        "frontier",
        "run",
        "env",
    }


@pytest.mark.parametrize("line", LINES)
def test_the_program_takes_the_line(line: str) -> None:
    options = parser_of_commands().parse_args(shlex.split(line, comments=True))
    assert callable(options.run)


def test_a_line_that_it_does_not_take_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser_of_commands().parse_args(["run", "--budget", "24GiB", "--unknown", "1", "train.py"])
    with pytest.raises(SystemExit):
        main(["run", "train.py"])  # no policy
    assert "one of the arguments --hook --policy --budget --total is required" in capsys.readouterr().err


def test_make_has_the_targets() -> None:
    names = re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for line in names for target in line.split()}
    used = {
        target
        for page in PAGES
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {"demo", "test"} <= used <= targets
