"""The commands of `advise` for who runs a server: `serve`, and `token` for who may call it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.exits import GIVEN, NO_TRIAL

if TYPE_CHECKING:
    from advisor.service.access import Role
    from advisor.service.binding import Secured
    from advisor.service.server import Settings

_OLDEST_S = 100 * 365.25 * 86_400


def serve(  # noqa: PLR0913 - one parameter for each option
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on.")
    ] = "127.0.0.1:50551",
    unix: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Listen on a Unix socket instead.")
    ] = None,
    workload_root: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Run files below it (repeatable). Without one: below this folder."
        ),
    ] = None,
    allow_module: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run functions of this installed module (repeatable)."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate of the server, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key, PEM.")] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Clients show a certificate that this one has signed."),
    ] = None,
    client_role: Annotated[
        str, typer.Option(help="Role of who shows one: estimate, read, profile, admin.")
    ] = "profile",
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Clients show a token with a line here (advise token)."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Loopback address of metrics for Prometheus."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say whether it could start so, and end.")
    ] = False,
) -> int:
    """Run the advisor as a gRPC server, until Ctrl-C or SIGTERM.

    Whoever reaches it runs what is below the folders named, as this user: beyond the loopback
    address it takes TLS, and callers who say who they are.
    """
    from advisor.places import data_folder
    from advisor.service.access import Access
    from advisor.service.admission import Admission
    from advisor.service.log import log_to_stderr
    from advisor.service.metrics import Metrics, Prometheus
    from advisor.service.server import Settings, check_settings
    from advisor.service.server import serve as run_server

    certified = _role(client_role, "--client-role") if client_ca is not None else None
    access = Access(token_file, certified=certified)
    data = data_folder()
    settings = Settings(
        address=listen if unix is None else f"unix:{unix}",
        admission=Admission.of(workload_root or (Path.cwd(),), allow_module or (), data),
        access=access,
        metrics=Metrics() if metrics is None else Prometheus(metrics),
        secured=_secured(tls_cert, tls_key, client_ca, asks=access.asks),
    )
    if check:
        check_settings(settings, data)
        print(_would_serve(settings))
        return GIVEN
    log_to_stderr()
    run_server(settings)
    return GIVEN


def health(
    server: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The server to ask.")
    ] = "127.0.0.1:50551",
) -> int:
    """Ask a server whether it takes work: ends with 0 if it does, with 3 if not."""
    from advisor.client import Client

    with Client(server) as client:
        said = client.health()
    print(said)
    return GIVEN if said == "SERVING" else NO_TRIAL


def gc(
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Delete what is older: 90d, 12h.")
    ] = "90d",
) -> int:
    """Delete old campaigns, their trials and advices; what was learnt of outcomes stays."""
    from datetime import UTC, datetime, timedelta

    from advisor.places import data_folder
    from advisor.profiler.errors import PlanError
    from advisor.profiler.units import parse_duration
    from advisor.service.job_store import JobStore
    from advisor.service.store import Store

    age_s = parse_duration(older_than, "--older-than")
    if age_s > _OLDEST_S:
        raise PlanError(f"--older-than {older_than} is out of range", "a century is the most")
    age = timedelta(seconds=age_s)
    before = (datetime.now(UTC) - age).isoformat(timespec="seconds")
    with Store(data_folder()) as store:
        gone = JobStore(store).forget(before)
    print(f"Deleted {gone.advices} advices, {gone.trials} trials, {gone.campaigns} campaigns.")
    return GIVEN


def token(
    name: Annotated[str, typer.Argument(help="Whose token it is, as logs name them.")],
    role: Annotated[str, typer.Option(help="estimate, read, profile or admin.")] = "profile",
) -> int:
    """Make a token: its line for the server's --token-file on stdout, itself on stderr, once.

    advise token ci --role profile >> tokens
    """
    from advisor.service.access import new_token

    made, line = new_token(_role(role, "--role"), name)
    print(line)
    print(f"The token of {name}, shown this once: {made}", file=sys.stderr)
    return GIVEN


def _role(name: str, option: str) -> Role:
    from advisor.profiler.errors import PlanError
    from advisor.service.access import Role

    try:
        return Role[name.upper()]
    except KeyError:
        known = ", ".join(role.name.lower() for role in Role)
        raise PlanError(f"{option} {name!r} is unknown", mend=f"known are {known}") from None


def _secured(cert: Path | None, key: Path | None, ca: Path | None, *, asks: bool) -> Secured | None:
    from advisor.profiler.errors import PlanError
    from advisor.service.binding import Secured

    if cert is not None and key is not None:
        return Secured.by(cert, key, ca, asks=asks)
    if cert is not None or key is not None or ca is not None:
        raise PlanError(
            "--tls-cert and --tls-key belong together",
            "--client-ca takes both" if ca is not None else "one without the other is no TLS",
            "give both",
        )
    return None


def _would_serve(settings: Settings) -> str:
    """Returns in one sentence what a server would be."""
    roots = ", ".join(map(str, settings.admission.roots or ()))
    how = "with TLS" if settings.secured is not None else "without TLS"
    whom = "callers it knows" if settings.access.asks else "whoever reaches it"
    return f"It would serve {whom} on {settings.address}, {how}, and run what is below {roots}."
