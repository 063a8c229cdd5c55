"""The import graph of the product, read from its syntax trees, for the tests that guard the layout."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("hw_configs", "opusim", "accounting", "training")
"""The layers: folders of the repository. All but opusim are linked into it, and imported as parts of it."""


@dataclass(frozen=True)
class Import:
    """One imported name of a file."""

    target: str  # the dotted name: `a.b.c` for `from a.b import c`
    where: str  # "top", "function" (inside a function), or "typing" (under `if TYPE_CHECKING`)
    line: int


@cache
def imports_of(source: str, *, package: str = "") -> list[Import]:
    """List every imported name of a source text; relative imports start at the package that contains the file."""
    return list(_walk(parsed(source), "top", package))


parsed = cache(ast.parse)


def _walk(node: ast.AST, where: str, package: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, where, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            start = _start(child, package)
            yield from (Import(f"{start}.{alias.name}", where, child.lineno) for alias in child.names)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, "function", package)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _walk(child, "typing", package)
        elif not isinstance(child, ast.expr):  # only statements import
            yield from _walk(child, where, package)


def _start(node: ast.ImportFrom, package: str) -> str:
    """The package that a `from` statement starts in, dots resolved."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def in_layer(name: str) -> str:
    """The dotted name that begins with the layer: `training.engine` of `opusim.training.engine`."""
    part = name.removeprefix("opusim.")
    return part if part.split(".")[0] in set(PACKAGES) - {"opusim"} else name


@cache
def product_files() -> dict[str, Path]:
    """Every module of the product by its dotted name; a package stands for its `__init__.py`."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if package == "opusim" else ("opusim", *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def product_imports() -> dict[str, list[Import]]:
    """The imports of every module of the product."""
    return {
        name: imports_of(
            path.read_text(), package=name if path.name == "__init__.py" else name.rpartition(".")[0]
        )
        for name, path in product_files().items()
    }


def module_of(target: str, modules: Mapping[str, object]) -> str | None:
    """The module that a dotted name lies in, or None if it is not one of `modules`."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def graph(imports: Mapping[str, list[Import]]) -> dict[str, set[str]]:
    """Which modules each module imports, at whatever place in the file.

    Only imports that a file states count, not those of the packages above the imported module.
    """
    edges: dict[str, set[str]] = {}
    for name, found in imports.items():
        targets = {module_of(each.target, imports) for each in found}
        edges[name] = {target for target in targets if target is not None and target != name}
    return edges


def callers(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Who uses each module: files that import it, and "later" for what is loaded when it is needed, and for users.

    Later are imports inside functions, "module:name" in a file or an entry point, and names that a stub offers.
    """
    found: dict[str, set[str]] = {name: set() for name in modules}
    files = {name: [path, *filter(Path.exists, [path.with_suffix(".pyi")])] for name, path in modules.items()}
    for name, paths in files.items():
        for path in paths:
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
            source = path.read_text()
            for each in imports_of(source, package=package):
                target = module_of(each.target, modules)
                if target not in (name, None):
                    is_later = each.where == "function" or path.suffix == ".pyi"
                    found[str(target)].add("later" if is_later else str(path.relative_to(ROOT)))
            for target in re.findall(r"\"([a-z_][\w.]*):\w", source):
                found.get(target, set()).add("later")
    for module in re.findall(r"^ +\w+ = ([\w.]+):", (ROOT / "setup.cfg").read_text(), re.MULTILINE):
        found[module].add("later")
    return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one module (Tarjan 1972), each in alphabetical order."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in edges:
        if node not in index:
            visit(node)
    return found
