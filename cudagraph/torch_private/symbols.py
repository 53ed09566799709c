"""Private symbols of torch: `need` looks one up, and `rows_of` lists those that a file uses.

    need("torch._y.z")   the symbol, or an error with its path and the function that needs it
    has("torch._v")      whether this torch has it: not every tested torch does
    late("torch._C._x")  the function, looked up when the file is imported

Nothing keeps the list by hand: it is read off the sources. So a path is written out where it is needed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedTorchError

# What a missing symbol raises, by package. `aot_hooks` adds its own error: it calls functions of this folder, too.
errors: dict[str, type[Exception]] = {"cudagraph": UnsupportedTorchError}
TESTED = ("2.11.0", "2.13.0", "2.15.0")
_PATH = re.compile(r"torch(\.\w+)+")
# Symbols that a build without CUDA lacks.
_OF_CUDA = re.compile(r"torch\._C\.(_cuda_|_CUDAGraph|_free_And_|_set_storage_data_ptr_|_tensors_data_ptrs_)")


def resolve(path: str) -> Any:
    """The object at a dotted path. Raises `ImportError`."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ImportError, AttributeError):
            return functools.reduce(getattr, parts[cut:], importlib.import_module(".".join(parts[:cut])))
    return importlib.import_module(path)


def has(path: str) -> bool:
    """Whether this torch has the private symbol at `path`."""
    try:
        resolve(path)
    except ImportError:
        return False
    return True


def need(path: str) -> Any:
    """The private symbol at `path`. Without it raises the error of the package that asks, which names the function."""
    try:
        return resolve(path)
    except ImportError:
        package, function = _asking()
        raise errors[package](
            f"torch {torch.__version__} has no {path}, which {package} needs in {function}; "
            f"tested with torch {', '.join(TESTED)}: install one of them, or report this version"
        ) from None


def _asking() -> tuple[str, str]:
    """The package that asks for a symbol, and the function that does, "mode_options of compilers.py".

    Functions of this folder ask for the package that has called them.
    """
    frames = [frame for frame, _ in traceback.walk_stack(None) if frame.f_code.co_filename != __file__]
    code, names = frames[0].f_code, (frame.f_globals.get("__name__", "") for frame in frames)
    packages = (name.partition(".")[0] for name in names if not name.startswith(f"{__package__}."))
    file = Path(code.co_filename).name
    function = file if code.co_name == "<module>" else f"{code.co_name} of {file}"
    return next(filter(errors.get, packages), "cudagraph"), function


def late(path: str) -> Callable[..., Any]:
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
    """One symbol that a file uses.

    `status` is "ok", "MISSING", or "absent" where this version or build of torch need not have it. `needed_for` has the
    functions, classes and names of the file that use it.
    """

    package: str
    path: str
    status: str
    needed_for: str


def rows_of(package: str, source: str) -> Iterator[Row]:
    """The rows of a file of `package` with the text `source`."""
    found, optional = used_in(source)
    for path, names in found.items():
        absent = path in optional or (torch.version.cuda is None and _OF_CUDA.match(path))
        status = "ok" if has(path) else "absent" if absent else "MISSING"
        yield Row(package, path, status, ", ".join(names))


def used_in(source: str) -> tuple[dict[str, list[str]], set[str]]:
    """The paths into torch that `source` names in strings, or reaches through a private part, each with the top-level
    functions, classes and names that do; and those that it asks `has` for. Not paths that begin another one."""
    found: dict[str, list[str]] = defaultdict(list)
    optional: set[str] = set()
    for top in ast.parse(source).body:
        target = getattr(top, "target", None) or next(iter(getattr(top, "targets", ())), None)
        name = getattr(top, "name", "") if target is None else ast.unparse(target)
        for node in ast.walk(top):
            path = _path_of(node)
            if path and name not in found[path]:
                found[path].append(name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "has":
                optional.update(filter(None, map(_path_of, node.args)))
    whole = sorted(path for path in found if not any(other.startswith(f"{path}.") for other in found))
    return {path: found[path] for path in whole}, optional


def _path_of(node: ast.AST) -> str:
    """The path into torch that a string is, or an attribute of something private; "" for any other node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if _PATH.fullmatch(node.value) else ""
    text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
    is_private = any(part.startswith("_") and not part.startswith("__") for part in text.split("."))
    return text if is_private and _PATH.fullmatch(text) and not text.startswith("torch.ops.") else ""
