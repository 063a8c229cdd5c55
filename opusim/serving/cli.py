"""The commands of served devices: ``opusim device keys new``, ``serve`` and ``usage``; heavy imports wait inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opusim.errors import ConfigError
from opusim.files import FIGURES, require_writable
from opusim.tables import print_table

_NAME = Annotated[str, typer.Argument(help="A device's name, or a path ending in .toml.")]
_JOURNAL = Annotated[
    Path | None, typer.Option("--journal", help="File with one line of JSON for each minute of use.")
]
keys_app = typer.Typer(name="keys", no_args_is_help=True)


@keys_app.callback()
def keys() -> None:
    """Make the keys that open served devices."""


@keys_app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(help="Your name; 'server' for a server's own pair.")],
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where; ~/.config/opusim/keys by default.")
    ] = None,
    days: Annotated[int, typer.Option("--days", help="Days until the key expires.")] = 365,
) -> None:
    """Make a key pair: NAME.key stays here, NAME.pub goes to the other side."""
    from opusim.serving.keys import keys_folder, make_key, require_zmq

    require_zmq()
    place = folder or keys_folder()
    key = make_key(name, place, days=days)
    typer.echo(f"secret, never to be sent: {place / f'{name}.key'}")
    typer.echo(f"public, for the other side: {place / f'{name}.pub'}")
    typer.echo(f"public key {key.public}, accepted until {key.expires}")


def serve_command(
    name: _NAME,
    bind: Annotated[str, typer.Option("--bind", help="Where to listen: tcp://HOST:PORT.")],
    keys: Annotated[Path, typer.Option("--keys", help="Folder of server.key and of the users' .pub files.")],
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="Certificate whose noise every client is told.")
    ] = None,
    inputs: Annotated[int | None, typer.Option("--inputs", help="Inputs to serve; all by default.")] = None,
    outputs: Annotated[
        int | None, typer.Option("--outputs", help="Outputs to serve; all by default.")
    ] = None,
    journal: _JOURNAL = None,
    clients: Annotated[int, typer.Option("--clients", help="Clients at once, at most.")] = 256,
    clients_per_user: Annotated[
        int, typer.Option("--clients-per-user", help="Clients of one user at once, at most.")
    ] = 64,
    request_mib: Annotated[float, typer.Option("--request-mib", help="Largest message from a client.")] = 64,
    reply_mib: Annotated[float, typer.Option("--reply-mib", help="Largest reading.")] = 256,
    silence_s: Annotated[
        float, typer.Option("--silence-s", help="Seconds after which a silent client loses its place.")
    ] = 20,
    idle_s: Annotated[
        float, typer.Option("--idle-s", help="Seconds without a call that a client may keep others out.")
    ] = 3600,
    torch_device: Annotated[
        str, typer.Option("--torch-device", help="Where a simulation computes: cpu, cuda.")
    ] = "cpu",
) -> None:
    """Share a device over the network until Ctrl-C or SIGTERM; clients name it remote://HOST:PORT."""
    import logging
    import signal
    import threading

    from opusim.description.schema import load_description
    from opusim.serving.instrument import Instrument
    from opusim.serving.journal import Journal, journal_file
    from opusim.serving.keys import Users, require_zmq
    from opusim.serving.server import Limits, Server

    require_zmq()
    limits = Limits(
        clients=clients,
        clients_per_user=clients_per_user,
        request_mib=request_mib,
        reply_mib=reply_mib,
        silence_s=silence_s,
        idle_s=idle_s,
    )
    description, users = load_description(name), Users(keys)
    kept = Journal(journal or journal_file(description.name))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")
    logging.getLogger("opusim").setLevel(logging.INFO)
    instrument = Instrument(
        description, n_inputs=inputs, n_outputs=outputs, certificate=certificate, torch_device=torch_device
    )
    try:
        server = Server(instrument, users, bind=bind, journal=kept, limits=limits)
    except BaseException:
        instrument.close()
        raise
    typer.echo(f"serving {description.name} at {server.endpoint}; journal: {kept.path}")
    server.run(stop)


def usage_command(
    name: Annotated[str | None, typer.Argument(help="The served device's name.")] = None,
    journal: _JOURNAL = None,
    days: Annotated[int | None, typer.Option("--days", help="Only the last days.")] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw each user's hours over days into this file.")
    ] = None,
) -> None:
    """Show who used a served device how much, on the machine that serves it."""
    import datetime

    from opusim.serving.journal import USAGE_COLUMNS, journal_file, read_journal, usage_figure, usage_rows

    if figure is not None:
        require_writable(figure, "--figure", FIGURES)
    if journal is None and name is None:
        raise ConfigError(
            "command line", "NAME", "is missing; name the served device, or give --journal FILE"
        )
    entries = read_journal(journal or journal_file(str(name)))
    if days is not None:
        first = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
        entries = [entry for entry in entries if datetime.datetime.fromisoformat(entry.time) >= first]
    print_table("Use of the device", USAGE_COLUMNS, usage_rows(entries))
    if figure is not None:
        usage_figure(entries).savefig(figure, dpi=110)
        typer.echo(f"figure: {figure}")


def add_to(app: typer.Typer) -> None:
    """Add the commands to ``opusim device``."""
    app.add_typer(keys_app)
    app.command("serve")(serve_command)
    app.command("usage")(usage_command)
