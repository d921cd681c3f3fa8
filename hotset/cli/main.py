"""The ``hotset`` command: its subcommands and their options; what each does is in a module of its own."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from hotset._warnings import printable
from hotset.errors import ArgumentError, HotsetError, HotsetWarning, UnsupportedPlatform

__all__ = ["app", "main"]

app = typer.Typer(name="hotset", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _say_version(asked: bool) -> None:
    if asked:
        import hotset

        typer.echo(f"hotset {hotset.__version__}")
        raise typer.Exit


@app.callback()
def hotset_(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Keeps accelerators fed: a shared-memory cache and loader for PyTorch."""


Folder = Annotated[
    Path | None,
    typer.Argument(
        help="Folder with a subfolder of images per class; by default, photographs are generated."
    ),
]


@app.command()
def demo(
    folder: Folder = None,
    epochs: Annotated[int, typer.Option(help="Epochs per run.")] = 4,
    workers: Annotated[int, typer.Option(help="Worker processes per loader.")] = 2,
    batch_size: Annotated[int, typer.Option(help="Samples per batch.")] = 64,
    plot: Annotated[Path, typer.Option(help="Path of the plot, a PNG file.")] = Path("hotset-demo.png"),
    count: Annotated[int, typer.Option(help="Number of photographs to generate.")] = 2000,
) -> None:
    """Train a small CNN twice, with torch's DataLoader and with hotset, and compare."""
    from hotset.demo.run import demo as run

    raise typer.Exit(
        run(folder, epochs=epochs, workers=workers, batch_size=batch_size, plot=plot, count=count)
    )


@app.command()
def explain(
    place: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:OBJECT", help="A dataset, transforms, or a function that returns them."
        ),
    ],
    memory: Annotated[
        str, typer.Option(help="Memory limit of the cache: 64GiB, or 50% of what is free.")
    ] = "auto",
    resident: Annotated[
        str | None,
        typer.Option(help="Size of the window: a number of samples, a fraction, or an amount of memory."),
    ] = None,
    replace: Annotated[
        str, typer.Option(help='Fraction of the window to replace after each epoch, or "auto".')
    ] = "0.1",
    strict: Annotated[
        bool, typer.Option(help="Do not cache transforms that only a trial found deterministic.")
    ] = False,
    cut: Annotated[int | None, typer.Option(help="Number of transforms to cache.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per batch.")] = 64,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps, to compute the epochs.")
    ] = None,
) -> None:
    """Show what would be cached of a dataset, what stays live, and why. It reads a few samples.

    Given transforms alone, a Compose or a list, it shows what their structure tells.
    """
    from hotset.cli.explain import explained, load

    dataset = load(place)
    typer.echo(
        explained(
            dataset,
            memory=memory,
            resident=resident,
            replace=replace,
            strict=strict,
            cut=cut,
            batch_size=batch_size,
            steps=steps,
        )
    )


# A program's own options are not hotset's.
_PROGRAM_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}
Program = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- PROGRAM [ARGS]...", help="The program and its arguments.", show_default=False),
]


@app.command("run", context_settings=_PROGRAM_SETTINGS)
def run_program(
    command: Program = None,
    memory: Annotated[
        str, typer.Option(help="Memory limit of all that is kept: 64GiB, or 50% of what is free.")
    ] = "auto",
    session: Annotated[
        str | None, typer.Option(metavar="NAME", help="Session to keep it in for later jobs.")
    ] = None,
    spill: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder for what memory has no room for.")
    ] = None,
    memo: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:FUNCTION", help="One more function to memoise; may be repeated."),
    ] = None,
    evict: Annotated[
        str | None, typer.Option(help="lru: new values take the place of those used least recently.")
    ] = None,
) -> None:
    """Run a program so that each file is decoded once; no line of it is changed.

    The well-known decoders (cv2.imread, PIL, torchvision.io and others) are memoised in all of its Python
    processes. A report goes to stderr at the end.
    """
    from hotset.cli.run import run
    from hotset.run.environment import Options
    from hotset.run.program import die_as

    _require_folder()
    options = Options(
        memory=memory,
        spill=spill,
        session=session,
        evict=evict,  # type: ignore[arg-type]  # run() says what is wrong
        functions=tuple(memo or ()),
    )
    die_as(run(options, command or []))


@app.command("doctor", context_settings=_PROGRAM_SETTINGS)
def doctor_program(
    command: Program = None,
    seconds: Annotated[float, typer.Option(help="How long it is watched, from its first batch.")] = 60.0,
    keep: Annotated[bool, typer.Option("--keep", help="Let the program go on afterwards.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; the program's own output goes to stderr.")
    ] = False,
) -> None:
    """Tell what a training waits for, and what would help, in samples a second.

    The program runs as it is, for a minute or an epoch of ten seconds or more; then it is ended as by Ctrl-C.
    The exit code is 0, 3 if it iterates over no DataLoader, and the program's own if it fails by itself.
    """
    from hotset.cli.doctor import doctor
    from hotset.run.program import die_as

    _require_folder()
    die_as(doctor(command or [], seconds=seconds, keep=keep, as_json_text=as_json))


@app.command()
def check() -> None:
    """List the caches on this machine and verify every record in them; exit code 1 if one is damaged."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hotset.session.reports import check_caches
    from hotset.units import format_bytes

    table = Table("cache", "state", "of", "samples", "cached", "memory", "limit", "disk")
    problems: list[str] = []
    count = 0
    for report in check_caches():
        count += 1
        name, counts, figures = printable(report.name), report.counts, []
        if counts is not None and counts.samples:
            figures = [f"{counts.samples:,}", f"{counts.cached:,}"]
            figures += [format_bytes(counts.memory), format_bytes(counts.limit)]
            figures += [format_bytes(counts.disk)] if counts.disk else []
        table.add_row(Text(name), report.state, Text(report.owner), *figures)
        problems += [f"{name}: {printable(problem, longest=1000)}" for problem in report.problems]
    console = Console()
    if count == 0:
        console.print("There are no caches on this machine.")
        return
    console.print(table)
    for problem in problems:
        console.print(Text(problem, "red"))
    if problems:
        raise typer.Exit(1)


@app.command()
def gc() -> None:
    """Free what dead processes left behind, and expired sessions. Nothing that is in use is touched."""
    from hotset.server import leftover_files
    from hotset.session import recovery

    freed = [*recovery.gc(), *leftover_files.collect()]
    for sentence in freed:
        typer.echo(sentence)
    if not freed:
        typer.echo("There is nothing to free.")


Port = Annotated[int, typer.Option(min=1, max=65535, help="The server's port.")]
RunningPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="The server's port; not needed if only one server runs.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def start(
    host: Annotated[str, typer.Option(help="Address or host name to listen on.")] = "127.0.0.1",
    port: Port = 50052,
    memory: Annotated[
        str, typer.Option(help="Memory limit of all its sessions together: 80%, or 120GiB.")
    ] = "80%",
    spill: Annotated[
        str | None, typer.Option(metavar="DIR", help="Spill folder of sessions that name none.")
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="Log level: debug, info, warning, error or critical.")
    ] = "info",
    foreground: Annotated[bool, typer.Option(help="Run in the foreground, and log to the terminal.")] = False,
) -> None:
    """Start the cache server: a daemon with a budget for sessions, an API, a status page and metrics."""
    from hotset.server.options import Options

    _require_proc()
    options = Options.parse(
        host=host, port=port, memory=memory, spill=spill, level=log_level, logs_to_file=not foreground
    )
    if foreground:
        from hotset.server.daemon import serve

        raise typer.Exit(serve(options))
    from hotset.cli import server

    place = server.start(options)
    typer.echo(f"The cache server is process {place.pid} and answers at {place.url}.")
    typer.echo(f"Its log is {place.log}; `hotset stop` stops the server and destroys its sessions.")


@app.command()
def status(
    port: RunningPort = None,
    as_json: AsJson = False,
    token: Annotated[bool, typer.Option("--token", help="Print only the token.")] = False,
) -> None:
    """Show the state of the cache server and its sessions."""
    from hotset.cli import server
    from hotset.cli.client import client

    port = server.the_port(port)
    if token:
        typer.echo(server.token(port))
        return
    found = client(port).call("GET", "/api/status")
    if as_json:
        _print_json(found)
    else:
        from hotset.cli.session import print_status

        print_status(found)


@app.command()
def stop(port: RunningPort = None) -> None:
    """Stop the cache server, destroy its sessions, and free their memory."""
    from hotset.cli import server

    place = server.stop(server.the_port(port))
    typer.echo(f"The cache server of port {place.port} (process {place.pid}) has been stopped.")


@app.command()
def top(
    port: RunningPort = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Watch the sessions of the cache server in the terminal."""
    from hotset.cli.server import the_port
    from hotset.cli.top import top as run

    run(the_port(port), interval, once)


@app.command(
    "cache-admin",
    add_help_option=False,
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
        "ignore_unknown_options": True,
    },
)
def cache_admin(context: typer.Context) -> None:
    """The command line of MindSpore's cache_admin; `hotset cache-admin --help` lists its options."""
    from hotset.cli.cache_admin import main as run

    raise typer.Exit(run(context.args))


session_app = typer.Typer(no_args_is_help=True)
app.add_typer(session_app, name="session")


@session_app.callback()
def session_() -> None:
    """Create, list, show, resize and destroy sessions, and pin their caches."""
    _require_proc()


Which = Annotated[str, typer.Argument(metavar="NAME", help="Name or number.")]


@session_app.command("create")
def create_session(
    name: Annotated[str, typer.Argument(help="Letters, digits, dots, underscores and hyphens.")],
    memory: Annotated[
        str | None,
        typer.Option(help="Memory limit of all its caches together: 120GiB, or 50% of the machine's memory."),
    ] = None,
    spill: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder for samples beyond that; 64 MiB or 1% of its disk, whichever is more, stays free.",
        ),
    ] = None,
    ttl: Annotated[str | None, typer.Option(help="Time to live after the last use, such as 24h.")] = None,
    persist: Annotated[bool, typer.Option("--persist", help="Keep spilled samples across a reboot.")] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of the server that owns the session; not needed if only one server runs.",
        ),
    ] = None,
) -> None:
    """Create a session. If a server runs, the server owns it."""
    from hotset.cli import session

    made = session.create(name, memory=memory, spill=spill, ttl=ttl, persist=persist, port=port)
    session.console().print(session.describe(made))


@session_app.command("list")
def list_sessions(as_json: AsJson = False) -> None:
    """List the sessions on this machine."""
    from hotset.cli import session

    found = session.list_all()
    if as_json:
        _print_json(found)
    elif found:
        session.console().print(session.sessions_table(found))
    else:
        typer.echo("There are no sessions on this machine; `hotset session create NAME` creates one.")


@session_app.command("show")
def show_session(name: Which, as_json: AsJson = False) -> None:
    """Show a session and its caches."""
    from hotset.cli import session

    found = session.show(name)
    if as_json:
        _print_json(found)
    else:
        session.console().print(session.describe(found))


@session_app.command("resize")
def resize_session(
    name: Which,
    memory: Annotated[str, typer.Option(help="Memory limit of all its caches together: 200GiB, or 80%.")],
    as_json: AsJson = False,
) -> None:
    """Change a session's memory limit, also while jobs use it. Unused caches are dropped if they must be."""
    from hotset.cli import session

    found = session.resize(name, memory)
    if as_json:
        _print_json(found)
    else:
        typer.echo(session.resized_text(found))


@session_app.command("pin")
def pin_cache(
    name: Which,
    cache: Annotated[
        str, typer.Argument(help="Id or name of the cache, as `hotset session show` lists them.")
    ],
    off: Annotated[bool, typer.Option("--off", help="Unpin the cache: it may be dropped again.")] = False,
) -> None:
    """Pin a cache: it stays while no job uses it, even if other caches need the memory."""
    from hotset.session import reclaim, sessions

    found = printable(reclaim.pin(sessions.find(name), cache, not off))
    typer.echo(f"Unpinned {found}: unused, it is dropped for others." if off else f"Pinned {found}.")


@session_app.command("destroy")
def destroy_session(name: Which) -> None:
    """Destroy a session. Jobs that use it read from their source from then on."""
    from hotset.session import sessions
    from hotset.units import format_bytes

    typer.echo(f"Destroyed session {printable(name)}; {format_bytes(sessions.destroy(name))} freed.")


cluster_app = typer.Typer(help="Sessions that several machines share.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")

Address = Annotated[
    str, typer.Option(help="Address of the Ray cluster: host:port, or auto for this machine's.")
]


@cluster_app.command("status")
def cluster_status(
    session: Annotated[
        str | None, typer.Argument(metavar="[SESSION]", help="Show only this session.")
    ] = None,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Show the machines that share a session, and the traffic between them."""
    from hotset.cli import cluster
    from hotset.cli.session import console

    found = cluster.status(address, session)
    if as_json:
        _print_json(found)
    else:
        console().print(cluster.described(found))


@cluster_app.command("stop")
def cluster_stop(
    session: Annotated[str, typer.Argument(help="Name of the session.")], address: Address = "auto"
) -> None:
    """Destroy a session on all machines. Jobs that use it read from their source from then on."""
    from hotset.cli import cluster
    from hotset.units import format_bytes

    freed = cluster.stop(address, session)
    typer.echo(f"Destroyed session {printable(session)} on all machines; {format_bytes(freed)} freed.")


def _require_proc() -> None:
    """Refuse to go on where sessions cannot be reached, before anything of one is changed."""
    from hotset.store.locks import can_reopen

    if not can_reopen():
        raise UnsupportedPlatform(
            "/proc must be mounted, as processes reach sessions through it; mount it "
            "(`mount -t proc proc /proc`)."
        )


def _require_folder() -> None:
    """Refuse to begin where torch would end this process as it is imported for the report."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ArgumentError(
            "the working directory must exist, as torch needs one to be imported; change to one that does."
        ) from None


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, indent=2))


def _show(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    typer.echo(
        f"{'Warning' if issubclass(category, HotsetWarning) else category.__name__}: {message}", err=True
    )


def main() -> None:
    """Run the command line. What goes wrong is printed as one sentence, with exit code 2."""
    if sys.argv[1:2] == ["cache-admin"]:
        # Scripts call this command in loops: it must not wait for the imports of typer.
        from hotset.cli.cache_admin import main as run

        sys.exit(run(sys.argv[2:]))
    # A warning is for the user who typed the command: there is no line of code to point at.
    warnings.showwarning = _show
    try:
        app(prog_name="hotset")
    except HotsetError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a working directory that is gone
        typer.echo(f"The machine does not allow it: {error}.", err=True)
        sys.exit(2)
