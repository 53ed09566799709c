"""Private symbols of torch: the tables that list them, and `need`, which looks one up.

    SYMBOLS = {"torch._C._x": "what needs it", "torch._y.z": Needed("what needs it", tested=("2.13.0", "2.15.0"))}
    PROTOCOLS = {"what needs them": {"torch._y.Class": "attribute old_name|new_name"}}
    need = needing(SYMBOLS, "cudagraph", UnsupportedTorchError)

Each file of a folder `torch_private` has a table of the symbols that it looks up by path, and one of the classes whose
instances torch hands it, with the attributes that it uses; `__name__` where the name of the class alone counts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["TESTED", "Needed", "Protocols", "Row", "Symbols", "has", "late", "needing", "rows_of"]

TESTED = ("2.11.0", "2.13.0", "2.15.0")
UPSTREAM = "https://github.com/pytorch/pytorch/blob"


class Needed(NamedTuple):
    """What needs a symbol that not every tested torch has: those of `tested`, and only a build with CUDA if `cuda`."""

    purpose: str
    tested: tuple[str, ...] = TESTED
    cuda: bool = False


Symbols = Mapping[str, str | Needed]
Protocols = Mapping[str, Mapping[str, str]]


def resolve(path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            obj = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            obj = getattr(obj, name)
        return obj
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

    def need(path: str) -> Any:
        try:
            return resolve(path)
        except (ImportError, AttributeError):
            raise error(
                f"torch {torch.__version__} has no {path}, which {package} needs for {_needed(symbols[path]).purpose}; "
                f"tested with torch {', '.join(TESTED)}: install one of them, or report this version"
            ) from None

    return need


def _needed(cell: str | Needed) -> Needed:
    return Needed(cell) if isinstance(cell, str) else cell


def late(need: Callable[[str], Any], path: str) -> Callable[..., Any]:
    """The callable at `path`, looked up now for speed; where torch has none, a function that raises when it is called.

    So that a package can be imported on any torch.
    """
    try:
        found: Callable[..., Any] = need(path)
    except RuntimeError as e:
        error = e

        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise error

        return missing
    return found


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
    for path, cell in symbols.items():
        purpose, tested, cuda = _needed(cell)
        absent = _version() not in tested or (cuda and torch.version.cuda is None)
        status = "ok" if has(path) else "absent" if absent else "MISSING"
        yield Row(package, path, status, purpose, tested, source_link(path))
    for purpose, classes in protocols.items():
        for owner, name in ((owner, name) for owner, names in classes.items() for name in names.split()):
            status = "ok" if has_attribute(owner, name) else "MISSING"
            yield Row(package, f"{owner}.{name}", status, purpose, TESTED, source_link(owner))


def _version() -> str:
    return torch.__version__.split("+")[0]


def has_attribute(owner: str, name: str) -> bool:
    """Whether instances of the class at `owner` have an attribute; `name` may be several, `old|new`.

    Attributes that methods set on `self` are found in the source of the class.
    """
    if not has(owner):
        return False
    return any(hasattr(resolve(owner), each) or each in _names_in_source(resolve(owner)) for each in name.split("|"))


@functools.cache
def _names_in_source(cls: type) -> frozenset[str]:
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        names.update(vars(base).get("__annotations__", ()))
        try:
            names.update(re.findall(r"\bself\.(\w+)", inspect.getsource(base)))
        except (OSError, TypeError):  # written in C++
            continue
    return frozenset(names)


def source_link(path: str) -> str:
    """The file that defines the module of `path`, at the tag of this torch, or of the newest tested one."""
    root, parts = Path(torch.__file__).parents[1], path.split(".")
    for cut in range(len(parts), 0, -1):
        module = root.joinpath(*parts[:cut])
        for file in (module.with_suffix(".py"), module / "__init__.py", module.with_suffix(".pyi")):
            if file.is_file():
                break
        else:
            if parts[:cut] != ["torch", "_C"]:
                continue
            file = module / "__init__.pyi.in"  # a wheel has what was generated from it
        tag = _version() if _version() in TESTED else TESTED[-1]
        return f"{UPSTREAM}/v{tag}/{file.relative_to(root).as_posix()}"
    raise ValueError(f"{path} is no path into torch")
