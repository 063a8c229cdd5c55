"""A sweep's spec becomes points, or is refused with its line before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from opusim.errors import ConfigError
from training.sweeps.lines import line_of
from training.sweeps.points import Point, one_at_a_time, points_of
from training.sweeps.spec import read_spec

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


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("seed = [0, 1]", "seed = []", 6, "axes.seed.*empty"),
        ("seed = [0, 1]", "seed = 3", 6, "axes.seed.*no list"),
        ("seed = [0, 1]", "seed = [1, 1]", 6, "holds 1 twice"),
        ("epochs = 2", "epoch = 2", 3, "did you mean 'epochs'"),
        ("epochs = 2", "epochs = 0", 3, "greater than or equal to 1"),
        ("epochs = 2", "seed = 5", 6, "set to 5 in config and is an axis"),
        ('kind = "bp"', 'kind = "backprop"', 14, "'backprop' is no trainer"),
        ("device.noise.sigma", "device.noise.sigmas", 10, "sigmas"),
        ("device.noise.sigma = [0.0, 1.0, 3.0]", "device.noise.sigma = [-1.0]", 10, "sigma"),
        ("device.noise.sigma = [0.0, 1.0, 3.0]", "seed = [4, 5]", 10, "clashes with the axis seed"),
        ("device.noise.sigma = [0.0, 1.0, 3.0]", 'device.name = ["nowhere"]', 10, "nowhere"),
        (
            "device.noise.sigma = [0.0, 1.0, 3.0]",
            "device.noise.sigma = [1.0]\ndevice.noise = [{ sigma = 2.0 }]",
            None,
            "not valid TOML",
        ),
        ('data.name = "digits"', 'data.name = "digit"', 4, "'digit' is not known"),
        ('name = "reference"', 'name = "photonic"', 12, "two series are called 'photonic'"),
        ("reference = true", "level = true", 13, "is not a key of a sweep"),
    ],
)
def test_a_bad_spec_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, line: int | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        points(tmp_path, SPEC.replace(old, new, 1))
    if line is not None and "two series" not in words:
        assert f"spec.toml, line {line}:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_axes_over_one_key_clash_even_where_one_is_a_part_of_the_other(tmp_path: Path) -> None:
    text = SPEC.replace("seed = [0, 1]", "seed = [0, 1]\ndevice.noise.sigma = [2.0]").replace(
        "device.noise.sigma = [0.0, 1.0, 3.0]", '"device.noise" = [{ sigma = 1.0 }]'
    )
    with pytest.raises(ConfigError, match=r"line 11.*device.noise.*clashes with the axis device.noise.sigma"):
        points(tmp_path, text)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("title",), 1),
        (("config", "data", "name"), 4),
        (("config", "data.name"), 4),
        (("series", "0", "axes", "device.noise.sigma"), 10),
        (("series", "1", "reference"), 13),
        (("series", "1", "config", "trainer", "kind"), 14),
        (("series", "1", "axes"), 11),
        (("nothing",), None),
    ],
)
def test_lines_of_keys(path: tuple[str, ...], line: int | None) -> None:
    assert line_of(SPEC, path) == line


def test_runs_on_one_physical_device_go_one_by_one(tmp_path: Path) -> None:
    assert not one_at_a_time(points(tmp_path, SPEC))
    assert one_at_a_time(
        points(
            tmp_path,
            SPEC.replace(
                "[series.axes]", "[series.config]\ndevice.access.exclusive = true\n[series.axes]", 1
            ),
        )
    )


def test_ready_specs_are_valid() -> None:
    folder = Path(__file__).parents[3] / "benchmarks" / "curves"
    specs = sorted(folder.glob("*.toml"))
    assert specs
    for spec in specs:
        assert points_of(*read_spec(spec))
