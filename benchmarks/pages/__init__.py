"""Write what the benchmarks measured: a README in each folder, the index, and the tables of README and docs.

`make bench-report` runs this; a test compares the committed pages with what it would write. Each benchmark makes
its own section, next to its measurement.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.analog import aihwkit_side_by_side, held_out, in_situ, lifetimes, light, pictures, product
from benchmarks.any_module import images, language_model
from benchmarks.any_module import private as protected_modules
from benchmarks.attacks import anytime, final_model, guarantees, one_run, self_test
from benchmarks.attacks import speed as audit_speed
from benchmarks.convex import (
    accountants,
    accuracy,
    curves,
    device,
    hyperplanes,
    noise,
    opacus_baseline,
    step,
    tuned,
)
from benchmarks.devices import (
    calibration_faults,
    camera_account,
    chain,
    count_attack,
    effects,
    faults,
    learning,
    mnist_features,
    monitor,
    own_bench,
    real_opu,
    served_faults,
)
from benchmarks.known_models import images as known_images
from benchmarks.known_models import nanogpt, readout_rules
from benchmarks.known_models import private as private_gpt
from benchmarks.markdown import Row, markdown, section
from benchmarks.pages.headlines import headline_rows, protection_rows
from benchmarks.pages.papers.page import papers_page
from benchmarks.pages.sweeps import SWEEPS, sweep_section
from benchmarks.pdfa import counts, demo, private, readings
from benchmarks.pdfa import figure2 as pdfa_figure2
from benchmarks.pdfa import table1 as pdfa_table1
from benchmarks.private_accuracy import bands, cifar, labels, paid, records, users, variants
from benchmarks.results_file import FOLDER as RESULTS
from benchmarks.results_file import load_results
from benchmarks.speed import (
    accounting,
    camera,
    card_steps,
    causes,
    commands,
    convolution_rows,
    examples,
    features,
    fixed_batches,
    gpu,
    growth,
    low_rank_directions,
    matrix_free,
    module_record_step,
    noise_threads,
    operators,
    pdfa_step,
    private_steps,
    processes,
    projection,
    randblas,
    record_step,
    rounded_noise,
    served,
    sweep,
    transformer_step,
    walk,
    whole_runs,
)
from benchmarks.ulr import bound, epoch, figure2, resnet, variance
from benchmarks.ulr import table1 as ulr_table1
from benchmarks.zeroth_order import (
    ablations,
    drift,
    joint_clip,
    membership,
    memory,
    mnist,
    sigma_tables,
    sst2_head,
    sst2_language,
    sst2_lora,
)

BENCHMARKS = Path(__file__).parents[1]
ROOT = BENCHMARKS.parent
WRITTEN = "Written by `make bench-report` from `results/`; nothing here is typed by hand."


def convex_section() -> str:
    """Return all that was measured of the convex trainer, under one heading."""
    return accuracy.page_section(
        curves.page_table(),
        tuned.page_table(),
        device.page_text(),
        opacus_baseline.page_text(),
        noise.page_table(),
        hyperplanes.page_table(),
        accountants.page_table(),
    )


def speed_rows() -> list[Row]:
    """Return the ratios of the benchmarks that `make bench` runs."""
    parts = (
        projection,
        pdfa_step,
        record_step,
        module_record_step,
        transformer_step,
        low_rank_directions,
        camera,
        features,
        matrix_free,
        sweep,
        accounting,
        commands,
        causes,
        served,
    )
    return [row for part in parts for row in part.speed_rows()]


def speed_section() -> str:
    """Return the table of all ratios."""
    rows: list[tuple[str, ...]] = [
        *speed_rows(),
        *epoch.speed_rows(),
        *step.speed_rows(),
        *memory.speed_rows(),
    ]
    text = (
        "Medians of interleaved repeats in one process. Required, in this order: 0.9 of the product, 5 times "
        "lightonml; at most 1; 1.8 times; at most Opacus's; at most 1.1 (gaussian); at most 1.5; at most 1.5, under "
        "1,024 MiB, 0.6 ms; 0.7 at batch 1024, 0.4 at batch 64, under 1,024 MiB; 20 times; 100 times, the same "
        "digits; commands at most 1.8 and 0.5, then 0.4, 0.4 and 0.2; served at most 1.3 (camera); at most 1; at "
        "most 1.2, 1.5 and 10 times; at most 1.1 of the memory and 2.2 passes."
    )
    return section("Ratios", text, markdown(("work", "ratio", "command"), rows)) if rows else ""


SECTIONS: dict[str, tuple[str, tuple[Callable[[], str], ...]]] = {
    "any_module": (
        "Any module",
        (language_model.page_section, images.page_section, protected_modules.page_section),
    ),
    "pdfa": (
        "Photonic direct feedback alignment",
        (
            demo.page_section,
            pdfa_table1.page_section,
            pdfa_figure2.page_section,
            readings.page_section,
            private.page_section,
            counts.page_section,
        ),
    ),
    "private_accuracy": (
        "Accuracy under protection on public features",
        (
            records.page_section,
            variants.page_section,
            bands.page_section,
            paid.page_section,
            cifar.page_section,
            labels.page_section,
            users.page_section,
        ),
    ),
    "ulr": (
        "Likelihood ratio training",
        (
            ulr_table1.page_section,
            ulr_table1.proven_section,
            bound.page_section,
            resnet.page_section,
            variance.page_section,
            figure2.page_section,
        ),
    ),
    "convex": ("Convex training", (convex_section,)),
    "zeroth_order": (
        "Zeroth-order training",
        (
            *(
                part.page_section
                for part in (
                    sigma_tables,
                    memory,
                    drift,
                    sst2_head,
                    joint_clip,
                    sst2_lora,
                    sst2_language,
                    membership,
                    mnist,
                    ablations,
                )
            ),
        ),
    ),
    "analog": (
        "Analog devices",
        (
            lifetimes.page_section,
            held_out.page_section,
            in_situ.page_section,
            pictures.page_section,
            light.page_section,
            aihwkit_side_by_side.page_section,
            product.page_section,
        ),
    ),
    "known_models": (
        "Known models",
        (
            nanogpt.page_section,
            known_images.page_section,
            private_gpt.page_section,
            readout_rules.page_section,
        ),
    ),
    "devices": (
        "Devices",
        (
            learning.page_section,
            real_opu.page_section,
            mnist_features.page_section,
            count_attack.page_section,
            own_bench.page_section,
        ),
    ),
    "attacks": (
        "Audits",
        (
            guarantees.page_section,
            final_model.page_section,
            self_test.page_section,
            one_run.page_section,
            anytime.page_section,
            audit_speed.page_section,
        ),
    ),
    "curves": ("Sweeps", tuple(partial(sweep_section, name) for name in SWEEPS)),
    "speed": (
        "Speed",
        (
            speed_section,
            causes.causes_section,
            whole_runs.page_section,
            growth.page_section,
            processes.page_section,
            private_steps.page_section,
            randblas.page_section,
            convolution_rows.page_section,
            noise_threads.page_section,
            fixed_batches.page_section,
            rounded_noise.page_section,
            gpu.page_section,
            card_steps.page_section,
            operators.page_section,
            walk.page_section,
            examples.page_section,
        ),
    ),
}
"""The title and the sections of each folder's page."""


def folder_page(folder: str) -> str:
    """Return the whole of a folder's README."""
    title, sections = SECTIONS[folder]
    parts = [
        f"# {title}: results",
        WRITTEN.replace("results/", "../results/"),
        *(each() for each in sections),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def index_page() -> str:
    """Return the whole of benchmarks/README.md: every benchmark with its question, by folder."""
    head = (
        f"# Benchmarks\n\n{WRITTEN} Each benchmark is a program that opens with its question; its result is one JSON "
        "file in [results](results), with date, machine, versions and commit. Timings are ratios within one run. "
        "[results/nightly.md](results/nightly.md) sums up the nightly tests. [Papers](papers/README.md) goes through "
        "the tables and figures of the four papers."
    )
    parts = [
        section(title, f"Results: [{folder}/README.md]({folder}/README.md).", _questions(folder))
        for folder, (title, _) in SECTIONS.items()
    ]
    return "\n\n".join((head, section("Overview", overview_table()), *parts, commits_section())) + "\n"


def _questions(folder: str) -> str:
    """Return a folder's programs, a line each."""
    if folder == "curves":
        specs = sorted((BENCHMARKS / folder).glob("*.toml"))
        rows = [(f"`opusim curve benchmarks/curves/{spec.name}`", _first_comment(spec)) for spec in specs]
        return markdown(("command", "question"), list(rows))
    return markdown(("command", "question"), list(_programs(folder)))


def _first_comment(spec: Path) -> str:
    return spec.read_text().splitlines()[0].lstrip("# ").strip()


def _programs(folder: str) -> Iterator[tuple[str, ...]]:
    for path in sorted((BENCHMARKS / folder).glob("*.py")):
        source = path.read_text()
        if 'if __name__ == "__main__"' in source:
            question = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
            yield (f"`python -m benchmarks.{folder}.{path.stem}`", question)


def commits_section() -> str:
    """Return which commit measured what."""
    found: dict[str, list[str]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        found.setdefault(load_results(file.stem).get("commit") or "unknown", []).append(file.stem)
    text = (
        "A benchmark that was measured in several parts names the commit of the last one. At 02c3c03 or before, norms "
        "were computed in float32; later commits clip linear layers up to 1e-4 lower and convolutions up to 0.2 %. The "
        "default hold-out has not changed. What was called add_or_remove_one there is now stated as zero_out."
    )
    rows = [(commit, ", ".join(names)) for commit, names in sorted(found.items())]
    return section("Commits", text, markdown(("commit", "results"), rows))


def overview_table() -> str:
    """Return the table of all results, one line each: claim, figure, command."""
    rows = [
        *(
            row
            for part in (demo, pdfa_table1, learning, private, records, real_opu, mnist_features)
            for row in part.headline_rows()
        ),
        *language_model.headline_rows(),
        *images.headline_rows(),
        *protected_modules.headline_rows(),
        *(row for row in speed_rows() if _is_headline(row)),
        *ulr_table1.headline_rows(),
        *(row for row in epoch.speed_rows() if row[0].endswith("ulr, K = 1, 1 thread(s)")),
        *accuracy.headline_rows(),
        *(row for row in step.speed_rows() if " 1 thread" in row[0]),
        *sigma_tables.headline_rows(),
        *sst2_head.headline_rows(),
        *memory.speed_rows(),
    ]
    return markdown(("what", "figure", "measure it again"), list(rows))


def _is_headline(row: Row) -> bool:
    """Whether the overview shows a speed: one thread, the larger batch, no variant."""
    left_out = ("release", "low_light", "batch 64", "published", "2 thread(s)", "K = ")
    return not any(word in row[0] for word in left_out)


def with_block(text: str, name: str, table: str) -> str:
    """Return a page whose block of this name, between its two markers, holds the table."""
    begin, end = f"<!-- {name}: written by `make bench-report` -->", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


def pages() -> dict[Path, str]:
    """Return the text of every page that is written from results."""
    readme, devices = ROOT / "README.md", ROOT / "docs" / "devices.md"
    choosing = ROOT / "docs" / "choosing-a-trainer.md"
    measured = markdown(("what", "figure", "measure it again"), headline_rows())
    protections = markdown(
        ("protection and trainer", "accuracy at epsilon 3 [%]", "at epsilon 1"), protection_rows()
    )
    loops, calibrate = ROOT / "docs" / "private-loops.md", ROOT / "docs" / "calibrate.md"
    serving = ROOT / "docs" / "serving.md"
    with_served_faults = with_block(serving.read_text(), "served_faults", served_faults.docs_table())
    calibrate_text = calibrate.read_text()
    for name, table in (
        ("account", camera_account.docs_table()),
        ("chain", chain.docs_table()),
        ("chain_kept", chain.kept_table()),
        ("calibration_time", effects.time_table()),
        ("broken_noises", calibration_faults.broken_table()),
    ):
        calibrate_text = with_block(calibrate_text, name, table)
    devices_text = devices.read_text()
    for name, table in (
        ("effects", effects.docs_table()),
        ("faults", faults.docs_table()),
        ("monitor", monitor.docs_table()),
        ("named_faults", monitor.named_table()),
        ("fault_names", monitor.confusion_table()),
    ):
        devices_text = with_block(devices_text, name, table)
    return {
        readme: with_block(readme.read_text(), "measured", measured),
        choosing: with_block(
            with_block(choosing.read_text(), "protections", protections), "literature", records.docs_table()
        ),
        devices: devices_text,
        calibrate: calibrate_text,
        serving: with_block(with_served_faults, "served", served.docs_table()),
        loops: with_block(loops.read_text(), "opacus", protected_modules.docs_table()),
        BENCHMARKS / "papers" / "README.md": papers_page(),
        BENCHMARKS / "README.md": index_page(),
        **{BENCHMARKS / folder / "README.md": folder_page(folder) for folder in SECTIONS},
    }


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
