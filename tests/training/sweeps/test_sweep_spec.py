"""A sweep's spec becomes points, or is refused with its series and key before anything runs."""

from pathlib import Path

import pytest

from opusim.errors import ConfigError
from opusim.training.sweeps.sweep import Point, one_at_a_time, points_of, read_spec

SPEC = """\
title = "t"
[config]
epochs = 2
data.name = "digits"
[axes]
seed = [0, 1]
[[series]]
name = "photonic"
[series.axes]
device.noise.sigma = [0.0, 1.0, 3.0]
[[series]]
name = "reference"
reference = true
config = { trainer = { kind = "bp" } }
"""


def points(tmp_path: Path, text: str) -> list[Point]:
    file = tmp_path / "spec.toml"
    file.write_text(text)
    return points_of(*read_spec(file))


def test_a_series_takes_all_combinations_of_its_axes_and_those_of_the_sweep(tmp_path: Path) -> None:
    found = points(tmp_path, SPEC)
    assert len(found) == 2 * 3 + 2
    assert {(p.values["seed"], p.values["device.noise.sigma"]) for p in found if p.series == "photonic"} == {
        (seed, sigma) for seed in (0, 1) for sigma in (0.0, 1.0, 3.0)
    }
    assert found[1].config.device.overrides == {"noise": {"sigma": 1.0}}
    assert found[-1].config.trainer.kind == "bp"
    assert {p.config.epochs for p in found} == {2}
    assert {p.config.threads for p in found} == {1}


def test_a_table_of_more_runs_than_anyone_can_mean_is_refused_at_once(tmp_path: Path) -> None:
    axes = "".join(f"optimizer.k{number} = {list(range(100))}\n" for number in range(20))
    with pytest.raises(ConfigError, match="axes: make 10,000,000,.* runs, more than 10,000"):
        points(tmp_path, f'title = "t"\n[axes]\n{axes}')


def test_axes_may_be_quoted_dotted_or_tables(tmp_path: Path) -> None:
    quoted = SPEC.replace("device.noise.sigma =", '"device.noise.sigma" =')
    table = SPEC.replace("[series.axes]\ndevice.noise.sigma =", "[series.axes.device.noise]\nsigma =")
    wanted = [point.identity for point in points(tmp_path, SPEC)]
    assert [point.identity for point in points(tmp_path, quoted)] == wanted
    assert [point.identity for point in points(tmp_path, table)] == wanted


def test_points_of_one_configuration_share_a_run(tmp_path: Path) -> None:
    found = points(tmp_path, SPEC + '[[series]]\nname = "again"\nconfig = { trainer = { kind = "bp" } }\n')
    assert [p.identity for p in found[-2:]] == [p.identity for p in found[-4:-2]]
    assert len({p.identity for p in found}) == 8


PHOTONIC, REFERENCE = ", series 'photonic'", ", series 'reference'"
AXIS = "device.noise.sigma = [0.0, 1.0, 3.0]"
OTHERS = '[[published]]\nname = "p"\n{}\n[axes]'


@pytest.mark.parametrize(("old", "new", "place", "words"), [
    ("seed = [0, 1]", "seed = []", PHOTONIC, "axes.seed: is empty"),
    ("seed = [0, 1]", "seed = 3", PHOTONIC, "axes.seed: 3 is not a list"),
    ("seed = [0, 1]", "seed = [1, 1]", PHOTONIC, "axes.seed: holds 1 twice"),
    ("epochs = 2", "epoch = 2", PHOTONIC, "epoch: .*did you mean 'epochs'"),
    ("epochs = 2", "epochs = 0", PHOTONIC, "epochs: .*at least 1"),
    ("epochs = 2", "seed = 5", PHOTONIC, "axes.seed: is set to 5 in config and is an axis"),
    ('kind = "bp"', 'kind = "backprop"', REFERENCE, "trainer.kind: 'backprop' is no trainer"),
    ("device.noise.sigma", "device.noise.sigmas", PHOTONIC, "device.noise.sigmas: "),
    (AXIS, "device.noise.sigma = [-1.0]", PHOTONIC, "device.noise.sigma: "),
    (AXIS, "seed = [4, 5]", PHOTONIC, "axes.seed: clashes"),
    (AXIS, 'device.name = ["nowhere"]', PHOTONIC, "device.*nowhere"),
    (AXIS, "device.noise.sigma = [1.0]\ndevice.noise = [{sigma = 2.0 }]", "", "syntax: is not valid"),
    ('data.name = "digits"', 'data.name = "digit"', PHOTONIC, "data.name: 'digit' is not known"),
    ('name = "reference"', 'name = "photonic"', "", "two series are called 'photonic'"),
    ("reference = true", "level = true", "", "series.1.level: is not a key of a sweep"),
    ("[axes]", OTHERS.format("epsilon = [1.0]\naccuracy = []"), "", "published.0"),
    ("[axes]", OTHERS.format("epsilon = [0.0]\naccuracy = [1.0]"), "", "published.0.epsilon.0"),
    ("[axes]", OTHERS.format("epsilon = []\naccuracy = []\nyear = 1"), "", "published.0.year"),
    ('title = "t"', 'title = "t"\nnoise = "sigma"', "", "noise: 'sigma' is not an axis of this sweep"),
])  # fmt: skip
def test_a_bad_spec_names_series_and_key(tmp_path: Path, old: str, new: str, place: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        points(tmp_path, SPEC.replace(old, new, 1))
    assert str(caught.value).startswith(f"{tmp_path / 'spec.toml'}{place}: ")
    assert "\n" not in str(caught.value)


def test_two_axes_over_one_key_clash_even_where_one_is_a_part_of_the_other(tmp_path: Path) -> None:
    text = SPEC.replace("seed = [0, 1]", "seed = [0, 1]\ndevice.noise.sigma = [2.0]")
    text = text.replace(AXIS, '"device.noise" = [{ sigma = 1.0 }]')
    with pytest.raises(ConfigError, match=r"axes.device.noise: clashes with the axis device.noise.sigma"):
        points(tmp_path, text)


@pytest.mark.parametrize(("where", "value"), [("config", "0.1"), ("axes", "[0.1, 0.2]")])
def test_a_shared_key_that_a_series_refuses_belongs_to_others(tmp_path: Path, where: str, value: str) -> None:
    shared = SPEC.replace(f"[{where}]\n", f"[{where}]\ntrainer.threshold = {value}\n", 1)
    move = f"move it from the shared {where} to the {where} of the series that take it"
    with pytest.raises(ConfigError, match=rf"series 'reference': trainer.threshold: .*, or {move}$"):
        points(tmp_path, shared)
    own = SPEC.replace('kind = "bp"', 'kind = "bp", threshold = 0.1')
    with pytest.raises(ConfigError, match="or leave it out$"):
        points(tmp_path, own)
    single = shared.partition('[[series]]\nname = "photonic"')[0] + SPEC[SPEC.rindex("[[series]]") :]
    with pytest.raises(ConfigError, match="or leave it out$"):
        points(tmp_path, single)


def test_runs_on_one_physical_device_go_one_by_one(tmp_path: Path) -> None:
    assert not one_at_a_time(points(tmp_path, SPEC))
    alone = "[series.config]\ndevice.access.exclusive = true\n[series.axes]"
    assert one_at_a_time(points(tmp_path, SPEC.replace("[series.axes]", alone, 1)))


def test_ready_specs_are_valid() -> None:
    folder = Path(__file__).parents[3] / "benchmarks" / "curves"
    specs = sorted(folder.glob("*.toml"))
    assert specs
    for spec in specs:
        assert points_of(*read_spec(spec))
