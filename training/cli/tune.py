"""`opusim tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from training.cli import options
from training.cli.training_runs import flag_changes, private_changes

if TYPE_CHECKING:
    from training.tuning.search import Search, SearchResult

Choose = Annotated[
    list[str] | None,
    typer.Option(
        "--choose", metavar="KEY=VALUE,VALUE,...", help="Values of a key to choose from; repeatable."
    ),
]
Trials = Annotated[float, typer.Option(help="Expected number of trials; the number itself is Poisson.")]
_CHOICES = ("trainer.clip=0.35,0.5,0.7", "optimizer.schedule=constant,linear")
EXAMPLE = """[bold]Example[/bold]

opusim tune --data mnist --epsilon 3 --trials 5 --choose trainer.clip=0.35,0.5 --choose epochs=5,10 --out runs/search

The same command resumes a search that was stopped."""


def mount(app: typer.Typer) -> None:
    """Add the command to `opusim`."""
    app.command("tune", epilog=EXAMPLE)(tune)


def tune(
    out: Annotated[Path, typer.Option(help="The folder of the search.")],
    epsilon: Annotated[float, typer.Option(help="Of the whole search, the choice included.")],
    trials: Trials = 5.0,
    choose: Choose = None,
    config: options.Config = None,
    settings: options.Settings = None,
    data: options.Data = None,
    epochs: options.Epochs = None,
    seed: options.Seed = None,
    delta: options.Delta = None,
    release: options.ReleaseMode = False,
    quiet: options.Quiet = False,
) -> None:
    """Choose a convex run's settings privately: the best of a Poisson number of trials, and the epsilon of it all."""
    from opusim import checks
    from training.config.reading import load_config
    from training.tuning.grid import parse_choices
    from training.tuning.search import Search

    checks.positive(trials=trials, remedy="such as 5")
    changes = flag_changes("convex", data, epochs, seed)
    changes |= private_changes(None, epsilon, delta, None, release)
    changes["protection"]["kind"] = "last-iterate"
    search = Search(
        load_config(config, settings or (), changes),
        parse_choices(choose or _CHOICES),
        mean=trials,
        folder=out,
    )

    found = _run(search, quiet=quiet, release=release)
    if quiet:
        typer.echo(out)
        return
    from accounting.tables import guarantee_rows, print_rows

    print_rows(guarantee_rows([found.guarantee], seed_stored=not release))
    if found.searches > 1:
        typer.echo(
            f"{found.searches} searches were paid for in this folder; this epsilon is that of all of them"
        )
    if found.run is None:
        typer.echo("no trial was drawn: the search found nothing, and searching again costs again")
        return
    typer.echo(f"best: {', '.join(found.settings)}; score {100 * (found.score or 0):.2f} % (noised)")
    typer.echo(f"run folder: {found.run.folder.path}")


def _run(search: Search, *, quiet: bool, release: bool) -> SearchResult:
    """Run the search behind a progress line."""
    from opusim.progress import Progress

    if quiet:
        return search.run()
    if release:
        typer.echo("the number of trials below is private: do not publish it", err=True)
    with Progress("tune", "trials") as progress:

        def tell(done: int, of: int) -> None:
            if done:
                progress.advance(done=done)
            else:
                progress.start(of, at_once=True)

        return search.run(tell)
