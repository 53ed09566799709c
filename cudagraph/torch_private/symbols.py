"""Private symbols of torch: the tables that list them, and `need`, which looks one up.

    SYMBOLS = {"what needs them": "torch._C._x torch._y.z .w", Needed("held outputs", ("2.13.0", "2.15.0")): "torch._v"}
    PROTOCOLS = {"what needs them": {"torch._y.Class": "attribute old_name|new_name"}}
    need = needing(SYMBOLS, "cudagraph", UnsupportedTorchError)

Each file of a folder `torch_private` has two tables. SYMBOLS lists the symbols that the file looks up by path; `.w` is
short for a neighbour of the symbol before it, here torch._y.w. PROTOCOLS lists classes of torch, with the attributes of
their instances that the file uses, or of objects that they make; `__name__` where only the name of the class counts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

TESTED = ("2.11.0", "2.13.0", "2.15.0")
_VERSION = torch.__version__.split("+")[0]
_UPSTREAM = "https://github.com/pytorch/pytorch/blob"


class Needed(NamedTuple):
    """What needs a symbol that not every tested torch has: those of `tested`, and only a build with CUDA if `cuda`."""

    purpose: str
    tested: tuple[str, ...] = TESTED
    cuda: bool = False


Symbols = Mapping[str, str] | Mapping[str | Needed, str]
Protocols = Mapping[str, Mapping[str, str]]


def paths(text: str) -> Iterator[str]:
    """The full paths that a cell of a table names."""
    path = ""
    for each in text.split():
        path = path.rpartition(".")[0] + each if each.startswith(".") else each
        yield path


def listed(symbols: Symbols) -> dict[str, Needed]:
    """The full paths of a table, each with what needs it."""
    cells = ((Needed(cell) if isinstance(cell, str) else cell, text) for cell, text in symbols.items())
    return {path: needed for needed, text in cells for path in paths(text)}


def resolve(path: str) -> Any:
    """The object at a dotted path. Raises `ImportError` or `AttributeError`."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ImportError):
            return functools.reduce(getattr, parts[cut:], importlib.import_module(".".join(parts[:cut])))
    raise ImportError(path)


def has(path: str) -> bool:
    """Whether this torch has the private symbol at `path`."""
    try:
        resolve(path)
    except (ImportError, AttributeError):
        return False
    return True


def needing(symbols: Symbols, package: str, error: type[Exception]) -> Callable[[str], Any]:
    """`need(path)`: returns a symbol of the table, or raises `error` with its path, what needs it and `TESTED`."""
    purposes = listed(symbols)

    def need(path: str) -> Any:
        try:
            return resolve(path)
        except (ImportError, AttributeError):
            raise error(
                f"torch {torch.__version__} has no {path}, which {package} needs for {purposes[path].purpose}; "
                f"tested with torch {', '.join(TESTED)}: install one of them, or report this version"
            ) from None

    return need


def late(need: Callable[[str], Any], path: str) -> Callable[..., Any]:
    """The callable at `path`, looked up now for speed. If torch has none: a function that raises when it is called, so
    that a package can be imported on any torch."""
    try:
        return need(path)
    except RuntimeError as e:
        error = e

    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return missing


class Row(NamedTuple):
    """One symbol, or one attribute of a protocol.

    `status` is "ok", "MISSING", or "absent" where this version or build of torch is not expected to have it.
    """

    package: str
    path: str
    status: str
    needed_for: str
    tested: tuple[str, ...]
    link: str


def rows_of(package: str, symbols: Symbols, protocols: Protocols) -> Iterator[Row]:
    """The rows of one file's tables: symbols first, then the attributes of protocols."""
    for path, (purpose, tested, cuda) in listed(symbols).items():
        absent = _VERSION not in tested or (cuda and torch.version.cuda is None)
        status = "ok" if has(path) else "absent" if absent else "MISSING"
        yield Row(package, path, status, purpose, tested, source_link(path))
    classes = ((purpose, owners, names) for purpose, table in protocols.items() for owners, names in table.items())
    for purpose, owners, names in classes:
        for owner, name in itertools.product(paths(owners), names.split()):
            status = "ok" if has_attribute(owner, name) else "MISSING"
            yield Row(package, f"{owner}.{name}", status, purpose, TESTED, source_link(owner))


def has_attribute(owner: str, name: str) -> bool:
    """Whether instances of the class at `owner` have an attribute; `name` may be several, `old|new`.

    Attributes that methods use of `self`, or set on an object that they make, are found in the source of the class.
    """
    if not has(owner):
        return False
    return any(hasattr(resolve(owner), each) or each in _names_in_source(resolve(owner)) for each in name.split("|"))


@functools.cache
def _names_in_source(cls: type) -> frozenset[str]:
    """The attribute names that the classes of `cls` annotate, or whose methods read or set them."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        names.update(vars(base).get("__annotations__", ()))
        with contextlib.suppress(OSError, TypeError):  # written in C++
            names.update(re.findall(r"\b(?:self\.|\w+\.(?=\w+ = ))(\w+)", inspect.getsource(base)))
    return frozenset(names)


def source_link(path: str) -> str:
    """URL of the file that defines the module of `path`, at the tag of this torch, or of the newest tested one."""
    root, parts = Path(torch.__file__).parents[1], path.split(".")
    tag = _VERSION if _VERSION in TESTED else TESTED[-1]
    for cut in range(len(parts), 0, -1):
        module = root.joinpath(*parts[:cut])
        files = [module.with_suffix(".py"), module / "__init__.py", module.with_suffix(".pyi")]
        found = [file for file in files if file.is_file()]
        if parts[:cut] == ["torch", "_C"]:
            found.append(module / "__init__.pyi.in")  # a wheel has what was generated from it
        if found:
            return f"{_UPSTREAM}/v{tag}/{found[0].relative_to(root).as_posix()}"
    raise ValueError(f"{path} is no path into torch")
