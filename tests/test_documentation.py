"""The pages point at what exists: links, files, folders, names and figures; their examples run."""

import ast
import doctest
import importlib
import re
import warnings
from pathlib import Path

import pytest

import opusim
from benchmarks.results_file import load_results
from tests.support.imports import product_files

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
CHANGELOG = ROOT / "CHANGELOG.md"
PAGES = [
    *(README, CONTRIBUTING, CHANGELOG, ROOT / "benchmarks" / "README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
]
WRITTEN = [page for page in PAGES if page.parent.name != "benchmarks"]
PACKAGES = ("opusim", "accounting", "training")
ENTRY_POINT_GROUPS = (
    *("opusim.devices", "opusim.trainers", "opusim.protections", "opusim.mechanisms", "opusim.noise_laws"),
    "opusim.accountants",
)

BANNED = (
    *("the bar", "somebody", "whoever", "nobody", "hardly", "a person's own", "goes on", "go on with"),
    "beside",
    *("None where", "alone", "issue 1", "/work/"),
)
"""Words that these pages do without, most of them with a plainer one: only, next to, resume, or None if."""


def without_code(text: str) -> str:
    """A page without fenced blocks, of which links and words are not the page's own."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page to no file or to no heading."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def missing_files(text: str) -> list[str]:
    """Files and folders of this repository that a page names and that do not exist."""
    folders = "opusim|accounting|training|tests|benchmarks|examples|docs"
    named = re.findall(rf"(?<![\w./-])((?:{folders})/(?!_build)[\w/-]+(?:\.(?:py|md|toml|png|diff))?)", text)
    return [name for name in named if not (ROOT / name).exists()]


def missing_names(text: str) -> list[str]:
    """Dotted names of this repository's code that a page shows in backticks and that neither exist nor once did."""
    missing = []
    for name in re.findall(r"(?<!was )`(?!opusim\.X`)((?:opusim|accounting|training)(?:\.\w+)+)`", text):
        parts = name.split(".")
        parts = parts if parts[0] == "opusim" else ["opusim", *parts]  # as the changelog of 0.2 names a layer
        for end in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:end]))
            except ModuleNotFoundError:
                continue
            break
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # the changelog of 0.2
            for part in parts[end:]:
                found = getattr(found, part, None)
        if found is None and not name.startswith(ENTRY_POINT_GROUPS):
            missing.append(name)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    assert broken_links(page, text) == []
    assert missing_files(text) == []
    assert missing_names(text) == []


def test_broken_links_and_unwelcome_words_are_caught() -> None:
    for target in ("docs/nothing.md", "docs/privacy-labels.md#99-nothing"):
        assert broken_links(README, f"[a]({target})") == [target]
    assert broken_links(README, "[a](docs/privacy-labels.md#5-randomized-response)") == []
    assert missing_files("see opusim/nothing.py and opusim/errors.py") == ["opusim/nothing.py"]
    assert missing_files("`docs/zo.md`, `tests/faults`, tests/support") == ["docs/zo.md", "tests/faults"]
    for name in ("opusim.nothing", "opusim.accounting.composition.calibrat"):
        assert missing_names(f"`opusim.noise`, `{name}`") == [name]
    assert unwelcome("It goes on with `alone`, as nobody knows.") == ["nobody", "goes on"]


@pytest.mark.parametrize(
    "page", [page for page in WRITTEN if ">>> " in page.read_text()], ids=lambda page: page.stem
)
def test_examples_run(page: Path) -> None:
    failures, tried = doctest.testfile(str(page), False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert (failures, tried > 0) == (0, True)


def test_the_readme_is_short_and_has_five_headline_figures() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 110
    block = text.split("<!-- measured")[1].split("<!-- end of measured")[0]
    assert len([line for line in block.splitlines() if line.startswith("|")]) == 2 + 5


def claimed_figures() -> set[str]:
    """What the README's three claims must say, from the measured results."""
    (matrix_free,) = (
        row
        for row in load_results("matrix_free")["rows"]
        if (row["n_inputs"], row["n_outputs"], row["batch"], row["threads"]) == (100_000, 1_000_000, 1024, 1)
    )
    cells = load_results("mechanism_selftest")["cells"].values()
    faulty = [run["right"] for cell in cells if cell["fault"] != "none" for run in cell["runs"]]
    sound = [run["alarm"] for cell in cells if cell["fault"] == "none" for run in cell["runs"]]
    return {
        f"{matrix_free['rate_ratio']:.2f} of the speed of a stored matrix product",
        f"in {matrix_free['peak_mib']:.0f} MiB",
        f"found {sum(faulty)} of {len(faulty)} planted faults",
        f"with {sum(sound)} alarms in {len(sound)} sound self-tests",
    }


def test_claims_of_the_readme_are_measured() -> None:
    text = " ".join(README.read_text().split())
    assert {claim for claim in claimed_figures() if claim not in text} == set()
    differences = [abs(row["difference"]) for row in load_results("device_learning")["rows"]]
    assert len(differences) == 3
    assert max(differences) <= 0.1, "the README says: within 0.1 points, three other devices"


def test_contributing_says_where_things_are() -> None:
    text = CONTRIBUTING.read_text()
    places = text.split("## Where to change what")[1].split("## ")[0]
    rows = [line for line in places.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 10
    for row in rows:
        named = re.findall(r"`([\w/.]+)`", row)
        assert len(named) >= 2, row
        assert [name for name in named if not (ROOT / name).exists()] == []
    assert misplaced(text) == []
    wrong = text.replace("`fill_numbers`", "`fill_nothing`")
    assert misplaced(wrong) == ["opusim/camera/stages.py: fill_nothing"]
    folders = {
        f"{package}/{path.parent.name}"
        for package in PACKAGES
        for path in (ROOT / package).glob("*/__init__.py")
        if not path.parent.is_symlink()
    }
    assert listed_folders(text) == folders


def misplaced(text: str) -> list[str]:
    """Rows of the table of places whose file does not define the name."""
    rows = re.findall(r"^\| .+ \| `([\w/]+\.py)`, `(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 5
    return [f"{file}: {name}" for file, name in rows if name not in definitions(ROOT / file)]


def definitions(file: Path) -> set[str]:
    """Functions, methods and classes of a file."""
    if not file.exists():
        return set()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


def listed_folders(text: str) -> set[str]:
    """The folders of the packages in CONTRIBUTING's tree."""
    found, package = set(), ""
    for line in text.split("```text")[1].split("```")[0].splitlines():
        name = line.split("/")[0]
        if line.startswith("  "):
            found.add(f"{package}/{name.strip()}")
        else:
            package = name
    return {folder for folder in found if folder.split("/")[0] in PACKAGES}


def test_every_public_name_is_documented_once_and_every_page_in_the_index() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"^\.\. auto\w+:: (?:opusim\.(?:\w+\.)*)(\w+)(?:\(\))?$", text, re.MULTILINE)
    subjects = [getattr(opusim, name) for name in dir(opusim) if name not in opusim.__all__]
    public = {*opusim.__all__, *(name for each in subjects for name in getattr(each, "__all__", ()))}
    assert not [name for name in public if name not in documented]
    assert not [name for name in opusim.__all__ if documented.count(name) != 1]
    index = (ROOT / "docs" / "index.md").read_text()
    listed = set(" ".join(re.findall(r"```\{toctree\}(.*?)```", index, re.DOTALL)).split())
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - listed == {"index"}


def unwelcome(text: str) -> list[str]:
    """Banned words of a text, outside of code."""
    prose = " ".join(re.sub(r"`[^`]*`", "", without_code(text)).split())
    return [word for word in BANNED if re.search(rf"\b{re.escape(word)}\b", prose)]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_in_plain_words(page: Path) -> None:
    assert unwelcome(page.read_text()) == []


def printed(lines: list[str]) -> set[str]:
    """Texts of the code that may print some lines, with "..." for what varies; names of constants are filled in."""
    parts = [part for line in lines for part in re.findall(r"[\w' ]{16}", line)]
    sources = (file.read_text() for file in product_files().values())
    trees = [ast.parse(source) for source in sources if any(part in source for part in parts)]
    texts = {
        target.id: node.value.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }

    def text(part: ast.expr) -> str:
        if isinstance(part, ast.Constant):
            return str(part.value)
        name = part.value if isinstance(part, ast.FormattedValue) else None
        return texts.get(name.id, "...") if isinstance(name, ast.Name) else "..."

    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            found.add(re.sub(r"(\.\.\.)+", "...", "".join(map(text, node.values))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_troubleshooting_quotes_what_the_program_prints() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Words of optics")[0]
    quoted = re.findall(r"^```text\n(.+)\n```$", text, re.MULTILINE)
    known = printed(quoted)
    assert len(quoted) >= 10
    assert len(text.split()) <= 700
    assert [line for line in quoted if not any(line in each for each in known)] == []
    assert not any(quoted[0].replace("guessing", "chance") in each for each in known)
