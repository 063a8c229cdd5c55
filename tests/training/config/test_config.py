import json
from pathlib import Path
from typing import Any

import pytest

from opusim.description.section import merged, parse_setting
from opusim.errors import ConfigError
from opusim.training.config import RunConfig, load_config


def test_a_changed_kind_brings_its_own_defaults(tmp_path: Path) -> None:
    record = load_config({"protection": {"kind": "record", "epsilon": 3.0}})
    assert load_config(RunConfig(), ["protection.kind=record", "protection.epsilon=3"]) == record
    convex = load_config({"trainer": {"kind": "convex"}, "epochs": 2})
    for kind in ("zo", "ulr"):  # the clip of ulr is a word, that of convex a number
        other = load_config({"trainer": {"kind": kind}})
        assert load_config(other, ["trainer.kind=convex", "epochs=2"]) == convex
    own = load_config({"trainer": {"kind": "zo"}, "optimizer": {"lr": 0.5}, "sampler": {"batch_size": 250}})
    changed = load_config(own, ["trainer.kind=bp"])
    assert (changed.optimizer.lr, changed.optimizer.momentum, changed.sampler.batch_size) == (0.5, 0.9, 250)


@pytest.mark.parametrize(("values", "expected"), [
    ({"protection": {"kind": "label-readout", "noise": "device"}}, (0.04, 0.5)),
    ({"trainer": {"kind": "bp"}, "protection": {"kind": "label-randomized-response"}}, (0.04, 0.5)),
    ({"protection": {"kind": "label-amplified"}}, (0.01, 0.0)),
    ({"protection": {"kind": "label-randomized-response"}, "optimizer": {"lr": 0.01}}, (0.01, 0.5)),
    ({"protection": {"kind": "label-randomized-response"}, "optimizer": {"name": "adam"}}, (0.01, 0.0)),
    ({"protection": {"kind": "label-randomized-response"}, "model": {"name": "vit-small"}}, (0.002, 0.0)),
])  # fmt: skip
def test_labels_read_once_take_larger_steps_and_a_mean(values: dict[str, Any], expected: tuple) -> None:
    optimizer = load_config(merged(values, {"protection": {"epsilon": 3.0}})).optimizer
    assert (optimizer.lr, optimizer.averaged_tail) == expected


def test_a_full_batch_takes_no_default_batch_size() -> None:
    values = {"trainer": {"kind": "bp"}, "model": {"name": "vit-small"}}
    assert load_config(values).sampler.batch_size == 64
    full = load_config({**values, "sampler": {"scheme": "full-batch"}})
    assert full.replaced(seed=4).sampler.scheme == "full-batch"


def test_a_changed_epsilon_is_calibrated_anew(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    values = {"trainer": {"kind": "bp"}, "protection": {"kind": "record", "epsilon": 3.0}}
    config = load_config(values).replaced(protection={"noise_multiplier": 1.25})  # as a run's plan stores it
    path.write_text(json.dumps({"config": config.model_dump(mode="json")}))
    assert load_config(path, ["seed=3"]).protection.noise_multiplier == 1.25
    assert load_config(path, ["protection.epsilon=1"]).protection.noise_multiplier is None
    assert load_config(path, ["protection.delta=1e-6"]).protection.noise_multiplier is None
    given = load_config(path, ["protection.epsilon=1", "protection.noise_multiplier=2"])
    assert (given.protection.epsilon, given.protection.noise_multiplier) == (1.0, 2.0)


def test_replaced_values_are_validated() -> None:
    config = load_config({"trainer": {"kind": "bp"}, "protection": {"kind": "record", "epsilon": 3.0}})
    for change, key in (
        ({"protection": {"epsilon": -1.0}}, "protection.epsilon"),
        ({"data": {"n_classes": 1}}, "data.n_classes"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 10**9 + 1}, "epochs"),
        ({"optimizer": {"name": "adam", "momentum": 0.5}}, "optimizer.momentum"),
    ):
        with pytest.raises(ConfigError, match=key):
            config.replaced(**change)
    assert config.replaced(seed=4).replaced(seed=0) == config
    assert config.unchecked(protection={"noise_multiplier": 0.0}).protection.noise_multiplier == 0.0


def test_defaults_are_a_valid_run() -> None:
    assert load_config() == RunConfig()


def test_a_file_then_changes_then_settings(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('epochs = 3\nseed = 1\n[trainer]\nkind = "tdfa"\nthreshold = 0.2\n')
    config = load_config(path, ["trainer.threshold=0.3", "data.name=mnist"], {"seed": 2})
    assert (config.epochs, config.seed, config.trainer.kind) == (3, 2, "tdfa")
    assert (config.trainer.threshold, config.data.name) == (0.3, "mnist")


def test_the_configuration_survives_its_own_json(tmp_path: Path) -> None:
    settings = ["device.noise.sigma=0.7", "model.hidden=[3,4]"]
    settings += ["sampler.scheme=poisson-min-batch", "sampler.min_batch_size=2"]
    config = load_config(settings=settings)
    assert config.device.overrides == {"noise": {"sigma": 0.7}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"schema_version": 2, "config": config.model_dump(mode="json")}))
    assert load_config(path) == config


@pytest.mark.parametrize(("setting", "message"), [
    ("trainer.treshold=0.1", "trainer.treshold.*did you mean 'threshold'"),
    ("nonsense=1", "nonsense.*keys here are"),
    ("trainer.gain=-0.1", "trainer.gain.*at least 0, got -0.1"),
    ("batch_size=4", "batch_size: unknown key; did you mean 'sampler.batch_size'?"),
    ("epochs=1.5", "epochs: must be a valid integer, got 1.5; the default is 15"),
    ("trainer.kind=backprop", "trainer.kind: 'backprop' is no trainer; did you mean 'bp'?"),
    ("trainer.kind=forest", "trainer.kind: 'forest' is no trainer; known are 'bp', 'convex', 'dfa'"),
    ("trainer.kind=pdf", "trainer.kind: 'pdf' is no trainer; did you mean 'pdfa'"),
    ("protection.kind=3", "protection.kind: 3 is no protection; known are"),
    ("protection={kind='label-budget'}", "protection.kind: 'label-budget' was dropped; take"),
    ("protection={kind='label-budget', epsilon=1}", "protection.kind: 'label-budget' was dropped; take"),
    ("trainer={kind='dfa', projection='hadamard'}", "trainer.projection: 'hadamard' was dropped"),
    ("protection={kind='label-readout', epsilon=1}", "protection.noise: 'digital' was dropped; take"),
    ("trainer.rows=3.5", r"trainer\.rows: 3\.5: must be 'each', 'sum' or a whole number of at least 1"),
    ("model.name=own.Net", "did you mean 'own:Net'"),
    ("model.name=nets/own.py", "is no model"),
    ("model.name=./nets/own.py:Net", "did you mean 'nets.own:Net'"),
    ("trainer=3", "trainer: .*got 3|trainer: is a section, not one value; give its keys instead of 3"),
    ("protection=[1]", "protection: is a section"),
    ("schema_version=1", "schema_version: 1 is not 2"),
    ("epochs=many", "epochs.*valid integer.*'many'"),
    ("optimizer.lr=nan", "optimizer.lr"),
    ("model.hidden=[0]", "model.*width below 1"),
    ("threshold", "key=value"),
    ("trainer.sigma=0.1", "device.noise.sigma"),
    ("trainer.tau_b=1.0", "published"),
    ("model.output_activation=tanh", "takes logits"),
])  # fmt: skip
def test_bad_settings_are_one_line_that_names_the_key(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(settings=[setting])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("changes", "key"), [
    ({"protection": {"relation": "add_or_remove_one", "epsilon": 3.0}}, "protection.relation"),
    ({"sampler": {"sampling_probability": 0.05}, "protection": {"epsilon": 3.0}}, "sampler.sampling_probability"),
    ({"data": {"split": "content"}, "protection": {"epsilon": 3.0}}, "data.split"),
])  # fmt: skip
def test_a_rule_about_several_sections_names_its_key_once(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"protection": {"kind": "record"}}, changes=changes)
    assert caught.value.key == key
    assert str(caught.value).count("configuration:") == 1
    assert caught.value.reason.partition(" ")[0] != key


def test_settings_are_read_as_toml_or_words() -> None:
    assert parse_setting("a.b=1.5") == {"a": {"b": 1.5}}
    assert parse_setting("a=[1, 2]") == {"a": [1, 2]}
    assert parse_setting("a=word") == {"a": "word"}
    assert parse_setting("a=256,1e2, -0.5") == {"a": [256, 100.0, -0.5]}
    assert parse_setting("a=x,1") == {"a": "x,1"}
    assert parse_setting('a="1.5"') == {"a": "1.5"}


def test_merging_goes_key_by_key() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": 4}) == {"a": {"b": 3, "c": 2}, "d": 4}


def test_the_name_of_a_trainer_is_a_configuration() -> None:
    assert load_config("zo", ["epochs=2"]) == load_config({"trainer": {"kind": "zo"}, "epochs": 2})


@pytest.mark.parametrize(
    ("setting", "key", "word"),
    [("camera.sensor.read_noise_e=20", "camera", "device.camera"), ("n_outputs=20", "n_outputs", "device.n_outputs")],
)  # fmt: skip
def test_a_key_of_a_device_is_shown_its_place(setting: str, key: str, word: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_config(None, [setting])
    assert found.value.key == key
    assert word in found.value.reason
