"""What a user gives is honoured or refused: no key, flag or file is passed over in silence."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import opusim
from opusim.description.section import flat, merged, nested
from opusim.errors import ConfigError
from opusim.training.cli import main
from opusim.training.cli.options import key_rows
from opusim.training.config import RunConfig, load_config
from opusim.training.config.kinds import KINDS
from opusim.training.config.run import effects_of, stored_config, unused
from opusim.training.engine import session
from opusim.training.sweeps.sweep import points_of, read_spec
from tests.support.command import opusim as command

_ALWAYS = """
epochs loss mode schema_version threads torch_device
model.name
data.validation_fraction
optimizer.name optimizer.lr optimizer.weight_decay optimizer.schedule optimizer.averaged_tail
sampler.scheme
protection.kind protection.delta protection.rounds protection.relation protection.epsilon
protection.noise_multiplier protection.clip_norm protection.bands protection.fixed_batches protection.unit
protection.clipping protection.noise protection.floor protection.reference_size protection.equalise
protection.reference_every protection.flat_prior protection.stages
checkpoint.every_steps checkpoint.keep
trainer.kind trainer.order trainer.signal_gain trainer.tau_b trainer.tau_h_max trainer.through_clip
trainer.form trainer.reduction trainer.noise trainer.rows_per_pass trainer.perturbation trainer.directions
trainer.shape trainer.rank trainer.settle_every trainer.keep_base trainer.hyperplanes trainer.gates
trainer.centre trainer.objective trainer.regularisation trainer.ridge trainer.gain trainer.feedback_seed
trainer.projection trainer.sigma trainer.encoding trainer.augmented_copies trainer.points trainer.error_at
trainer.rows trainer.spread trainer.slices trainer.readout_every trainer.normalised
"""
ALWAYS = set(_ALWAYS.split())
"""Keys with an effect in every configuration that has them, or which a trainer refuses by name."""

RECORD = {"kind": "record", "noise_multiplier": 1.0}
USELESS: list[tuple[str, dict[str, Any], Any]] = [
    ("model.options.depth", {}, 4),
    ("model.hidden", {"model": {"name": "vit-small"}}, [3]),
    ("trainer.points", {"trainer": {"kind": "bp"}}, ["1"]),
    ("trainer.threshold", {"model": {"name": "vit-small"}}, 0.3),
    ("trainer.relative_threshold", {"trainer": {"encoding": "planes"}}, 0.3),
    ("trainer.threshold", {"trainer": {"kind": "dfa"}}, 0.3),
    ("trainer.threshold", {"trainer": {"encoding": "planes"}}, 0.3),
    ("trainer.planes", {"trainer": {"kind": "dfa"}}, 8),
    ("trainer.planes", {}, 8),
    ("trainer.gain", {"trainer": {"kind": "bp"}}, 2.0),
    ("trainer.feedback_seed", {}, 5),
    ("trainer.projection", {}, "hadamard"),
    ("trainer.clip_width", {}, "layer"),
    ("trainer.clipped_layers", {}, "hidden"),
    ("trainer.target_std", {"trainer": {"kind": "ulr"}}, 2.0),
    ("trainer.remedy", {"trainer": {"kind": "ulr"}}, "none"),
    ("trainer.clip", {"trainer": {"kind": "ulr"}}, "module"),
    ("trainer.law", {"trainer": {"kind": "zo"}}, "laplace"),
    ("trainer.rows_at_once", {"trainer": {"kind": "zo"}}, 8),
    ("trainer.final_noise", {"trainer": {"kind": "convex"}}, 2.0),
    ("trainer.language.prompt", {"trainer": {"kind": "zo"}}, "{text} is"),
    ("trainer.language.lora_alpha", {"trainer": {"kind": "zo", "language": {"model": "m"}}}, 8.0),
    ("trainer.language.columns", {"trainer": {"kind": "zo", "language": {"model": "m"}}}, ["a", "b"]),
    (
        "trainer.language.classes", {"trainer": {"kind": "zo", "language": {"model": "m", "task": "next-token"}}},
        ["a", "b"],
    ),
    ("model.hidden", {"trainer": {"kind": "zo", "language": {"model": "m"}}}, [3]),
    ("data.name", {"trainer": {"kind": "zo", "language": {"model": "m"}}}, "mnist"),
    ("model.initial_output", {"trainer": {"kind": "zo"}}, "feedback"),
    ("data.whitening", {}, 1.0),
    ("data.context", {}, 64),
    ("data.tokenizer", {"data": {"name": "mnist"}}, "tokenizer.json"),
    ("data.test", {}, "test.txt"),
    ("data.split_seed", {"data": {"name": "text:a.txt"}}, 3),
    ("data.components", {"data": {"name": "text:a.txt"}}, 3),
    ("optimizer.momentum", {"optimizer": {"name": "adam"}}, 0.5),
    ("optimizer.nesterov", {"optimizer": {"name": "adam"}}, True),
    ("optimizer.beta1", {}, 0.5),
    ("optimizer.gamma", {}, 0.5),
    ("sampler.sampling_probability", {"sampler": {"batch_size": 64}}, 0.1),
    ("sampler.min_batch_size", {}, 3),
    ("sampler.drop_last", {"sampler": {"scheme": "poisson"}}, True),
    ("sampler.batch_size", {"sampler": {"scheme": "full-batch"}}, 10),
    ("protection.noise_multiplier", {"protection": {"kind": "label-randomized-response", "epsilon": 3.0}}, 2.0),
    ("protection.clip_norm", {"protection": {"kind": "label-randomized-response", "epsilon": 3.0}}, 2.0),
    ("protection.divisor", {"protection": {"kind": "label-randomized-response", "epsilon": 3.0}}, 2.0),
    ("protection.relation", {}, "zero_out"),
    ("protection.noise", {}, "device"),
    ("protection.noise", {"protection": {"kind": "label-randomized-response", "epsilon": 3.0}}, "device"),
    ("protection.floor", {"protection": RECORD}, 0.1),
    ("protection.reference_size", {"protection": RECORD}, 10),
    ("protection.equalise", {"protection": RECORD}, True),
    ("protection.reference_every", {"protection": RECORD}, 2),
    ("protection.layer_norms", {"protection": RECORD}, [1.0, 2.0]),
    ("protection.stability", {"protection": RECORD}, 0.1),
    ("protection.target_quantile", {"protection": RECORD}, 0.7),
    ("protection.bound_rate", {"protection": {**RECORD, "clipping": "automatic"}}, 0.1),
    ("protection.count_noise", {"protection": {**RECORD, "clipping": "per_layer"}}, 8.0),
    ("protection.flat_prior", {"protection": RECORD}, 0.1),
    ("device.noise.sigma", {"trainer": {"kind": "bp"}}, 0.5),
    ("device.name", {"trainer": {"kind": "ulr"}, "protection": RECORD}, "ideal"),
    ("seed", {"mode": "release"}, 3),
]  # fmt: skip


@pytest.mark.parametrize(("key", "base", "value"), USELESS)
def test_a_key_that_does_nothing_is_refused(key: str, base: dict[str, Any], value: Any) -> None:
    load_config(base)
    values = merged(base, nested(key, value))
    told = rf"{key}: .* does nothing here: it needs .*; (set .*, or )?leave it out"
    with pytest.raises(ConfigError, match=told) as caught:
        load_config(values)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="does nothing"):
        RunConfig.model_validate(values)


@pytest.mark.parametrize(("key", "base", "value"), USELESS)
def test_a_useless_key_is_refused_at_its_default_too(key: str, base: dict[str, Any], value: Any) -> None:
    default = flat(load_config(base).model_dump()).get(key)
    if default is None:  # off, or unknown before it is given
        return
    with pytest.raises(ConfigError, match=rf"{key}: .* does nothing here"):
        load_config(merged(base, nested(key, default)))


@pytest.mark.parametrize("kind", ["bp", "dfa", "tdfa", "pdfa", "ulr", "zo", "convex"])
@pytest.mark.parametrize("protection", ["none", "record"])
def test_a_resolved_configuration_is_taken_back(kind: str, protection: str, tmp_path: Path) -> None:
    """It names every key, also those that do nothing; a change may bring these to life."""
    base: dict[str, Any] = {"trainer": {"kind": kind}, "protection": RECORD if protection == "record" else {}}
    config = load_config(base)
    assert unused(config)
    assert load_config(config) == config
    assert stored_config(json.loads(config.model_dump_json())) == config
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"config": config.model_dump(mode="json")}))
    assert load_config(file) == config
    assert load_config(file, ["optimizer.schedule=step", "optimizer.gamma=0.5"]).optimizer.gamma == 0.5


@pytest.mark.parametrize(("key", "value"), [("model.name", "vit-small"), ("loss", "my.losses:focal")])
def test_a_value_for_other_trainers_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: '{value}' is not for trainer.kind = 'zo', .* that, or"):
        load_config({"trainer": {"kind": "zo"}, **nested(key, value)})


def test_every_key_says_when_it_has_an_effect() -> None:
    sections = [section for kinds in KINDS.values() for section in kinds.every().values()]
    effects = effects_of(RunConfig()) + [effect for section in sections for effect in section.effects]
    conditional = {key for effect in effects for key in effect.keys}
    keys = {key for key, _, _ in key_rows()}
    missing = {k for k in keys - ALWAYS if not any(f"{k}.".startswith(f"{c}.") for c in conditional)}
    assert not missing
    assert not ALWAYS - keys
    assert not (conditional & ALWAYS)


def test_a_changed_kind_keeps_what_it_knows_of_a_resolved_configuration() -> None:
    config = load_config({"trainer": {"tau_h_max": 0.5, "encoding": "planes"}, "protection": RECORD})
    changed = load_config(config, ["trainer.kind=dfa", "protection.kind=label-amplified"])
    assert (changed.trainer.kind, changed.trainer.tau_h_max) == ("dfa", 0.5)
    assert (changed.protection.kind, changed.protection.noise_multiplier) == ("label-amplified", 1.0)


class _Resolved(BaseException):
    """No error: it carries what a command resolved."""


def resolved_by_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> RunConfig:
    """What `opusim train` would train."""

    def capture(config: RunConfig, **_: object) -> None:
        raise _Resolved(config)

    monkeypatch.setattr(session, "train", capture)
    monkeypatch.setattr(sys, "argv", ["opusim", "train", *arguments])
    with pytest.raises(_Resolved) as caught:
        main()
    config: RunConfig = caught.value.args[0]
    return config


SAME: list[tuple[str, str]] = [
    ("pdfa --protect record --epsilon 3", 'protection = {kind = "record", epsilon = 3.0}'),
    (
        "bp --protect label-amplified --noise-multiplier 2",
        'protection = {kind = "label-amplified", noise_multiplier = 2.0}',
    ),
    (
        "bp --protect label-randomized-response --epsilon 3",
        'protection = {kind = "label-randomized-response", epsilon = 3.0}',
    ),
    (
        "zo --protect record --epsilon 3 --law laplace --delta 0",
        'trainer.law = "laplace"\nprotection = {kind = "record", epsilon = 3.0, delta = 0.0}',
    ),
    ("zo", ""),
    ("convex", ""),
    ("convex --method full", 'sampler.scheme = "full-batch"'),
    ("convex --epsilon 3", "protection.epsilon = 3.0"),
    ("convex --epsilon 3 --release", 'mode = "release"\nprotection.epsilon = 3.0'),
    ("convex --epsilon 3 --method poisson", 'sampler.scheme = "poisson"\nprotection.epsilon = 3.0'),
    ("convex --epsilon 3 --method poisson", 'protection = {kind = "record", epsilon = 3.0}'),
    ("dfa --sigma 0.2", "trainer.sigma = 0.2"),
    ("bp --sigma 0", "trainer.sigma = 0.0"),
    ("pdfa --sigma 0.2", "device.noise.sigma = 0.2"),
    ("ulr --sigma 0.2 --device ideal", 'trainer = {sigma = 0.2, noise = "device"}\ndevice.name = "ideal"'),
    (
        "convex --epsilon 3 --device ideal",
        'trainer.gates = "device"\nprotection = {epsilon = 3.0, noise = "device"}\ndevice.name = "ideal"',
    ),
    ("zo --text t.tsv --language-model hub/name", 'trainer.language = {text = "t.tsv", model = "hub/name"}'),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "toml"), SAME)
def test_a_key_means_the_same_from_everywhere(
    arguments: str, toml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, *flags = arguments.split()
    file = tmp_path / "run.toml"
    named = toml.replace("trainer = {", f'trainer = {{kind = "{kind}", ')
    file.write_text(named if named != toml else f'{toml}\ntrainer.kind = "{kind}"\n')
    by_command = resolved_by_command(monkeypatch, kind, *flags)
    by_file = resolved_by_command(monkeypatch, kind, "--config", str(file))
    assert by_command == by_file == load_config(file)
    assert RunConfig.model_validate(_sections(load_config(file))) == by_file


def _sections(config: RunConfig) -> dict[str, Any]:
    """The sections as models, as Python builds them."""
    return {name: getattr(config, name) for name in config.model_fields_set}


def test_another_scheme_than_the_protection_needs_is_refused_not_overridden(tmp_path: Path) -> None:
    values = {"protection": RECORD, "sampler": {"scheme": "shuffled-epochs"}, "model": {"hidden": [4]}}
    assert load_config(values).sampler.scheme == "shuffled-epochs"
    with pytest.raises(ValueError, match="'shuffled-epochs'.*Use 'poisson'"):
        opusim.train(values, folder=tmp_path)


REFUSED: list[tuple[str, str]] = [
    ("train zo --text t.tsv", r"--text: '.*t.tsv' does nothing here: it needs .*--language-model"),
    ("train pdfa --config zo.toml", "zo.toml: trainer.kind: 'zo' contradicts .*use: opusim train"),
    ("train zo --config pdfa.json", r"trainer.kind: 'pdfa' contradicts the command"),
    ("train pdfa --seed 3 --release", "seed: 3 does nothing here: it needs mode ="),
    ("train dfa --set trainer.planes=4", r"trainer.planes: 4 does nothing here"),
    ("train pdfa --set optimizer.lr=1e30", r"lr = 1e\+30 exceeds 10000.*lower it"),
    ("train bp --sigma 1e300", r"sigma = 1e\+300 exceeds 1e\+12.*lower it"),
    ("train pdfa --sigma 1e300", r"sigma = 1e\+300 exceeds 1e\+12.*lower it"),
    ("train zo --language-model m --prompt 'It was'", r"prompt = 'It was' must hold \{text\}"),
    (
        "account poisson-gaussian --target-epsilon=1 --noise-multiplier=2 --sampling-probability=0.1",
        r"--noise-multiplier = 2 and --target-epsilon = 1 contradict each other.*leave one of them out",
    ),
    ("curve spec.toml --draw-only --jobs 2", "--draw-only trains nothing; leave --jobs"),
    ("curve spec.toml --cluster tcp://a:1 --jobs 2", "--jobs = 2 does nothing with"),
    ("account convex-plan --target-epsilon 1 --batches 9 --epochs 3", r"--epochs = 3 does nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_contradiction_is_refused_in_one_line(arguments: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "zo.toml").write_text('trainer.kind = "zo"\n')
    (tmp_path / "pdfa.json").write_text(json.dumps({"config": RunConfig().model_dump(mode="json")}))
    before = set(tmp_path.iterdir())
    result = command(*shlex.split(arguments), cwd=tmp_path)
    assert result.returncode == 2, result
    (line,) = result.stderr.strip().splitlines()
    assert re.search(message, line), line
    assert set(tmp_path.iterdir()) == before


SPEC = """
title = "t"
noise = "{noise}"
config = {{ data.name = "digits", epochs = 1, model.hidden = [], trainer.kind = "bp", loss = "squared-error" }}
[axes]
optimizer.lr = [{rate}]
"""


def test_a_noise_key_that_is_no_axis_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(SPEC.format(noise="optimizer.lrr", rate=0.1))
    with pytest.raises(ConfigError, match="noise: .* is not an axis of this sweep; take one of optimizer.lr"):
        points_of(*read_spec(file))


@pytest.mark.parametrize(("rate", "code"), [(9e3, 1), (0.1, 0)])
def test_a_sweep_whose_run_failed_says_so_in_its_exit_code(rate: float, code: int, tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(SPEC.format(noise="optimizer.lr", rate=rate))
    result = command("curve", file, "--jobs", "1", cwd=tmp_path)
    assert (result.returncode, "diverged" in result.stdout) == (code, bool(code))


def test_release_runs_of_a_sweep_are_repeated_by_the_axis_seed(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text('title = "t"\nconfig.mode = "release"\naxes.seed = [0, 1]\n')
    points = points_of(*read_spec(file))
    assert len({point.identity for point in points}) == 2
    assert points[0].config == points[1].config
