"""`opusim account convex-plan`: which descent reaches an epsilon."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from accounting.convex.planning import Plan


def mount(app: typer.Typer) -> None:
    """Add the command to `opusim account`."""
    app.command("convex-plan")(convex_plan)


def convex_plan(
    target_epsilon: Annotated[float, typer.Option(help="What the last iterate may cost, above 0.")],
    batches: Annotated[int, typer.Option(help="k, steps of an epoch: records / batch size.")],
    objective: Annotated[str, typer.Option(help="squared, margin, one-against-rest or softmax.")] = "margin",
    clip: Annotated[float | None, typer.Option(help="Bound of a record's residual.")] = 0.5,
    learning_rate: Annotated[float, typer.Option(help="eta, below 2 / (beta + lambda).")] = 1.9,
    schedule: Annotated[str, typer.Option(help="constant, linear or cosine.")] = "constant",
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Keep this noise, and find the regularisation or the epochs instead.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Epochs of the run whose regularisation is found, 40 by default; with --noise-multiplier."
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="At which epsilon is stated, in (0, 1).")] = 1e-5,
) -> None:
    """Ways to reach an epsilon: the least noise at several lengths; or, for a given noise, lambda or epochs."""
    from accounting.convex.mechanisms import ConvexLastIterate
    from accounting.convex.planning import least_regularisation, most_epochs, plans
    from accounting.errors import NoGuarantee
    from accounting.tables import print_rows
    from opusim import checks

    checks.integer(minimum=1, batches=batches)
    if epochs is not None and noise_multiplier is None:
        raise ValueError(
            f"--epochs = {epochs} does nothing without --noise-multiplier: the table shows several lengths; "
            "leave it out"
        )
    start = ConvexLastIterate(
        objective=objective,
        clip=clip,
        learning_rate=learning_rate,
        schedule=schedule,
        batches=batches,
        epochs=40 if epochs is None else epochs,
        noise_multiplier=1.0 if noise_multiplier is None else noise_multiplier,
        final_noise=math.sqrt(batches - 1),
    )
    if noise_multiplier is None:
        found = plans(
            start, target_epsilon=target_epsilon, delta=delta, epochs=(1, 2, 5, 10, 20, 40, 100, 400)
        )
        print_rows([_row(plan) for plan in found])
        return
    for name, solve in (("regularisation", least_regularisation), ("epochs", most_epochs)):
        try:
            value = getattr(solve(start, target_epsilon=target_epsilon, delta=delta), name)
            typer.echo(f"{'least' if name == 'regularisation' else 'most'} {name}: {value:.6g}")
        except NoGuarantee as refused:
            typer.echo(f"{name}: {refused}")


def _row(plan: Plan) -> dict[str, str]:
    """A row of the table."""
    from accounting.tables import number

    return {
        "epochs": str(plan.mechanism.epochs),
        "noise multiplier": f"{plan.mechanism.noise_multiplier:.4g}",
        "noise on a weight [C / records]": f"{plan.weight_noise:.4g}",
        "epsilon": number(plan.epsilon),
    }
