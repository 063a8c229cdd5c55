"""Documents of any content end in their reader's documented error, in one line, or are read as what they say.

tests/training/data/test_bounded_reading.py does the same through the command, with a fixed list of damages.
"""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusim.accounting.explanation import LedgerFacts, Statement
from opusim.accounting.guarantee import LedgerCorrupt, NoGuarantee
from opusim.accounting.journal import Journal, head_file
from opusim.accounting.ledger import LEDGER_FILE, CertificateFacts, Ledger, read_ledger
from opusim.accounting.mechanisms.records import RecordCentral
from opusim.description.schema import LightonSettings, load_description, packaged_names, parse_description
from opusim.devices.access import require_lighton
from opusim.devices.certificate import Certificate, GaussianLaw, PhotonCountLaw, digest_of, load_certificate
from opusim.errors import ConfigError, DeviceUnavailable
from opusim.files import parse_json, parse_toml
from opusim.serving.keys import make_key, read_key
from opusim.training.config.run import RunConfig, load_config
from opusim.training.sweeps.sweep import points_of, read_spec
from tests.support.hostile_files import (
    DATES,
    LONGEST,
    ODD,
    damaged_bytes,
    damaged_values,
    examples,
    read_or_refused,
    to_json,
    to_toml,
)

TOML_ODD = (*ODD, *DATES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


DESCRIPTIONS = {name: load_description(name).dump() for name in packaged_names()}


@examples(300)
@given(
    content=st.sampled_from(sorted(DESCRIPTIONS)).flatmap(
        lambda n: damaged_values(DESCRIPTIONS[n], odd=TOML_ODD)
    )
)
def test_device_descriptions(folder: Path, content: dict[str, Any]) -> None:
    file = written(folder / "device.toml", to_toml(content))
    found = read_or_refused(lambda: load_description(file), ConfigError, names="device.toml")
    if found is not None:
        assert parse_description("again", found.dump()) == found
        assert len(digest_of(found)) == 32


CERTIFICATES = [
    Certificate(
        device="camera", description_digest="0" * 32, date="2026-01-01", n_inputs=2, n_outputs=2, frames=10,
        confidence=0.99, beta=1e-6, noise=law, estimates={"gain": {"value": 1.0, "low": 0.9, "high": 1.1}},
        tests=[{"text": "independent", "standard_errors": 1.0, "holds": True}], remarks=["a remark"],
    ).dump()
    for law in (
        GaussianLaw(std=0.01),
        PhotonCountLaw(dark_e_low=1.0, dark_e_high=2.0, light_ratio_low=0.9, light_ratio_high=1.1),
    )
]  # fmt: skip


@examples(150)
@given(content=st.sampled_from(CERTIFICATES).flatmap(lambda c: damaged_values(c, odd=TOML_ODD)))
def test_certificates(folder: Path, content: dict[str, Any]) -> None:
    file = written(folder / "certificate.toml", to_toml(content))
    found = read_or_refused(lambda: load_certificate(file), ConfigError, names="certificate.toml")
    if found is not None:
        assert Certificate.model_validate(found.dump()) == found
        assert len(found.digest) == 32


@examples(150)
@given(data=st.data())
def test_keys(folder: Path, data: st.DataObject) -> None:
    if not (folder / "keys").exists():
        make_key("ada", folder / "keys")
    sound = read_key(folder / "keys" / "ada.key", secret=True)
    values = sound.model_dump(by_alias=True)
    content = data.draw(
        damaged_values(values, odd=TOML_ODD).map(to_toml).map(str.encode)
        | damaged_bytes(to_toml(values).encode())
    )
    file = written(folder / "odd.key", content)
    file.chmod(0o600)
    found = read_or_refused(lambda: read_key(file, secret=True), ConfigError, names="odd.key")
    if found is not None:
        again = written(folder / "odd.key", found.text(with_secret=True))
        assert read_key(again, secret=True) == found


@examples(100)
@given(
    content=damaged_values({"opu": {"name": "OPU", "pool": [1, 2]}}).map(to_json) | damaged_bytes(b'{"a": 1}')
)
def test_configurations_of_appliances(folder: Path, content: bytes) -> None:
    file = written(folder / "opu.json", content)
    settings = LightonSettings(config_file=str(file), simulated=True)
    with patch("importlib.util.find_spec"):  # lightonml is found
        read_or_refused(lambda: require_lighton("opu", settings), DeviceUnavailable, names="opu.json")


CONFIGURATIONS = [
    RunConfig().model_dump(mode="json"),
    *(
        load_config(None, [f"trainer.kind={kind}", *more]).model_dump(mode="json")
        for kind, more in (
            ("bp", ["protection.kind=record", "protection.noise_multiplier=1.0"]),
            ("ulr", []),
            ("zo", []),
            ("convex", []),
        )
    ),
]


@examples(400)
@given(
    content=st.sampled_from(CONFIGURATIONS).flatmap(lambda c: damaged_values(c, odd=TOML_ODD)),
    suffix=st.sampled_from([".toml", ".json"]),
)
def test_run_configurations(folder: Path, content: dict[str, Any], suffix: str) -> None:
    text = to_toml(content).encode() if suffix == ".toml" else to_json(content)
    file = written(folder / f"run{suffix}", text)
    found = read_or_refused(lambda: load_config(file), ConfigError, names=file.name)
    if found is not None:
        assert load_config(found.model_dump(mode="json")).digest() == found.digest()


SPEC = {
    "title": "t",
    "noise": "device.noise.sigma",
    "config": {"epochs": 2, "data": {"name": "digits"}},
    "axes": {"seed": [0, 1]},
    "series": [
        {"name": "photonic", "axes": {"device": {"noise": {"sigma": [0.0, 1.0]}}}},
        {"name": "reference", "reference": True, "config": {"trainer": {"kind": "bp"}}},
    ],
}


@examples(200)
@given(content=damaged_values(SPEC, odd=TOML_ODD))
def test_sweeps(folder: Path, content: dict[str, Any]) -> None:
    file = written(folder / "spec.toml", to_toml(content))
    found = read_or_refused(lambda: points_of(*read_spec(file)), ConfigError, names="spec.toml")
    for point in found or ():
        assert point.identity


@examples(100)
@given(content=damaged_bytes(to_toml(SPEC).encode()))
def test_bytes_as_any_toml_file(folder: Path, content: bytes) -> None:
    file = written(folder / "bytes.toml", content)
    for read in (load_description, load_certificate, load_config, lambda path: points_of(*read_spec(path))):
        read_or_refused(lambda read=read: read(file), ConfigError, names="bytes.toml")  # type: ignore[misc]


def ledger_in(folder: Path) -> Path:
    """A ledger of release mode with a line of every kind."""
    file = folder / LEDGER_FILE
    if not file.exists():
        facts = CertificateFacts(
            digest="c" * 32, device="camera", date="2026-01-01", age_days=0, beta=1e-7, law="law",
            remarks=("r",), every_steps=1, finds=0.5,
        )  # fmt: skip
        with Ledger(file, mode="release", delta=1e-5, enforced=True, block=10) as ledger:
            ledger.note_certificate(facts)
            step = RecordCentral(
                noise_multiplier=2.0, clip_norm=1.0, divisor=10.0, sampling_probability=0.1,
                certificate="c" * 32, beta=1e-7,
            )  # fmt: skip
            ledger.pay_once("labels", step)
            for number in range(5):
                ledger.pay(number, step)
            ledger.return_unused()
    return file


@examples(200)
@given(data=st.data())
def test_bytes_of_ledgers(folder: Path, data: st.DataObject) -> None:
    """A damaged ledger is refused, or is the same one but for a line that was not counted yet."""
    sound = ledger_in(folder)
    place = folder / "damaged"
    place.mkdir(exist_ok=True)
    file, head = place / LEDGER_FILE, place / head_file(sound).name
    shutil.copy(sound, file)
    shutil.copy(head_file(sound), head)
    hurt = data.draw(st.sampled_from([file, head]))
    hurt.write_bytes(data.draw(damaged_bytes(hurt.read_bytes())))
    found = read_or_refused(lambda: read_ledger(file), LedgerCorrupt, names=hurt.parent.name)
    if found is not None:
        assert found.payments == read_ledger(sound).payments


@examples(200)
@given(data=st.data())
def test_entries_of_ledgers(folder: Path, data: st.DataObject) -> None:
    """Entries of other values in a chain whose digests fit: no entry is believed that was never written so."""
    entries = json.loads(json.dumps(Journal(ledger_in(folder)).entries))
    changed = data.draw(damaged_values(entries))
    file = folder / "entries.jsonl"
    for old in (file, head_file(file)):
        old.unlink(missing_ok=True)
    journal = Journal(file)
    try:
        for entry in changed:
            journal.append(entry)
    except (ValueError, TypeError, AttributeError):  # the journal itself writes no such entry
        return
    finally:
        journal.close()
    found = read_or_refused(lambda: read_ledger(file), LedgerCorrupt, names="entries.jsonl")
    if found is None:
        return
    stated = read_or_refused(found.guarantees, NoGuarantee)
    for guarantee in stated or ():
        assert guarantee.epsilon >= 0
        assert 0 <= guarantee.delta < 1


@pytest.fixture(scope="module")
def statement(folder: Path) -> dict[str, Any]:
    content = read_ledger(ledger_in(folder))
    found = Statement(
        mode=content.mode, guarantees=tuple(content.guarantees()), mechanisms=tuple(content.mechanisms),
        certificates=content.certificates, ledger=LedgerFacts.of(content, ["summary.json"]), run=None,
        versions={"python": "3"},
    )  # fmt: skip
    return dict(json.loads(json.dumps(found.to_json())))


@examples(200)
@given(data=st.data())
def test_statements(statement: dict[str, Any], data: st.DataObject) -> None:
    content = data.draw(damaged_values(statement))
    found = read_or_refused(lambda: Statement.from_json(content), ValueError)
    if found is not None:
        assert Statement.from_json(found.to_json()) == found


def test_what_json_toml_and_paths_cannot_hold_is_refused() -> None:
    texts = (f'{{"a": [{2**64}]}}', f'{{"a": -{10**400}}}', '["\\ud800"]', '{"\\uDFFF": 1}', '["\ud800"]')
    for text in (*texts, texts[2].encode(), texts[4].encode("utf-8", "surrogatepass")):
        with pytest.raises(json.JSONDecodeError, match=r"more than 64 bits|half a character|can't decode"):
            parse_json(text)
    with pytest.raises(tomllib.TOMLDecodeError, match="more than 64 bits"):
        parse_toml(f"a = 0x{'f' * 5000}")
    assert parse_json(f'["\\ud83d\\ude00", {2**64 - 1}]') == ["\U0001f600", 2**64 - 1]
    with pytest.raises(ConfigError, match="cannot be read"):
        load_description("a\0b.toml")


def test_a_message_is_a_line_to_read_whatever_the_file_holds(folder: Path) -> None:
    file = written(folder / "run.toml", f'trainer.kind = "{"x" * 100_000}"')
    with pytest.raises(ConfigError, match=r"run\.toml: trainer\.kind: 'xxx.* \.\.\. .*known are") as error:
        load_config(file)
    assert len(str(error.value)) < LONGEST


def test_a_reader_with_another_error_is_noticed() -> None:
    """The planted faults: a reader that trips over what it reads, and messages that are no line."""

    def refuse(text: str) -> None:
        raise ValueError(text)

    with pytest.raises(KeyError):
        read_or_refused(lambda: {}["a"], ValueError)
    for text in ("two\nlines", "x" * (LONGEST + 1), "", "of another file"):
        with pytest.raises(AssertionError):
            read_or_refused(lambda text=text: refuse(text), ValueError, names="two")  # type: ignore[misc]
