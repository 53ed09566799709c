"""torch._* stays inside the folders torch_private, so that a new torch is a matter of those.

    source --ast--> names imported from torch --> every step `._x` from them, every import and every string that
                                                  names a private part

What is followed: imports, attribute chains (through calls and subscripts), and strings that are a dotted path into
torch. Another name for a module (`t = torch`) is not, nor what a value's type says (`node._erased`).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import private_attributes
import pytest

import aot_hooks
import cudagraph
from aot_hooks import options
from aot_hooks.__main__ import env_data
from cudagraph.torch_private import compilers, symbols

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("aot_hooks", "cudagraph")
SOURCES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ALLOWED = [source for source in SOURCES if Path(source).parts[1] == "torch_private"]

PRIVATE_PATH = re.compile(r"torch(\.\w+)*\._(?!_)\w*([.:]\w+)*")


class Use(NamedTuple):
    line: int
    what: str


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_torch(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "torch"


def has_private_part(path: str) -> bool:
    return any(is_private(part) for part in path.split("."))


def torch_path(node: ast.expr, names: dict[str, str]) -> str | None:
    """The path into torch that an expression follows (`nn._x` -> `torch.nn._x`), or None if it starts elsewhere."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = torch_path(node.value, names)
        return base and f"{base}.{node.attr}"
    if isinstance(node, ast.Call | ast.Subscript):
        return torch_path(node.func if isinstance(node, ast.Call) else node.value, names)
    return None


def imported(tree: ast.Module) -> list[tuple[int, str, str]]:
    """Line, path and name of all that a file imports from torch."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, i.name, i.asname or "torch") for i in node.names if is_torch(i.name)]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and is_torch(node.module):
            found += [(node.lineno, f"{node.module}.{i.name}", i.asname or i.name) for i in node.names]
    return found


def private_torch_uses(source: str) -> list[Use]:
    """Every place where the source reaches into a private part of torch, by line."""
    tree = ast.parse(source)
    imports = imported(tree)
    names = {name: "torch" if name == "torch" else path for _, path, name in imports}
    found = {Use(line, path) for line, path, _ in imports if has_private_part(path)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and (path := torch_path(node, names)):
            found.add(Use(node.lineno, path))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE_PATH.fullmatch(node.value):
            found.add(Use(node.lineno, node.value))
    return sorted(found)


def test_there_is_something_to_look_at():
    assert {Path(source).parts[0] for source in SOURCES} == set(PACKAGES)


@pytest.mark.parametrize("path", [source for source in SOURCES if source not in ALLOWED])
def test_private_torch_only_in_its_folder(path):
    uses = private_torch_uses((ROOT / path).read_text(encoding="utf-8"))
    listing = "\n".join(f"  {path}:{use.line}: {use.what}" for use in uses)
    assert not uses, f"private parts of torch outside torch_private; give each a name there and import that:\n{listing}"


class WithoutBodiesAndStrings(ast.NodeTransformer):
    """What is left of a module is what its import reaches for itself, not by a path that `need` is given."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body = [ast.Pass()]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        node.body = ast.Constant(None)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def reached_at_import(source: str) -> list[str]:
    tree = ast.fix_missing_locations(WithoutBodiesAndStrings().visit(ast.parse(source)))
    uses = [use.what for use in private_torch_uses(ast.unparse(tree))]
    return [use for use in uses if use != "torch._C" and not use.startswith("torch.ops.")]  # which any torch has


@pytest.mark.parametrize("path", sorted(ALLOWED))
def test_an_import_asks_for_private_parts_by_need(path):
    """A missing one would end `import aot_hooks` with an AttributeError that says nothing of versions."""
    assert reached_at_import((ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import torch\nx = torch._C._f", ["torch._C._f"]),
        ("import torch\nclass A:\n    x: object = torch.fx._x", ["torch.fx._x"]),
        ("import torch\ndef f(x=torch._x): return torch._y", ["torch._x"]),
        ("import torch\nx = getattr(torch._C, '_f', None)", []),
        ("x = need('torch._C._f')\nf = lambda: torch._x", []),
    ],
)
def test_what_an_import_reaches(source, what):
    assert reached_at_import(source) == what


def rows_of(path: str) -> list[symbols.Row]:
    return list(symbols.rows_of(path.split("/")[0], (ROOT / path).read_text(encoding="utf-8")))


def made_paths(source: str) -> list[str]:
    """The paths into torch that a source puts together, so that no reader of it can list them."""
    parts = [n.left if isinstance(n, ast.BinOp) else n.values[0] for n in ast.walk(ast.parse(source)) if is_made(n)]
    texts = [part.value for part in parts if isinstance(part, ast.Constant)]
    return [text for text in texts if str(text).startswith("torch.")]


def is_made(node: ast.AST) -> TypeGuard[ast.BinOp | ast.JoinedStr]:
    return isinstance(node, ast.BinOp) or (isinstance(node, ast.JoinedStr) and bool(node.values))


@pytest.mark.parametrize("path", sorted(ALLOWED))
def test_each_private_part_is_listed(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    listed = symbols.used_in(source)[0]
    used = [use.what for use in private_torch_uses(source) if not use.what.startswith("torch.ops.")]
    assert [use for use in used if not any(f"{each}.".startswith(f"{use}.") for each in listed)] == []
    assert made_paths(source) == []


@pytest.mark.parametrize(
    ("source", "listed", "optional"),
    [
        ("def f(): return need('torch.fx.x')", {"torch.fx.x": ["f"]}, set()),
        ("x = late('torch._y')", {"torch._y": ["x"]}, set()),
        ("class A:\n    x = torch._C._x\ny: int = torch._C._x", {"torch._C._x": ["A", "y"]}, set()),
        ("def f(): torch._C._x(1).shape", {"torch._C._x": ["f"]}, set()),
        ("def f(): return has('torch._y') and torch._y", {"torch._y": ["f"]}, {"torch._y"}),
        ("def f(): return need('torch._x'), need('torch._x.y')", {"torch._x.y": ["f"]}, set()),
        ("def f(): torch.fx.x, torch.__version__, torch.ops._c10d_functional.x", {}, set()),
        ("def f():\n    'torch._x in prose'\n    need(path)", {}, set()),
    ],
)
def test_what_is_listed(source: str, listed: dict[str, list[str]], optional: set[str]) -> None:
    assert symbols.used_in(source) == (listed, optional)


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("need('torch._x')", []),
        ("need(f'torch._{x}')", ["torch._"]),
        ("need('torch._x.' + x)", ["torch._x."]),
        ("f'torch {version} has no {path}'", []),
    ],
)
def test_a_path_that_is_put_together_is_found(source: str, made: list[str]) -> None:
    assert made_paths(source) == made


@pytest.mark.core
@pytest.mark.parametrize("path", sorted(ALLOWED))
def test_this_torch_has_each_symbol_and_each_attribute(path: str) -> None:
    rows = rows_of(path)
    assert [row.path for row in rows if row.status == "MISSING"] == []
    assert all(row.needed_for for row in rows)
    attributes = private_attributes.ATTRIBUTES.get(path, {})
    pairs = [(owner, name) for owner, names in attributes.items() for name in names.split()]
    assert [pair for pair in pairs if not private_attributes.has_attribute(*pair)] == []


@pytest.mark.parametrize("path", sorted(private_attributes.ATTRIBUTES))
def test_each_listed_attribute_is_used(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    for owner, names in private_attributes.ATTRIBUTES[path].items():
        for name in names.split():
            assert name == "__name__" or any(each in source for each in name.split("|")), f"{owner}.{name}"


@pytest.mark.core
def test_a_module_that_nothing_has_imported_is_found() -> None:
    path = "torch._inductor.fx_passes.micro_pipeline_tp"
    code = f"from cudagraph.torch_private import symbols; assert symbols.has('{path}') and not symbols.has('{path}.x')"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.core
@pytest.mark.parametrize(
    ("owner", "name", "found"),
    [
        ("torch.fx.graph._Namespace", "_used_names", True),  # set on self
        ("torch.fx.graph._Namespace", "create_name", True),
        ("torch.fx.graph._Namespace", "used_up", False),
        ("torch.fx.graph._Namespace", "used_up|create_name", True),
        ("torch.fx.graph._Nothing", "__name__", False),
        ("torch._guards.Guard", "user_stack", True),  # field of a dataclass
        ("torch._dynamo.eval_frame.DisableContext", "_torchdynamo_disable", True),  # set on a function that it makes
    ],
)
def test_an_attribute_is_found_where_instances_have_it(owner: str, name: str, found: bool) -> None:
    assert private_attributes.has_attribute(owner, name) == found


@pytest.mark.core
@pytest.mark.parametrize(
    ("package", "error"),
    [("aot_hooks", aot_hooks.errors.UnsupportedTorchError), ("cudagraph", cudagraph.UnsupportedTorchError)],
)
@pytest.mark.parametrize("how", ["need(path)", "late(path)(1, x=2)"])
def test_a_missing_symbol_raises_the_error_of_the_package_that_needs_it(how: str, package: str, error: Any) -> None:
    scope = {"__name__": f"{package}.some_file", "need": symbols.need, "late": symbols.late}
    exec(f"def look_up(path):\n    return {how}", scope)
    what = rf"has no torch\._nothing, which {package} needs in look_up of .*; tested with torch"
    with pytest.raises(error, match=what):
        scope["look_up"]("torch._nothing")  # type: ignore[operator]


@pytest.mark.core
def test_a_caller_of_no_package_gets_the_error_of_cudagraph() -> None:
    where = "test_a_caller_of_no_package_gets_the_error_of_cudagraph of test_private_torch.py"
    with pytest.raises(cudagraph.UnsupportedTorchError, match=f"which cudagraph needs in {where};"):
        symbols.need("torch._nothing")


def test_functions_of_both_packages_raise_the_error_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor

    monkeypatch.delattr(torch._inductor, "list_mode_options")
    with pytest.raises(aot_hooks.errors.OptionError, match="aot_hooks needs in mode_options of") as raised:
        options.inductor_patches(options.Options(), "max-autotune")
    assert isinstance(raised.value.__cause__, aot_hooks.errors.UnsupportedTorchError)
    with pytest.raises(cudagraph.UnsupportedTorchError, match="cudagraph needs in mode_options of"):
        compilers.mode_options("max-autotune")


def test_env_lists_every_symbol_of_both_packages() -> None:
    listed = {(row["package"], row["path"]) for row in env_data()["private_symbols"]}
    assert listed == {(row.package, row.path) for path in ALLOWED for row in rows_of(path)}
    assert {package for package, _ in listed} == set(PACKAGES)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import os, torch.utils._pytree as pytree", "torch.utils._pytree"),
        ("from torch import _C", "torch._C"),
        ("from torch.fx.graph import _Namespace", "torch.fx.graph._Namespace"),
        ("def f():\n    from torch._subclasses import FakeTensor", "torch._subclasses.FakeTensor"),
        ("import torch\ntorch._C._autograd.f()", "torch._C._autograd"),
        ("import torch as t\nt._dynamo.reset()", "torch._dynamo"),
        ("import torch.fx\ntorch.fx._symbolic_trace.f", "torch.fx._symbolic_trace"),
        ("from torch import nn as n\nn.modules._functions", "torch.nn.modules._functions"),
        ("import torch\ntorch.fx.Graph()._codegen", "torch.fx.Graph._codegen"),
        ("import torch\ntorch.ops.aten[0]._schema", "torch.ops.aten._schema"),
        ("import torch\n@torch._disable\ndef f(): ...", "torch._disable"),
        ("NAME = 'torch._inductor.config'", "torch._inductor.config"),
        ("name = f'torch._{x}'", "torch._"),
    ],
)
def test_detector_finds(source, what):
    assert what in [use.what for use in private_torch_uses(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "from torch.fx import Graph, GraphModule as GM",
        "from . import values\nvalues.reset()",
        "import torchvision._internally",
        "import torch\nclass A(torch.nn.Module):\n    def f(self): return self._x",
        "'torch._dynamo.reset() is what you want'",
    ],
)
def test_detector_leaves_alone(source):
    assert private_torch_uses(source) == []
