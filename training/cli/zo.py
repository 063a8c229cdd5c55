"""`opusim train zo` and `opusim zo replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from training.cli import options
from training.cli.training_runs import EXAMPLES, flag_changes, private_changes, train_configured

zo_app = typer.Typer(help="What zeroth-order training leaves behind.", no_args_is_help=True)

Law = Annotated[
    str | None, typer.Option(help="gaussian, or laplace (purely private with --delta 0): law of the noise.")
]
Directions = Annotated[int | None, typer.Option(help="Random directions a step, all on one batch.")]
LanguageModel = Annotated[
    str | None,
    typer.Option(help="Fine-tune a language model: a local folder, or a name on the hub (extra llm)."),
]
Text = Annotated[
    Path | None, typer.Option(help="What it learns from: a file of lines, text, tab, class number from 0.")
]
PromptText = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        help="Template around {text}, by default '{text} It was'; {mask} marks the class word of a masked model.",
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(
        help="The word of each class, in the order of the class numbers; by default terrible,great."
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Longest prompt, 128 by default; longer texts lose their end.")
]
LoraRank = Annotated[
    int | None, typer.Option(help="Train low-rank updates of this rank instead of the whole model.")
]
LoraTargets = Annotated[
    str | None,
    typer.Option(help="Modules that get them, such as q_proj,v_proj; by default those that peft knows."),
]


def mount(app: typer.Typer, train_app: typer.Typer) -> None:
    """Add the commands to `opusim` and to `opusim train`."""
    train_app.command("zo", epilog=EXAMPLES.format(kind="zo"))(train_zo)
    app.add_typer(zo_app, name="zo")


@zo_app.callback()
def zo() -> None:
    """What zeroth-order training leaves behind."""


def train_zo(
    config: options.Config = None,
    settings: options.Settings = None,
    data: options.Data = None,
    epochs: options.Epochs = None,
    seed: options.Seed = None,
    out: options.Out = None,
    law: Law = None,
    directions: Directions = None,
    protect: options.ProtectRecord = None,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise_multiplier: options.NoiseMultiplier = None,
    release: options.ReleaseMode = False,
    language_model: LanguageModel = None,
    text: Text = None,
    prompt: PromptText = None,
    classes: Classes = None,
    max_tokens: MaxTokens = None,
    lora_rank: LoraRank = None,
    lora_targets: LoraTargets = None,
    quiet: options.Quiet = False,
) -> None:
    """Zeroth-order training: forward passes on both sides of random directions, a scalar for each (no gradients)."""
    changes = flag_changes("zo", data, epochs, seed)
    given = {"law": law, "directions": directions}
    changes["trainer"] |= {key: value for key, value in given.items() if value is not None}
    changes |= private_changes(protect, epsilon, delta, noise_multiplier, release)
    language = {
        "model": language_model,
        "text": None if text is None else str(text),
        "prompt": prompt,
        "classes": None if classes is None else classes.split(","),
        "max_tokens": max_tokens,
        "lora_rank": lora_rank,
        "lora_targets": None if lora_targets is None else lora_targets.split(","),
    }
    changes["trainer"]["language"] = {key: value for key, value in language.items() if value is not None}
    train_configured(config, settings, changes, out, quiet)


@zo_app.command("replay")
def zo_replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="A step log (steps.zo), or its run folder.")],
    base: Annotated[
        Path | None,
        typer.Option(
            help="The parameters that training began with, safetensors; by default those beside the log."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the final parameters here, as safetensors.")] = None,
) -> None:
    """Rebuild the final parameters of a zeroth-order run, bit for bit, from its first ones and its step log."""
    from opusim.progress import Progress
    from training.runs.checkpoints import write_tensors
    from training.zeroth_order.step_log import replay

    with Progress("zo replay", "steps") as progress:

        def follow(done: int, total: int) -> None:
            if done == 1:
                progress.start(total)
            progress.advance()

        found = replay(log, base=base, on_step=follow)
    if out is not None:
        write_tensors(out, found.tensors)
    agreement = (
        "those of the run's newest checkpoint, to the bit" if found.arrived else "not compared: no mark"
    )
    typer.echo(f"{found.steps:,} steps replayed; parameters {found.digest}: {agreement}")
    if out is not None:
        typer.echo(f"written to {out}")
