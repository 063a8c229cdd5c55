"""Guard the layout: who may import whom, no circles, small folders, kinds compared only in their configuration.

`TODAY` holds the numbers that the tree has not reached yet: a guard passes up to that number and fails beyond it.
Lower a number when the tree improves; delete it when its goal is reached.
"""

import ast
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.support.imports import (
    PACKAGES,
    ROOT,
    Import,
    callers,
    circles,
    graph,
    imports_of,
    in_layer,
    module_of,
    parsed,
    product_files,
    product_imports,
)

GOALS = {
    "circles of files": 0,
    "arrows against the order in opusim": 0,
    "arrows against the order in accounting": 0,
    "arrows against the order in training": 0,
    "files in a folder": 15,
    "files in the root of opusim": 13,
    "files in the root of accounting": 12,
    "files in the root of training": 2,
    "files of the product": 258,
    "files with a single caller in their own folder": 0,
    "function-level imports outside command modules": 20,
    "reads of a plan's configuration outside the engine": 0,
    "comparisons of protection.kind outside its configuration": 0,
}
TODAY: dict[str, int] = {"files with a single caller in their own folder": 8}

LAYERS = (*PACKAGES, "tests", "benchmarks")
ALLOWED = {
    "training": {"training", "accounting", "opusim", "hw_configs"},
    "accounting": {
        *("accounting", "opusim.noise", "opusim.errors", "opusim.checks", "opusim.tables", "opusim.files"),
        "opusim.plugins",
    },
    "opusim": {"opusim", "hw_configs"},
    "hw_configs": {"hw_configs"},
}
FRONT_DOOR = {"opusim/__init__.py", "opusim/__init__.pyi", "opusim/__main__.py"}
"""The only files that may name upper layers: they offer what a user needs as `opusim.X`."""

ORDER = {
    "opusim": (
        ("errors", "p_values"),
        ("plugins",),
        ("checks", "files", "tables"),
        ("progress", "encodings", "processes"),
        ("noise", "randomness", "temperature"),
        ("description", "medium"),
        ("camera",),
        ("devices",),
        ("crossbar",),
        ("calibration", "testing", "features", "serving"),
        ("lightonml",),
        ("cli",),
        ("__main__",),
    ),
    "accounting": (
        ("guarantee",),
        ("theorems", "numerics", "journal"),
        ("mechanism", "audit"),
        ("composition", "one_run"),
        ("anytime",),
        ("ledger",),
        ("explanation", "mechanisms"),
        ("cli",),
    ),
    "training": (
        ("errors",),
        ("config",),
        ("data",),
        ("networks",),
        ("runs",),
        ("protections",),
        ("engine",),
        ("feedback", "ulr", "convex", "ridge", "zeroth_order"),
        ("private_loop",),
        ("attacks",),
        ("sweeps",),
        ("reports",),
        ("cli",),
    ),
}
"""The rooms of each layer, lowest first: a room imports only rooms of the lines above its own."""


def room_of(module: str) -> tuple[str, str]:
    """The layer and the room of a module; a trainer's `config.py` counts as configuration."""
    layer, *rest = in_layer(module).split(".")
    if layer == "training" and len(rest) > 1 and rest[-1] == "config":
        return layer, "config"
    return layer, rest[0] if rest else ""


def against_the_order(edges: Mapping[str, Iterable[str]], layer: str) -> set[tuple[str, str]]:
    """Arrows between rooms of a layer that do not lead to a lower line of `ORDER`; `__init__` may name all rooms."""
    line = {room: number for number, rooms in enumerate(ORDER[layer]) for room in rooms}
    found = set()
    for module, targets in edges.items():
        for target in targets:
            (start_layer, start), (end_layer, end) = room_of(module), room_of(target)
            if {start_layer, end_layer} != {layer} or start == end or not start:
                continue
            if not end or line[start] <= line[end]:
                found.add((start, end or "__init__"))
    return found


def names_upper_layers(path: str, source: str) -> set[str]:
    """Imports of a file that lead out of what its layer may import."""
    layer = path.split("/")[0]
    if path in FRONT_DOOR:
        return set()
    targets = {in_layer(each.target) for each in imports_of(source)}
    ours = {name for name in targets if name.split(".")[0] in LAYERS}
    return {name for name in ours if not any(f"{name}.".startswith(f"{good}.") for good in ALLOWED[layer])}


def crowded(paths: Iterable[str], most: int) -> dict[str, int]:
    """Folders with more Python files than `most`."""
    counts = Counter(path.rpartition("/")[0] for path in paths)
    return {folder: count for folder, count in counts.items() if count > most}


def hidden_imports(imports: Mapping[str, list[Import]]) -> list[tuple[str, int]]:
    """Import statements inside functions, outside command modules: module and line."""
    return sorted(
        {
            (module, each.line)
            for module, found in imports.items()
            for each in found
            if each.where == "function" and "cli" not in module.split(".")
        }
    )


def kind_comparisons(source: str) -> list[int]:
    """Lines that decide by `protection.kind`: comparisons, matches, methods of the string, and names for it."""

    def is_kind(node: ast.AST | None) -> bool:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "str" and node.args:
            return is_kind(node.args[0])
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Subscript) else ""
        return text.endswith(("protection.kind", "protection['kind']", "['protection']['kind']"))

    def names_kinds(node: ast.Compare) -> bool:
        """Whether something called protection is compared with words."""
        words = [part for side in node.comparators for part in ast.walk(side)]
        is_named = isinstance(node.left, ast.Name | ast.Attribute) and (
            ast.unparse(node.left).split(".")[-1] == "protection"
        )
        return is_named and any(isinstance(p, ast.Constant) and isinstance(p.value, str) for p in words)

    lines = []
    for node in ast.walk(parsed(source)):
        decides = (
            (isinstance(node, ast.Compare) and any(map(is_kind, (node.left, *node.comparators))))
            or (isinstance(node, ast.Compare) and names_kinds(node))
            or (isinstance(node, ast.Match) and is_kind(node.subject))
            or (isinstance(node, ast.Subscript) and is_kind(node.slice))
            or (isinstance(node, ast.Attribute) and is_kind(node.value))
            or (isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and is_kind(node.value))
        )
        if decides:
            lines.append(node.lineno)
    return lines


def product_paths() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in product_files().values()]


def require(measure: str, found: Iterable[object]) -> None:
    """Fail if a guard finds more than it may, and say what it found."""
    listed = list(found)
    most = max(GOALS[measure], TODAY.get(measure, 0))
    assert len(listed) <= most, f"{measure}: {len(listed)}, at most {most}: {listed}"


@pytest.mark.parametrize("layer", list(ALLOWED))
def test_imports_go_one_way(layer: str) -> None:
    for path in [*(ROOT / layer).rglob("*.py"), *(ROOT / layer).rglob("*.pyi")]:
        assert not names_upper_layers(str(path.relative_to(ROOT)), path.read_text()), path


def test_an_import_of_an_upper_layer_is_caught() -> None:
    upward = "from opusim.training.engine.loop import Engine"
    assert names_upper_layers("opusim/files.py", upward) == {"training.engine.loop.Engine"}
    assert names_upper_layers("opusim/noise.py", upward)
    assert not names_upper_layers("opusim/__init__.py", upward)
    found = names_upper_layers("accounting/cli.py", "from opusim.devices import base")
    assert found == {"opusim.devices.base"}
    assert not names_upper_layers("accounting/cli.py", "from opusim.noise import NoiseModel")


@pytest.mark.parametrize("layer", list(ORDER))
def test_rooms_import_lower_rooms_only(layer: str) -> None:
    rooms = {room for room_layer, room in map(room_of, product_files()) if room_layer == layer and room}
    unplaced = rooms - {room for line in ORDER[layer] for room in line}
    assert not unplaced, f"add to ORDER[{layer!r}], below every room that imports them: {sorted(unplaced)}"
    require(f"arrows against the order in {layer}", against_the_order(graph(product_imports()), layer))


def test_an_arrow_against_the_order_is_caught() -> None:
    upward = {"opusim.training.data.arrays": {"opusim.training.engine.loop"}}
    assert against_the_order(upward, "training") == {("data", "engine")}
    sideways = {"opusim.training.ulr.trainer": {"opusim.training.convex.trainer"}}
    assert against_the_order(sideways, "training") == {("ulr", "convex")}
    front = {"opusim.training.data.arrays": {"opusim.training"}}
    assert against_the_order(front, "training") == {("data", "__init__")}
    section = {"opusim.training.engine.plan": {"opusim.training.ulr.config"}}
    section["opusim.training"] = {"opusim.training.cli"}
    assert not against_the_order(section, "training")


def test_files_import_each_other_in_no_circle() -> None:
    require("circles of files", circles(graph(product_imports())))


@pytest.mark.parametrize("back", [
    "from p.a import x",
    "def f():\n    from . import a",
    "if TYPE_CHECKING:\n    from p.a import X",
    "if typing.TYPE_CHECKING:\n    import p.a",
])  # fmt: skip
def test_a_circle_is_caught(back: str) -> None:
    sources = {"p": "", "p.a": "import p.b", "p.b": "from p.c import y", "p.c": back}
    imports = {name: imports_of(source, package="p") for name, source in sources.items()}
    assert circles(graph(imports)) == [["p.a", "p.b", "p.c"]]
    assert circles(graph({**imports, "p.c": []})) == []


def test_folders_and_roots_are_small() -> None:
    most = max(GOALS["files in a folder"], TODAY.get("files in a folder", 0))
    assert not crowded(product_paths(), most)
    for layer in ORDER:
        root = [path for path in product_paths() if path.startswith(f"{layer}/") and path.count("/") == 1]
        require(f"files in the root of {layer}", root)
    require("files of the product", product_paths())
    paths = [*(f"training/data/{n}.py" for n in range(16)), *(f"training/cli/{n}.py" for n in range(15))]
    assert crowded(paths, 15) == {"training/data": 16}
    assert not [measure for measure, number in TODAY.items() if number <= GOALS[measure]]


def with_one_caller(used_by: Mapping[str, set[str]], files: Mapping[str, Path]) -> list[str]:
    """Modules that one file uses, which stands in the same folder: the two are one story, and belong together."""
    folder = {name: str(path.parent.relative_to(ROOT)) for name, path in files.items()}
    return [
        name
        for name, users in used_by.items()
        if len(users) == 1 and {user.rpartition("/")[0] for user in users} == {folder[name]}
    ]


def test_no_file_has_a_single_caller_in_its_own_folder() -> None:
    files = {name: path for name, path in product_files().items() if not path.stem.startswith("__")}
    used_by = {name: users for name, users in callers(product_files()).items() if name in files}
    require("files with a single caller in their own folder", with_one_caller(used_by, files))
    files = {"opusim.a.x": ROOT / "opusim/a/x.py"}
    assert with_one_caller({"opusim.a.x": {"opusim/a/y.py"}}, files) == ["opusim.a.x"]
    assert not with_one_caller({"opusim.a.x": {"opusim/b/y.py"}}, files)
    assert not with_one_caller({"opusim.a.x": {"opusim/a/y.py", "opusim/a/z.py"}}, files)
    assert not with_one_caller({"opusim.a.x": {"later"}}, files)


def test_imports_stand_at_the_top() -> None:
    require("function-level imports outside command modules", hidden_imports(product_imports()))
    source = "import torch\nclass A:\n    def f(self):\n        import scipy\n"
    imports = {f"opusim.training.{name}": imports_of(source) for name in ("ulr.trainer", "cli.app")}
    assert hidden_imports(imports) == [("opusim.training.ulr.trainer", 4)]


def test_kinds_of_protection_are_compared_in_their_configuration_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for module, path in product_files().items()
        if room_of(module) != ("training", "config") and "protection" in path.read_text()
        for line in kind_comparisons(path.read_text())
    ]
    require("comparisons of protection.kind outside its configuration", found)


def test_the_configuration_of_a_plan_is_bound_in_the_engine() -> None:
    """Algorithms and protections hold it; a second way to a key of the configuration is a second thing to change."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for module, path in product_files().items()
        if room_of(module) != ("training", "engine")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"plan\.config\b", line)
    ]
    require("reads of a plan's configuration outside the engine", found)


@pytest.mark.parametrize("statement", [
    "if config.protection.kind == 'record': pass",
    *("if self.protection.kind in ('label', 'none'): pass", "x = protection.kind != 'none'"),
    *("kind = config.protection.kind", "config.protection.kind.startswith('label')"),
    *("TABLE[config.protection.kind]", "match plan.config.protection.kind:\n    case _: pass"),
    *("protection = str(options['protection']['kind'])", "TABLE[options['protection']['kind']]"),
    *("if protection['kind'] == 'none': pass", "if protection in ('record', 'label'): pass"),
    "x = found.protection == 'record' and found.kind == 'pdfa'",
])  # fmt: skip
def test_a_comparison_of_kinds_is_caught(statement: str) -> None:
    assert kind_comparisons(statement) == [1]


def to_json_of_other_types(source: str) -> list[str]:
    """What functions named `to_json` return, if it is no mapping of plain values."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    found = [node.returns for node in functions if node.name == "to_json"]
    types = ["" if each is None else ast.unparse(each) for each in found]
    return [each for each in types if each not in ("dict[str, Any]", "JsonObject")]


def test_everything_named_to_json_returns_plain_values() -> None:
    found = {name: to_json_of_other_types(path.read_text()) for name, path in product_files().items()}
    assert not {name: types for name, types in found.items() if types}
    assert to_json_of_other_types("class A:\n    def to_json(self) -> str: ...") == ["str"]


def test_naming_a_kind_in_a_message_is_no_comparison() -> None:
    assert not kind_comparisons("'protection.kind'\nf'{config.protection.kind!r} takes no clip'")


def test_module_of_finds_the_file_that_a_name_lies_in() -> None:
    assert module_of("opusim.noise.NoiseModel", product_files()) == "opusim.noise"
    assert module_of("torch.nn", product_files()) is None


@pytest.mark.parametrize(("statement", "heavy"), [
    ("import opusim, opusim.noise, opusim.errors", {"torch", "numba", "pydantic", "scipy"}),
    ("import opusim; opusim.ConfigError, dir(opusim)", {"torch", "numba", "pydantic", "opusim.training"}),
    ("import opusim.cli", {"torch", "numba", "pydantic", "scipy", "numpy"}),
    ("import opusim.training.cli", {"torch", "numba", "matplotlib", "scipy", "sklearn"}),
    (
        "from opusim.training.config import load_config; load_config()",
        {"torch", "numba", "matplotlib", "scipy"},
    ),
    (  # what `report` reads and shows a run with
        "import opusim.training.reports.run_report, opusim.training.runs.folder",
        {"torch", "numba", "matplotlib", "scipy", "sklearn"},
    ),
    (  # what `evaluate` reads a run with
        "import opusim.training.runs.run, opusim.training.feedback.trainer",
        {"numba", "matplotlib", "scipy", "sklearn"},
    ),
])  # fmt: skip
def test_heavy_libraries_are_imported_when_needed(statement: str, heavy: set[str]) -> None:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not heavy & set(loaded.stdout.split())


FORKED = """
import importlib, os, sys, torch
torch.set_num_threads(2)
for name in sys.argv[1:]:
    importlib.import_module(name)
if not sys.argv[1:]:
    torch.ones(2**20).sum()  # starts OpenMP's threads, which no forked process has
child = os.fork()
if child == 0:
    torch.ones(2**20).sum()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Imports the modules that its arguments name, forks, and computes in the forked process."""


def runs_forked(modules: Iterable[str], seconds: float) -> bool:
    """Whether a process forked after these imports computes with several threads; it waits for ever if it cannot."""
    started = subprocess.Popen([sys.executable, "-c", FORKED, *modules], cwd=ROOT, start_new_session=True)
    try:
        return started.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        return False


@pytest.mark.slow
def test_imports_start_no_threads_that_a_forked_process_lacks() -> None:
    assert runs_forked(product_files(), seconds=60)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another library of threads")
def test_threads_that_a_forked_process_lacks_are_caught() -> None:
    assert not runs_forked([], seconds=8)
