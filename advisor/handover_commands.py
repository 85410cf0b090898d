"""The commands of the hand-over: `advise env`, `exec`, `caches`, `pack`, `unpack`, `push`, `pull`.

Heavy modules are imported inside them, as in `cli`, which they are a part of.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from advisor.exits import GIVEN

if TYPE_CHECKING:
    from advisor.profiler.handover import Handed

_Name = Annotated[
    str, typer.Argument(metavar="ID", help="An advice, or a compile cache of `advise caches`.")
]
_Server = Annotated[
    str, typer.Option("--server", metavar="HOST:PORT", help="The advisor that runs there.")
]
_File = Annotated[Path, typer.Argument(metavar="FILE", help="The archive.")]


def env(name: _Name) -> int:
    """Print the variables with which a run starts from a trial's compile cache.

    In a shell: eval "$(advise env ID)"
    """
    from advisor import handover

    for variable, value in handover.variables(handed_over(name)).items():
        print(f"export {variable}={shlex.quote(value)}")
    return GIVEN


def execute(
    name: _Name,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What to run, as it is.")
    ],
) -> NoReturn:
    """Run a command that starts from a trial's compile cache, and say whether it served.

    advise exec ID -- python train.py
    """
    import shutil

    from advisor import handover
    from advisor.injection import injected
    from advisor.profiler.errors import PlanError

    # What stands behind an argument is passed on as it is, the separator with it.
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise PlanError("there is no command to run", mend="advise exec ID -- python train.py")
    handed = handed_over(name)
    if shutil.which(command[0]) is None:
        raise PlanError(f"{command[0]!r} cannot be run", "there is no such command")
    environment = injected({**os.environ, **handover.variables(handed)})
    with handover.store().in_use(handed.bundle) as descriptor:
        # Inherited by the command, which thereby keeps the cache in place as long as it lives.
        os.set_inheritable(descriptor, True)
        os.execvpe(command[0], command, environment)


def caches() -> int:
    """List the compile caches that runs can start from, the latest used first."""
    from rich.console import Console
    from rich.table import Table

    from advisor import handover
    from advisor.profiler.units import config_name, size

    table = Table(box=None, pad_edge=False)
    for title in ("cache", "advice", "configuration", "size", "torch", "made"):
        table.add_column(title)
    bundles = handover.store().bundles()
    for bundle in bundles:
        facts = bundle.facts
        table.add_row(
            bundle.bundle_id,
            facts.advice_id,
            config_name(facts.config),
            size(bundle.size),
            facts.place.torch,
            facts.created[:16],
        )
    if bundles:
        Console(soft_wrap=True).print(table)
    else:
        print("There are no compile caches yet: advise run keeps that of the best configuration.")
    return GIVEN


def pack(name: _Name, file: _File) -> int:
    """Write a compile cache into one file, for other machines of the same kind."""
    from advisor import handover
    from advisor.profiler import archive
    from advisor.profiler.units import size

    store = handover.store()
    bundle = store.find(name)
    written = archive.pack(store, bundle, file)
    print(f"{file}: compile cache {bundle.bundle_id}, {size(written)}")
    return GIVEN


def unpack(file: _File) -> int:
    """Keep the compile cache of a file that `advise pack` wrote, so that runs can start from it."""
    from advisor import handover
    from advisor.profiler import archive

    bundle = archive.unpack(handover.store(), file)
    print(f"compile cache {bundle.bundle_id}: advise exec {bundle.bundle_id} -- python train.py")
    return GIVEN


def push(name: _Name, server: _Server) -> int:
    """Send a compile cache to a running advisor, so that other machines can fetch it."""
    import tempfile

    from advisor import handover
    from advisor.client import Client
    from advisor.profiler import archive

    store = handover.store()
    bundle = store.find(name)
    with tempfile.TemporaryDirectory(prefix="advise-") as folder, Client(server) as client:
        file = Path(folder, "cache.tgz")
        archive.pack(store, bundle, file)
        kept = client.put_cache(file)
    print(f"compile cache {kept}: advise pull {kept} --server {server}")
    return GIVEN


def pull(name: _Name, server: _Server) -> int:
    """Fetch a compile cache from a running advisor, so that runs here can start from it."""
    import tempfile

    from advisor import handover
    from advisor.client import Client
    from advisor.profiler import archive

    with tempfile.TemporaryDirectory(prefix="advise-") as folder, Client(server) as client:
        file = Path(folder, "cache.tgz")
        client.get_cache(name, file)
        bundle = archive.unpack(handover.store(), file)
    print(f"compile cache {bundle.bundle_id}: advise exec {bundle.bundle_id} -- python train.py")
    return GIVEN


def handed_over(name: str) -> Handed:
    """Returns a compile cache, laid out for a run on this machine."""
    from advisor import handover
    from advisor.profiler import place

    store = handover.store()
    bundle = store.find(name)
    return store.hand_over(bundle, place.here())


def add_to(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command(name="env")(env)
    # What belongs to the command to run is not for us to read.
    passing_on = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command(name="exec", context_settings=passing_on)(execute)
    app.command(name="caches")(caches)
    app.command(name="pack")(pack)
    app.command(name="unpack")(unpack)
    app.command(name="push")(push)
    app.command(name="pull")(pull)
