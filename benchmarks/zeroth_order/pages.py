"""What did zeroth-order training reach? Rows and sections of the pages that `benchmarks.pages` writes."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.markdown import markdown
from benchmarks.results_file import load_results
from benchmarks.zeroth_order import drift, membership, memory, mnist, sigma_tables, sst2_head, sst2_lora

Row = tuple[str, str, str]


def zo_readme_rows() -> list[Row]:
    """What the README shows: claim, figure, command."""
    rows: list[Row] = []
    tables = load_results("zo_sigma_tables").get("rows", [])
    if tables:
        agree = sum("differs" not in row["verdict"] for row in tables)
        claim = "Tables 12, 13, 16 and 17 of the DP-ZO paper, noise against epsilon"
        figure = f"{agree} of {len(tables)} epsilons to the printed digits"
        rows.append((claim, figure, "`python -m benchmarks.zeroth_order.sigma_tables`"))
    trained = sst2_head.summary_rows(load_results("zo_sst2"))
    for epsilon in dict.fromkeys(row[0] for row in trained):
        claim = f"SST-2, 1000 private sentences, head on frozen embeddings, accuracy [%] at epsilon {epsilon}"
        figures = "; ".join(f"{row[1]} {row[3]}" for row in trained if row[0] == epsilon)
        rows.append((claim, figures, "`python -m benchmarks.zeroth_order.sst2_head measure`"))
    return rows + zo_speed_rows()


def zo_speed_rows() -> list[Row]:
    """Memory and time of a step beside inference, at the most tokens that were measured."""
    rows = load_results("zo_memory").get("rows", {})
    measured = [shape for shape in memory.SHAPES if memory.key_of("zo", shape) in rows]
    if not measured:
        return []
    shape = measured[-1]
    zo, peak = rows[memory.key_of("zo", shape)], rows[memory.key_of("inference", shape)]["peak_mib"]
    dp_sgd = {
        method.removeprefix("dp-sgd, "): rows.get(memory.key_of(method, shape), {})
        for method in memory.METHODS
        if "dp-sgd" in method
    }
    others = [
        f"Opacus {name} {row['peak_mib'] / peak:.2f}" for name, row in dp_sgd.items() if "peak_mib" in row
    ]
    what = f"a zeroth-order step, 163 million parameters, {shape[0] * shape[1]:,} tokens"
    beside = f" ({', '.join(others)})" if others else ""
    command = "`python -m benchmarks.zeroth_order.memory`"
    return [
        (f"peak memory of {what}", f"{zo['peak_mib'] / peak:.2f} of inference{beside}", command),
        (f"time of {what}, one thread", f"{zo['forward_passes']:.2f} forward passes", command),
    ]


def zo_sections() -> list[str]:
    """All tables of the DP-ZO paper that were repeated."""
    parts = (_sigma(), _memory(), _drift(), _sst2(), _lora(), _membership(), _mnist())
    return [part for part in parts if part]


def _sigma() -> str:
    rows = load_results("zo_sigma_tables").get("rows", [])
    text = (
        'Noise in units of the clip; q = batch / records (batch 20 in Table 12, 16 elsewhere). "pure" is Table 13\'s '
        "right column: each step taken as any mechanism of its pure epsilon. Where the law is Laplace and delta is 0, "
        "the closed form (`python -m benchmarks.zeroth_order.sigma_tables`)."
    )
    return _section(
        "Noise against epsilon: Tables 12, 13, 16 and 17 of the DP-ZO paper",
        text,
        sigma_tables.COLUMNS,
        sigma_tables.table_rows(rows),
    )


def _memory() -> str:
    results = load_results("zo_memory")
    text = (
        "A decoder of 163 million parameters, random weights, float32, one thread, each method in "
        f"a process of its own ({results.get('date')}, `python -m benchmarks.zeroth_order.memory`); "
        'forward passes are timed in turn with the steps. "inference, bare" has loaded torch alone, "inference" the '
        "same libraries as zo. The bars: at most 1.1 of inference's memory and 2.2 forward passes."
    )
    rows = memory.table_rows(results.get("rows", {}))
    return _section("Memory and time of a step (Table 5 of the DP-ZO paper)", text, memory.COLUMNS, rows)


def _drift() -> str:
    rows = drift.table_rows(load_results("zo_drift").get("rows", []))
    text = (
        "300 perturbations of parameters of size 0.02 in place (`python -m benchmarks.zeroth_order.drift`): the "
        "relative drift, and the part of as many moves of 1e-6 z that arrives, without float32 copies on disk and "
        "with them."
    )
    return _section("What perturbing in place leaves behind", text, drift.COLUMNS, rows)


def _sst2() -> str:
    results = load_results("zo_sst2")
    rows = sst2_head.summary_rows(results)
    if not rows:
        return ""
    text = (
        "1000 training sentences; mean of seeds and standard error on dev and test together, 2,693 sentences "
        f"({results['date']}, `python -m benchmarks.zeroth_order.sst2_head measure`). "
        "Settings (ZO: rate and clip, DP-SGD: rate) were the best of a few with other seeds on "
        "training sentences that these leave out, which no epsilon covers; s are "
        f"core seconds. Without privacy, logistic regression: {100 * statistics.fmean(results['reference']):.1f} %."
    )
    return _section("SST-2: a head on frozen embeddings", text, sst2_head.COLUMNS, rows)


def _lora() -> str:
    results = load_results("zo_sst2_lora")
    text = (
        "As above, low-rank updates in the top layer of the encoder and a head, delta 1e-5 "
        f"({results.get('date')}, `python -m benchmarks.zeroth_order.sst2_lora measure`)."
    )
    rows = sst2_lora.table_rows(results.get("cells", {}))
    return _section("SST-2: LoRA", text, sst2_lora.COLUMNS, rows)


def _membership() -> str:
    results = load_results("zo_membership")
    text = (
        "Areas under the curve of canaries' membership scores, with the standard error of ranks at one half; 32 "
        f"canaries a run, each with a feature of its own, its size in embeddings ({results.get('date')}, "
        "`python -m benchmarks.zeroth_order.membership measure`). "
        "The paper's figures are of another model and other canaries. The bar: near one half at epsilon at most 4, "
        "clearly above it without noise."
    )
    rows = membership.table_rows(results.get("cells", {}))
    return _section("Membership (Table 6 of the DP-ZO paper)", text, membership.COLUMNS, rows)


def _mnist() -> str:
    results: dict[str, Any] = load_results("zo_mnist")
    text = (
        f"784-128-64-10 from random weights, {results.get('epochs')} epochs, batches of 256; mean of seeds and "
        f"standard error ({results.get('date')}, `python -m benchmarks.zeroth_order.mnist measure`)."
    )
    rows = mnist.table_rows(results.get("cells", {}))
    return _section("Where zeroth order fails: MNIST from scratch", text, mnist.COLUMNS, rows)


def _section(title: str, text: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n\n".join((f"## {title}", text, markdown(header, rows))) if rows else ""
