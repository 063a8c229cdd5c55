"""`opusim audit --mechanism KIND`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer


def audit_mechanism_command(
    kind: str,
    *,
    mode: str,
    steps: int,
    settings: Sequence[str],
    seed: int | None,
    level: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the self-test behind a progress line, print it and keep it.

    Raises:
        typer.Exit: With code 1, if a check raised an alarm.
    """
    import json

    from opusim.files import require_writable
    from opusim.progress import Progress
    from training.attacks.mechanism.audit import audit_mechanism
    from training.attacks.mechanism.report import report_text
    from training.runs.storage import write_json

    if out is not None:
        require_writable(out, "--out")
    with Progress(f"self-test of {kind}", "steps") as progress:
        found = audit_mechanism(
            kind,
            mode=mode,
            steps=steps,
            settings=settings,
            seed=seed,
            level=level,
            on_start=progress.start,
            on_step=progress.advance,
        )
    if out is not None:
        write_json(out, found.to_json())
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else report_text(found))
    if not found.holds:
        raise typer.Exit(1)
