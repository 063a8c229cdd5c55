"""Load user-supplied code that a configuration names by import path, only after the user agrees.

Importing a module executes it. The folder of a run that names a model or a loss by import path holds the path, the file
and the file's digest, so that a reader of the folder can look at the file first. The digest covers that one file, not
what it imports. What a folder executes follows from its configuration and its network (`named_code`), never from that
list, which an untrusted folder may lack.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opusim.errors import ConfigError
from opusim.files import quoted
from opusim.plugins import FOREIGN_ERRORS
from opusim.training.config.sections import (
    DataConfig,
    SplitRule,
    import_path_of,
    is_data_factory,
    is_import_path,
)
from opusim.training.data import Dataset
from opusim.training.data.catalogue import build_dataset
from opusim.training.data.tables import own_dataset
from opusim.training.errors import RunFolderError

_LAYERS = frozenset({"accounting", "hw_configs", "training"})
_JOINED = {
    "opusim.training.networks.image_models": "opusim.training.networks.models",
    "opusim.training.convex.gated": "opusim.training.convex.trainer",
}
"""Modules whose models have moved, with their module of today."""


def load_object(path: str, *, key: str) -> Any:
    """Import the object that a path such as my_package.models:build names; this executes its module.

    Modules are looked up where Python looks and in the current folder. ConfigError, with the key, is raised if it is no
    import path, there is no such module or name, or importing it fails.
    """
    if not is_import_path(path):
        reason = f"{path!r} is no import path; write package.module:name"
        raise ConfigError("configuration", key, reason)
    module, _, name = path.partition(":")
    try:
        with _current_folder():
            found = import_module(_present(module))
    except FOREIGN_ERRORS as error:
        meant = import_path_of(path) if module.endswith(".py") else None
        remedy = f"did you mean {meant!r}?" if meant else "check the name, or install it"
        reason = f"{path!r} cannot be imported ({type(error).__name__}: {error}); {remedy}"
        raise ConfigError("configuration", key, " ".join(reason.split())) from error
    try:
        return reduce(getattr, name.split("."), found)
    except AttributeError as error:
        reason = f"{path!r} names nothing: {module} at {_file(found)} has no {name!r}; check the name"
        raise ConfigError("configuration", key, reason) from error


def records_of(path: str) -> Any:
    """Call the function that data.name names; return its records, in a form that `opusim.train(data=...)` takes.

    Raises ConfigError if it is none, or returns a Dataset of opusim, which has keys of its own.
    """
    function = load_object(path, key="data.name")
    if not callable(function):
        reason = f"{path!r} is a {type(function).__name__}; name a function that returns (x, y)"
        raise ConfigError("configuration", "data.name", reason)
    records = function()
    if isinstance(records, Dataset):
        reason = f"{path!r} returns a Dataset; let it return (x, y), a data set of torch or a DataFrame"
        raise ConfigError("configuration", "data.name", reason)
    return records


def named_dataset(options: DataConfig, split: SplitRule | None = None) -> Dataset:
    """Load what data.name names: a known data set, a file, or what a user's function returns.

    Raises ConfigError, DataError, TypeError or ValueError; see `build_dataset`, `own_dataset` and `records_of`.
    """
    if options.factory is None:
        return build_dataset(options, split)
    rule = split or options.split or "index"
    return own_dataset(options, rule, records_of(options.factory), name=options.name)


def code_facts(path: str) -> dict[str, str]:
    """Return the path, the file and the digest of an object as JSON values, without importing its module.

    The digest is BLAKE2b over the file that holds the module; files that it imports are not covered. The package of a
    module is imported if there is one.
    """
    module, known = path.partition(":")[0], "no file"
    if module in sys.modules:
        known = _file(sys.modules[module])
    else:
        with suppress(*FOREIGN_ERRORS), _current_folder():  # errors of the user's package
            spec = find_spec(_present(module))
            known = known if spec is None or spec.origin is None else spec.origin
    file = Path(known)
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if file.is_file() else "none"
    return {"path": path, "file": str(file), "digest": digest}


def own_files(parts: Iterable[Any]) -> list[Path]:
    """Return the files that define objects: of a function its file, else those of its class and of the class's bases.

    Files of opusim, of installed packages and of the standard library are left out.
    """
    names: dict[str, None] = {}
    for part in parts:
        while isinstance(part, partial):
            part = part.func
        definers = [part] if hasattr(part, "__qualname__") else type(part).__mro__
        names |= dict.fromkeys(str(each.__module__) for each in definers)
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found: dict[Path, None] = {}
    for name in names:
        if name in sys.modules and name.partition(".")[0] != "opusim":
            file = Path(getattr(sys.modules[name], "__file__", None) or "no file").resolve()
            packaged = {"site-packages", "dist-packages"}.intersection(file.parts)
            if file.is_file() and not packaged and installed.isdisjoint(file.parents):
                found[file] = None
    return list(found)


def _present(module: str) -> str:
    """Return the name that a module has now: before 0.3, folders named modules of opusim without `opusim.`."""
    if module.rpartition(".")[0].partition(".")[0] not in _LAYERS:
        return module
    with suppress(*FOREIGN_ERRORS):
        if find_spec(module) is not None:  # one of the user's
            return module
    return _JOINED.get(f"opusim.{module}", f"opusim.{module}")


def _file(module: Any) -> str:
    return str(getattr(module, "__file__", None) or "no file")


@contextmanager
def _current_folder() -> Iterator[None]:
    """Look in the current folder too, after every other place, as `python script.py` would."""
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def named_code(facts: Mapping[str, Any]) -> list[str]:
    """Return the import paths that reading or resuming a run executes, from the whole of its `config.json`.

    They are those of model.name, of loss, of data.name, and of the recipe by which the network is built again.
    """
    config, recipe = facts["config"], facts["network"].get("recipe", {})
    data = str(config.get("data", {}).get("name"))
    names = (config.get("model", {}).get("name"), recipe.get("name"), config.get("loss"))
    names += (data,) if is_data_factory(data) else ()
    return [name for name in dict.fromkeys(names) if isinstance(name, str) and is_import_path(name)]


def described_code(facts: Mapping[str, Any]) -> list[str]:
    """Return a line for each piece of user-supplied code that a run's `config.json` names."""
    listed = facts.get("code", [])
    unlisted = [name for name in named_code(facts) if name not in {code["path"] for code in listed}]
    return [
        *(f"{code['path']} from {code['file']}, BLAKE2 {code['digest']}" for code in listed),
        *(f"{name}, for which the folder lists no file" for name in unlisted),
    ]


def require_trusted(facts: Mapping[str, Any], *, trust_code: bool) -> None:
    """Refuse (RunFolderError) to execute the code that a run's `config.json` names unless the user agrees."""
    if (lines := described_code(facts)) and not trust_code:
        raise RunFolderError(
            f"this run executes user-supplied code: {'; '.join(lines)}. Look at it, then give --trust-code (from "
            "Python: trust_code=True)"
        )


def require_importable(facts: Mapping[str, Any]) -> None:
    """Refuse a run whose user-supplied code is not where Python looks; nothing is executed.

    RunFolderError names the folder that held a module's top package, from the run's `config.json`.
    """
    for code in facts.get("code", []):
        module, file = code["path"].partition(":")[0], Path(code["file"])
        with _current_folder():
            top = _present(module).partition(".")[0]
            if top in sys.modules or find_spec(top) is not None:
                continue
        parents = file.parents[module.count(".") + (file.stem == "__init__") :]
        folder = parents[0] if parents else file.parent
        raise RunFolderError(
            f"{code['path']!r}, which the run names, cannot be imported from this folder; run from {folder}, or set "
            f"PYTHONPATH={quoted(folder)}"
        )


def warn_if_changed(stored: Sequence[Mapping[str, str]]) -> None:
    """Warn about user-supplied code that has changed since training, before it is imported."""
    pairs = [(code, code_facts(code["path"])) for code in stored]
    changed = [
        f"{code['path']} is now {found['file']}, BLAKE2 {found['digest']}, and was {code['file']}, BLAKE2 "
        f"{code['digest']}"
        for code, found in pairs
        if found["digest"] != code["digest"]
    ]
    if changed:
        warnings.warn(
            f"{'; '.join(changed)} when the run was trained; its model may compute something else",
            stacklevel=3,
        )
