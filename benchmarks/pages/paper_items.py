"""The tables and figures of the four papers, with their commands: the items of docs/papers.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.attacks.claims import CONVEX, PDFA, ULR, ZEROTH_ORDER
from benchmarks.convex import accuracy, curves, hyperplanes, tuned
from benchmarks.pages.item import Item
from benchmarks.pages.paper_figures import (
    accountants,
    convex_curves,
    convex_hyperplanes,
    convex_tuned,
    pdfa_curves,
    pdfa_table,
    public_features,
    ulr_epochs,
    ulr_rejection,
    ulr_resnet,
    ulr_table,
    widths,
    zo,
    zo_half_memory,
    zo_loss,
    zo_main,
    zo_membership,
    zo_memory,
    zo_sigma,
    zo_study,
)
from benchmarks.pdfa import readings
from benchmarks.pdfa import table1 as pdfa_table1
from benchmarks.ulr import resnet
from benchmarks.ulr import table1 as ulr_table1
from benchmarks.zeroth_order import ablations, joint_clip
from benchmarks.zeroth_order.sst2_head import PURE_EPSILONS

_LARGE = "a language model of 1.3 to 66 billion parameters and its GPUs"
_SST2 = "a linear head on frozen embeddings of SST-2; accuracy on its dev and test sentences together"
_ABLATED = f"{_SST2}; C = 0.01, the paper 0.05; three seeds, the paper five"
_HEAD, _ABLATIONS = "zeroth_order.sst2_head measure", "zeroth_order.ablations"
_MEASURED = ("convex.accuracy search", "convex.accuracy measure")
_SEARCHES = (
    "the clip is searched, not rate and P, of the last iterate only; three searches on nine tenths of the "
    "records, the paper five; the trainings differ as in Figure 2"
)


def _by_records(
    number: int,
    shows: str,
    laws: tuple[str, ...],
    note: str,
    differs: str = "",
    only: Callable[[Any], bool] = lambda _: True,
) -> Item:
    """Return a table of DP-ZO by the number of records; `differs` follows what all of them have in common."""
    return Item(
        name=f"Table {number}",
        shows=shows,
        differs=f"{_ABLATED}{differs}",
        state="smaller",
        figures=zo_study("records", lambda cell: f"n = {cell.records}", laws, only=only, note=note),
        run=(f"{_ABLATIONS} --study records",),
        results=("zo_ablations",),
        left=partial(ablations.left, "records", *laws),
    )


PAPERS: dict[str, tuple[Item, ...]] = {
    PDFA: (
        Item(
            name="Figure 1", shows="sketch of backpropagation and DFA", state="no figures", figures="a sketch"
        ),
        Item(
            name="Figure 2",
            shows="training curves by feedback and noise; alignment by noise",
            differs=(
                "accuracy on held-out records, as the paper names no split; a panel for each feedback; the panel of "
                "TDFA, and the alignment of DFA, of TDFA and of the first layer, are ours; else as in Table 1"
            ),
            state="smaller",
            figures=pdfa_curves,
            run=("pdfa.table1", "pdfa.figure2"),
            results=("pdfa_table1",),
            left=lambda: len(pdfa_table1.missing()),
        ),
        Item(
            name="Table 1",
            shows="FashionMNIST, four feedbacks, without protection and at six noise levels",
            differs=(
                "eqs. 8 to 10 are not taken to the letter: activations are clipped in the forward pass and at "
                "inference, B e is normalised, updates of hidden layers are a sum over the batch divided by sqrt(512), "
                "an entry of the noise has 0.44 sigma, and pixels are standardised by MNIST's constants. That was "
                "chosen with the paper's figures in sight; the equations to the letter are among the readings. "
                "Backpropagation normalises the error at the top and sums over the batch. The device is simulated, "
                "without any error but sigma, so photonic DFA without noise is TDFA; the paper used a real one and "
                "simulated sigma, too. Three seeds; the paper names no number"
            ),
            state="smaller",
            figures=pdfa_table,
            run=("pdfa.table1", "pdfa.readings"),
            results=("pdfa_table1", "pdfa_readings"),
            left=lambda: len(readings.missing()),
        ),
    ),
    ULR: (
        Item(name="Figure 1", shows="sketch", state="no figures", figures="a sketch"),
        Item(
            name="Figure 2",
            shows="what rejection adds to eq. 11, contours",
            differs="q = 0.01 and 0.1 are ours, as the paper names none for this figure",
            state="repeated",
            figures=ulr_rejection,
            run=("ulr.figure2",),
            results=("ulr_figure2",),
        ),
        Item(
            name="Table 1",
            shows="MNIST, DP-ULR and DP-SGD by batch and sigma_0",
            differs=(
                "learning rates of 0.001 (batch 64) and 0.003 (200 and 500) for DP-ULR, chosen on held-out records, "
                "where the paper has 0.01; K = 30 and sigma are ours, as the paper names none; no GELU behind the last "
                "layer; test accuracy only; three seeds, the paper five"
            ),
            state="smaller",
            figures=ulr_table,
            run=("ulr.table1 search", "ulr.table1 published", "ulr.table1 opacus", "ulr.table1 proven"),
            results=("ulr_published", "ulr_opacus", "ulr_proven"),
            left=ulr_table1.left,
        ),
        Item(
            name="Figure 3",
            shows="accuracy and epsilon by epoch",
            differs=(
                "training accuracy only; settings and seeds of Table 1; N_B = q N, as the paper names none; epsilon of "
                "DP-SGD by a Renyi accountant, where the paper takes a bound of it; both formulas outside their "
                "conditions, too"
            ),
            state="smaller",
            figures=ulr_epochs,
            run=("ulr.table1 published", "ulr.table1 opacus", "ulr.figure3"),
            results=("ulr_published", "ulr_opacus"),
            left=ulr_table1.left,
        ),
        Item(
            name="Figure 4",
            shows="ResNet-5 on CIFAR-10, DP-ULR and DP-SGD",
            differs=(
                "average pooling behind two convolutions, Adam at 0.002, K = 2 and sigma = 0.3 are ours, and so are "
                "DP-SGD at batch 500 or noise 4, and the proven form; 8 epochs, as the paper names none; accuracy "
                "after training only ([why the published form stays near chance](ulr.md#6-when-to-choose-it))"
            ),
            state="smaller",
            figures=ulr_resnet,
            run=("ulr.resnet plain", "ulr.resnet private", "ulr.resnet search"),
            results=("ulr_resnet", "ulr_resnet_search"),
            left=resnet.left,
        ),
        Item(
            name="Table C1",
            shows="MNIST, three widths, sigma_0 = 8",
            differs=(
                "the layers of medium and large are ours, as the paper names only 2.5 and 5 times the "
                "parameters; batches of 128 and 256 take the settings of 200; else as in Table 1"
            ),
            state="smaller",
            figures=widths,
            run=("ulr.table1 widths",),
            results=("ulr_published", "ulr_widths"),
            left=ulr_table1.widths_left,
        ),
    ),
    CONVEX: (
        Item(
            name="Figure 1",
            shows="epsilon by epochs, Theorem 2.8 and DP-SGD",
            differs="its formula only: its hypotheses do not hold for the paper's runs ([why](convex.md#2-constants))",
            state="repeated",
            figures=lambda: accountants("by_epochs"),
            run=("convex.accountants",),
            results=("convex_accountants",),
        ),
        Item(
            name="Table 1",
            shows="MNIST after private tuning",
            differs=f"5 or 10 expected trials, where the paper has 20; {_SEARCHES}",
            state="smaller",
            figures=lambda: convex_tuned("mnist"),
            run=("convex.tuned", "convex.tuned --trials 10", *_MEASURED),
            results=("convex_tuned", "convex"),
            left=lambda: tuned.left("mnist") + accuracy.left("mnist"),
        ),
        Item(
            name="Table 2",
            shows="CIFAR-10 after private tuning",
            differs=f"10 expected trials, where the paper has 20; {_SEARCHES}",
            state="smaller",
            figures=lambda: convex_tuned("cifar-10"),
            run=("convex.tuned --data cifar-10 --trials 10", *_MEASURED),
            results=("convex_tuned", "convex"),
            left=lambda: tuned.left("cifar-10") + accuracy.left("cifar-10"),
        ),
        Item(
            name="Figure 2",
            shows="MNIST, accuracy by epsilon",
            differs=(
                "the convex model has the margin loss with clipped residuals, where the paper has cross-entropy, its "
                "records are centred and scaled to norm 1, P = 64 and lambda = 0, and the last step has a larger "
                "noise; a training of its own for each epsilon, where the paper follows one of 400 epochs of batches "
                "of 1,000: the last iterate 10 epochs of 125, the convex model under DP-SGD 20 of 500 or 40 of 1,000, "
                "the networks under DP-SGD 20 of 1,000 with momentum 0.9 and width 200; three seeds, the paper five"
            ),
            state="smaller",
            figures=lambda: convex_curves("mnist"),
            run=("convex.curves",),
            results=("convex_curves",),
            left=lambda: curves.left("mnist"),
        ),
        Item(
            name="Figure 3",
            shows="CIFAR-10, accuracy by epsilon",
            differs="as in Figure 2",
            state="smaller",
            figures=lambda: "; ".join(filter(None, (convex_curves("cifar-10"), public_features()))),
            run=("convex.curves --data cifar-10",),
            results=(curves.name_of("cifar-10"),),
            left=lambda: curves.left("cifar-10"),
        ),
        Item(
            name="Figure 4",
            shows="MNIST without noise, accuracy by epochs and hyperplanes",
            differs=(
                "records of the convex model centred and scaled to norm 1; its rate is chosen at P = 64 for all P, the "
                "paper chooses one for each; 20 epochs; the curves are held-out accuracy; three seeds"
            ),
            state="smaller",
            figures=lambda: convex_hyperplanes(0.0),
            run=("convex.hyperplanes --noise 0",),
            results=("convex_hyperplanes",),
            left=lambda: hyperplanes.left(0.0),
        ),
        Item(
            name="Figure 5",
            shows="MNIST with noise, accuracy by epochs and hyperplanes",
            differs="as in Figure 4; gradients are clipped to norm 1",
            state="smaller",
            figures=lambda: convex_hyperplanes(5.0, 15.0),
            run=("convex.hyperplanes --noise 5,15",),
            results=("convex_hyperplanes",),
            left=lambda: hyperplanes.left(5.0, 15.0),
        ),
        Item(
            name="Figure 6",
            shows="accountants, sampling without replacement",
            state="repeated",
            figures=lambda: accountants("without_replacement"),
            run=("convex.accountants",),
            results=("convex_accountants",),
        ),
        Item(
            name="Figure 7",
            shows="FashionMNIST, accuracy by epsilon",
            differs="as in Figure 2",
            state="smaller",
            figures=lambda: convex_curves("fashion-mnist"),
            run=("convex.curves --data fashion-mnist",),
            results=(curves.name_of("fashion-mnist"),),
            left=lambda: curves.left("fashion-mnist"),
        ),
        Item(
            name="Figure 8",
            shows="bound for shuffled batches",
            differs="sensitivity 2 is our reading of sigma = 5; the curve of 60 batches is ours",
            state="repeated",
            figures=lambda: accountants("shuffled"),
            run=("convex.accountants",),
            results=("convex_accountants",),
        ),
    ),
    ZEROTH_ORDER: (
        Item(name="Figure 1", shows="sketch", state="no figures", figures="a sketch"),
        *(
            Item(
                name=f"Figure {number}",
                shows=shows,
                state="smaller",
                figures=text,
                run=(_HEAD,),
                results=("zo_sst2",),
            )
            for number, shows, text in (
                (2, "Table 1 as bars", "see Table 1"),
                (4, "Table 3 as bars", "see Table 3"),
            )
        ),
        Item(
            name="Figure 3",
            shows="Table 2 as bars",
            state="not possible",
            figures=f"needs {_LARGE}",
        ),
        Item(
            name="Table 1",
            shows="OPT-13B, three tasks, 1,000 records",
            differs=(
                f"{_SST2}; LoRA in the top layer of a small encoder with 2,000 steps, the paper 75,000; joint clips of "
                "50 directions and public inputs are ours"
            ),
            state="smaller",
            figures=zo_main,
            run=(_HEAD, "zeroth_order.sst2_lora measure", "zeroth_order.joint_clip"),
            results=("zo_sst2", "zo_sst2_lora", joint_clip.NAME),
            left=joint_clip.left,
        ),
        *(
            Item(name=f"Table {number}", shows=shows, state="not possible", figures=f"needs {model}")
            for number, shows, model in (
                (2, "SQuAD by size of model", _LARGE),
                (
                    4,
                    "SQuAD by architecture",
                    "language models of 6.7 to 13 billion parameters and their GPUs",
                ),
            )
        ),
        Item(
            name="Table 3",
            shows="pure epsilon by Laplace noise",
            differs=f"{_SST2}; the whole batch, and with it 200 steps, are ours, for DP-SGD too",
            state="smaller",
            figures=lambda: zo(
                "zo, laplace, pure",
                "zo, laplace, pure, whole batch",
                "dp-sgd, laplace, pure",
                epsilons=PURE_EPSILONS,
                note="the paper, SQuAD: 73.5, 76.8, 78.8, 81.0, and DP-SGD (the last of ours) 47.3, 47.3, 47.4, 76.5; "
                "that ZO leads DP-SGD is confirmed at 4, 10 and 15, not at 10,450",
            ),
            run=(_HEAD,),
            results=("zo_sst2",),
        ),
        Item(
            name="Table 5",
            shows="memory by length of sequence",
            differs=(
                "163 million random weights on a processor, the paper 2.7 billion; DP-SGD by Opacus, without "
                "accumulation; at most 1,024 tokens, the paper 2,048"
            ),
            state="smaller",
            figures=zo_memory,
            run=("zeroth_order.memory",),
            results=("zo_memory",),
        ),
        Item(
            name="Figure 5",
            shows="memory with half precision and checkpointing",
            state="smaller",
            figures=zo_half_memory,
            differs=(
                "163 million random weights on a processor, the paper 2.7 billion; two sequences a step, the paper "
                "one; at most 1,024 tokens, the paper 2,048; without checkpointing; DP-ZO only"
            ),
            run=("zeroth_order.memory",),
            results=("zo_memory",),
        ),
        Item(
            name="Table 6",
            shows="membership inference",
            differs=(
                "a linear head on frozen embeddings of SST-2; canaries with a feature of their own are ours"
            ),
            state="smaller",
            figures=zo_membership,
            run=("zeroth_order.membership measure",),
            results=("zo_membership",),
        ),
        Item(
            name="Figure 6",
            shows="training loss by records",
            differs=(
                "a linear head on frozen embeddings of SST-2; 10,000 steps, C = 0.01, a rate that follows the noise; "
                "mean of three seeds, not smoothed"
            ),
            state="smaller",
            figures=zo_loss,
            run=(f"{_ABLATIONS} --study records",),
            results=("zo_ablations",),
            left=lambda: ablations.left("records", "gaussian"),
        ),
        _by_records(
            7,
            "records, Gaussian noise at epsilon 1, and no privacy",
            ("gaussian", "none"),
            "the paper, SQuAD, n = 250 to 5,000: 74.9, 78.3, 82.3, 84.3, without privacy 86.4 to 86.9",
            "; 10,000 steps, where 1,000 records have 75,000 in the paper",
        ),
        _by_records(
            8,
            "records, Laplace noise at pure epsilon 4",
            ("laplace", "none"),
            "the paper, SQuAD: 73.5 and 79.9, without privacy 86.9 and 86.9",
            only=lambda cell: cell.records in (1000, 5000),
        ),
        _by_records(
            9,
            "records, DP-ZO and DP-SGD, QNLI",
            ("gaussian", "dp-sgd"),
            "the paper, n = 1,000 to 104,743: DP-ZO 76.2 to 79.9, DP-SGD 73.3 to 87.4",
            "; epsilon 1, delta 1e-5 and 10,000 steps, where the paper has QNLI, RoBERTa-base, epsilon 3 and delta "
            "4.7e-6",
        ),
        _by_records(
            11,
            "1,000 records and all",
            ("gaussian", "dp-sgd", "none"),
            "the paper, SST-2, 1,000 and all: DP-ZO 91.2 and 93.0, DP-SGD 90.3 and 95.1, ZO 93.7 and 94.8",
            "; SST-2 only, where the paper has QNLI too; 6,920 records in all, the paper 66,849; 10,000 steps, where "
            "1,000 records have 75,000 in the paper; without SGD",
            only=lambda cell: cell.records in (1000, 6920),
        ),
        Item(
            name="Table 10",
            shows="Gaussian against Laplace noise",
            differs=_SST2,
            state="smaller",
            figures=lambda: zo(
                "zo, gaussian, 75000 steps",
                "zo, laplace, 75000 steps",
                note="the paper, SQuAD: 80.1, 82.3, 83.9 and 77.6, 80.5, 82.9",
            ),
            run=(_HEAD,),
            results=("zo_sst2",),
        ),
        *(
            Item(
                name=f"Table {number}",
                shows=shows,
                state="repeated",
                figures=zo_sigma(str(number)),
                run=("zeroth_order.sigma_tables",),
                results=("zo_sigma_tables",),
            )
            for number, shows in (
                (12, "noise for pure epsilon"),
                (13, "noise of Laplace at delta 1e-5"),
                (16, "noise of Table 1, 75,000 steps"),
                (17, "noise of Table 2, 10,000 steps"),
                (18, "noise of DP-SGD"),
            )
        ),
        Item(name="Table 14", shows="prompts", state="no figures", figures="a list"),
        *(
            Item(
                name=f"Table {number}",
                shows=shows,
                differs=f"{_ABLATED if study != 'clip' else _SST2}{differs}",
                state="smaller",
                figures=zo_study(study, value, ("gaussian",), note=note),
                run=(f"{_ABLATIONS} --study {study}",),
                results=("zo_ablations",),
                left=partial(ablations.left, study, "gaussian"),
            )
            for number, shows, study, value, note, differs in (
                (
                    15,
                    "clip, sigma = 15.9",
                    "clip",
                    lambda cell: f"C = {cell.clip:g}",
                    "the paper, SQuAD: 66.0, 74.3, 76.8, 75.4; its epsilon of 0.35 is 0.34 by our accountant",
                    "; the rate follows the noise; three seeds",
                ),
                (
                    19,
                    "batch",
                    "batch",
                    lambda cell: f"batch {cell.batch}",
                    "the paper, SQuAD: 81.4, 81.6, 81.5, 81.7",
                    "; epsilon 1 is ours, as the paper names none",
                ),
                (
                    20,
                    "steps",
                    "steps",
                    lambda cell: f"{cell.steps:,} steps",
                    "the paper, SQuAD: 81.4, 81.7, 81.4, 82.5",
                    "; epsilon 1 is ours, as the paper names none",
                ),
            )
        ),
        Item(
            name="Table 21",
            shows="SQuAD by size of model, all sizes",
            state="not possible",
            figures=f"needs {_LARGE}",
        ),
    ),
}
"""The tables and figures of each paper."""
