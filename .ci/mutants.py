"""How many mutants of the accounting's core do its tests kill?

python .ci/mutants.py [--share SHARE] [--day DAY] [--least PERCENT] [--folder FOLDER]

One mutant in SHARE is tried, another part each day; exit code 1 if fewer than PERCENT are killed. FOLDER keeps which
tests run which line, and what was found, so that the same call resumes.

A mutant costs about a second. It stays in memory: a process that has loaded the libraries, and nothing of this
project, forks; the child imports the changed module and runs the tests that reach the changed line, the quickest
first, until one fails. Tests that start processes of their own see the unchanged code there.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import math
import os
import re
import resource
import signal
import sys
import time
import tokenize
import tomllib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from scipy import stats

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / ".ci" / "mutants.toml").read_text())
PYTEST = [
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
]  # libraries are loaded


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file: the `occurrence`-th place of an operator, which starts at `line` and `column`."""

    file: str
    operator: str
    occurrence: int
    line: int

    def name(self, source: str) -> str:
        """Return what identifies the mutant as long as its file does not change."""
        return (
            f"{self.file} {hashlib.sha256(source.encode()).hexdigest()[:8]} {self.operator} {self.occurrence}"
        )


def lines_left_out(file: str, tree: ast.Module) -> set[int]:
    """Return the lines of the functions and constants of a file that the settings leave out."""
    names = set(SETTINGS["left_out"].get(file, []))
    found: dict[str, range] = {}
    for prefix, body in [
        ("", tree.body),
        *((f"{c.name}.", c.body) for c in tree.body if isinstance(c, ast.ClassDef)),
    ]:
        for node in body:
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = lines
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[prefix + node.targets[0].id] = lines
    if names - set(found):
        raise SystemExit(f"left_out: {file} has no {', '.join(sorted(names - set(found)))}")
    return {line for name in names for line in found[name]}


def code_lines(file: str, source: str) -> set[int]:
    """Return the lines of code of a file that are judged: no docstring, comment or blank line, nothing left out."""
    tree = ast.parse(source)
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    shown = [text for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]
    without = {line for text in shown for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - without - lines_left_out(file, tree)


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of the code of a file that is judged."""
    tree, judged = get_ast(source), code_lines(file, source)
    for name in cosmic_ray.plugins.operator_names():
        if any(re.fullmatch(pattern, name) for pattern in SETTINGS["without"]):
            continue
        operator_class = cosmic_ray.plugins.get_operator(name)
        if operator_class.arguments():
            continue
        operator = operator_class()
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(places):
            if start[0] in judged:
                yield Mutant(file=file, operator=name, occurrence=occurrence, line=start[0])


def chosen(mutant: Mutant, share: int, day: int) -> bool:
    """Whether a mutant belongs to the part of this day."""
    name = f"{mutant.file} {mutant.operator} {mutant.occurrence}"
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % share == day % share


def in_child(work: Callable[[], int], seconds: float, log: Path) -> int | None:
    """Return the exit code of a forked child that runs `work` and prints into a file.

    None if it took more seconds of processor time, or twenty times as many of any.
    """
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, 1)
            os.dup2(file, 2)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + 20 * seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class _Watch:
    """A pytest plugin that tells coverage which test runs, and notes the seconds of each."""

    def __init__(self, watched: coverage.Coverage) -> None:
        self.watched = watched
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.watched.switch_context(item.nodeid)
        begun = time.process_time()  # a busy machine does not change it
        yield
        self.seconds[item.nodeid] = time.process_time() - begun
        self.watched.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def draw_map(file: Path) -> int:
    """Run all tests once, unchanged, and write which lines each one reaches and its seconds; 0 if all pass."""
    files = [str(ROOT / each) for each in SETTINGS["modules"]]
    watched = coverage.Coverage(include=files, data_file=None, config_file=False)
    watch = _Watch(watched)
    watched.start()
    code = int(pytest.main([*PYTEST, *SETTINGS["tests"]], plugins=[watch]))
    watched.stop()
    data = watched.get_data()
    lines = {each: data.contexts_by_lineno(str(ROOT / each)) for each in SETTINGS["modules"]}
    drawn = {"seconds": watch.seconds, "lines": lines, "failed": watch.failed}
    file.write_text(json.dumps(drawn))
    return code


def statement_lines(tree: ast.Module, line: int) -> set[int]:
    """Return the lines of the innermost statement that holds a line; of a compound statement those of its head."""
    found = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if line <= max(end, node.lineno):
                found = set(range(node.lineno, max(end, node.lineno) + 1))
    return found


def tests_of(mutant: Mutant, tree: ast.Module, drawn: dict[str, Any]) -> list[str]:
    """Return the tests that reach a mutant, the quickest first, as many as the seconds allow.

    What runs at import, such as a default or a field, is reached by every test that runs a line of the file.
    """
    reached = drawn["lines"][mutant.file]
    lines = {str(line) for line in statement_lines(tree, mutant.line)}
    tests = {test for line in lines & set(reached) for test in reached[line] if test}
    if not tests and any(line in reached for line in lines):
        tests = {test for contexts in reached.values() for test in contexts if test}
    kept, left = [], SETTINGS["test_seconds"]
    for test in sorted(tests, key=lambda each: drawn["seconds"][each]):
        left -= drawn["seconds"][test]
        if left < 0 and kept:
            break
        kept.append(test)
    return kept


class _Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module from a changed source, and leaves all others to the usual finders."""

    def __init__(self, file: str, source: str) -> None:
        super().__init__("opusim." + file.removesuffix(".py").replace("/", "."), str(ROOT / file))
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, name: str) -> Any:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Select:
    """A pytest plugin that runs given tests in a given order."""

    def __init__(self, tests: list[str]) -> None:
        self.order = {test: number for number, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(wanted, key=lambda item: self.order[item.nodeid])


def survives(mutant: Mutant, changed: str, tests: list[str], drawn: dict[str, Any], log: Path) -> bool:
    """Whether all tests pass with a changed source; a child that hangs or dies has noticed the change."""

    def run() -> int:
        sys.meta_path.insert(0, _Changed(mutant.file, changed))
        files = sorted({test.split("::")[0] for test in tests})
        return int(pytest.main([*PYTEST, "-x", *files], plugins=[_Select(tests)]))

    return not tests or in_child(run, 20 + 3 * sum(drawn["seconds"][test] for test in tests), log) == 0


def difference(source: str, changed: str) -> str:
    """Return the changed lines, old and new."""
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def compiles(source: str) -> bool:
    """Whether a changed source is Python; a changed `*` of a signature is not, and no test is needed to see it."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def try_all(share: int, day: int, drawn: dict[str, Any], results: Path) -> list[dict[str, Any]]:
    """Try one mutant in `share`, and return what was found of each; results that are there are not found again."""
    log = results.with_name("last.log")
    known = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    found, kept = {each["name"]: each for each in known}, []
    for file in SETTINGS["modules"]:
        source = (ROOT / file).read_text()
        tree, checked = ast.parse(source), False
        for mutant in (each for each in mutants_of(file, source) if chosen(each, share, day)):
            operator = cosmic_ray.plugins.get_operator(mutant.operator)()
            name, changed = mutant.name(source), mutate_code(source, operator, mutant.occurrence)
            if not compiles(changed):
                continue
            if name not in found:
                tests = tests_of(mutant, tree, drawn)
                if tests and not checked and not survives(mutant, source, tests, drawn, log):
                    raise SystemExit(
                        f"{file}: the tests fail without a change; see {log}, and remove the map"
                    )
                checked = checked or bool(tests)
                outcome = survives(mutant, changed, tests, drawn, log)
                found[name] = {"name": name, "line": mutant.line, "tests": len(tests), "survived": outcome}
                found[name]["difference"] = difference(source, changed)
                with results.open("a") as stream:
                    stream.write(json.dumps(found[name]) + "\n")
            kept.append(found[name])
    return kept


def main() -> None:
    """Draw the map if it is not there, try the mutants of the day and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--day", type=int, default=int(time.time()) // 86_400)
    parser.add_argument("--least", type=float, default=85.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    given = parser.parse_args()
    os.chdir(ROOT)
    lines = sum(len(code_lines(file, (ROOT / file).read_text())) for file in SETTINGS["modules"])
    print(f"{lines:,} lines of code in {len(SETTINGS['modules'])} modules", flush=True)
    if lines > SETTINGS["most_lines"]:
        raise SystemExit(f"at most {SETTINGS['most_lines']:,} are judged; leave out what only reads or shows")
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in SETTINGS["preload"]:
        importlib.import_module(name)
    file = given.folder / "map.json"
    if not file.exists() and in_child(lambda: draw_map(file), 7_200, given.folder / "map.log") != 0:
        failed = json.loads(file.read_text())["failed"] if file.exists() else "the tests did not end"
        raise SystemExit(f"the unchanged tests do not pass: {failed}; see map.log there, and remove {file}")
    tried = try_all(given.share, given.day, json.loads(file.read_text()), given.folder / "results.jsonl")
    survivors = [each for each in tried if each["survived"]]
    for each in survivors:
        print(f"{each['name']}, line {each['line']}, {each['tests']} tests\n{each['difference']}\n")
    killed, number = len(tried) - len(survivors), max(len(tried), 1)
    low, high = stats.binomtest(killed, number).proportion_ci(method="wilson")
    interval = f"95 % confidence: {100 * low:.1f} to {100 * high:.1f} %"
    print(f"{killed} of {len(tried)} mutants killed, {100 * killed / number:.1f} % ({interval})")
    print(f"at least {given.least:g} % are needed")
    if 100 * killed / number < given.least:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
