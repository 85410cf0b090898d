"""Who may call what: a table of methods and roles, tokens, certificates, and how far it listens."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from served import Served, request

from advisor.cli import main
from advisor.client import Client
from advisor.convert import request_message
from advisor.places import data_folder
from advisor.profiler.errors import AdvisorError, HostError, NotFoundError, PlanError
from advisor.service.access import METHODS, Access, Role, new_token
from advisor.service.binding import Secured, bound
from advisor.service.errors import Denied, Unauthenticated, error_of
from advisor.v1 import advisor_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Advisor"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADVISOR_DATA_DIR", str(tmp_path / "data"))
    return data_folder()


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="adv-") as folder:
        yield Path(folder, "s")


def token_file(folder: Path, *roles: Role) -> tuple[Path, dict[Role, str]]:
    tokens, lines = {}, ["# who calls", ""]
    for role in roles:
        tokens[role], line = new_token(role, f"a-{role.name.lower()}")
        lines.append(line)
    path = folder / "tokens"
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path, tokens


def run(
    test: Callable[[Served], Awaitable[None]], data: Path, socket: Path, access: Access
) -> None:
    async def running() -> None:
        async with asyncio.timeout(60), Served(data, socket, access=access) as it:
            await test(it)

    asyncio.run(running())


def test_every_method_has_a_role() -> None:
    assert set(METHODS) == {method.name for method in SERVICE.methods}


async def answer(it: Served, method: str, token: str | None) -> AdvisorError | None:
    """Returns what a call with an empty request is answered; None: it was let in."""
    found: Any = SERVICE.methods_by_name[method]
    kind = {
        (False, False): it.channel.unary_unary,
        (False, True): it.channel.unary_stream,
        (True, False): it.channel.stream_unary,
    }[found.client_streaming, found.server_streaming]
    call = kind(f"/{SERVICE.full_name}/{method}")
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    try:
        made: Any = call(iter([b""]) if found.client_streaming else b"", metadata=metadata)
        if found.server_streaming:
            async for _ in made:
                pass
        else:
            await made
    except grpc.aio.AioRpcError as error:
        refused = error_of(error)
        return refused if isinstance(refused, Denied | Unauthenticated) else None
    return None


def test_roles_hold_for_each_method(data: Path, socket: Path, tmp_path: Path) -> None:
    path, tokens = token_file(tmp_path, *Role)

    async def test(it: Served) -> None:
        for method, needed in METHODS.items():
            for role, token in tokens.items():
                said = await answer(it, method, token)
                assert (said is None) == (role >= needed), (method, role, said)
            for unknown in (None, "", "no such token", tokens[Role.ADMIN][:-1]):
                said = await answer(it, method, unknown)
                assert isinstance(said, Unauthenticated), (method, unknown)
        assert it.host.specs == []

    run(test, data, socket, Access(path))


def test_tokens_come_and_go_while_it_runs(data: Path, socket: Path, tmp_path: Path) -> None:
    path, tokens = token_file(tmp_path, Role.READ)

    async def test(it: Served) -> None:
        assert await answer(it, "ListTrials", tokens[Role.READ]) is None
        _, later = token_file(tmp_path, Role.PROFILE)
        os.utime(path, ns=(1, 1))
        assert isinstance(await answer(it, "ListTrials", tokens[Role.READ]), Unauthenticated)
        assert await answer(it, "ListTrials", later[Role.PROFILE]) is None
        # Broken, those known still hold.
        path.write_text("nonsense\n")
        os.utime(path, ns=(2, 2))
        assert await answer(it, "ListTrials", later[Role.PROFILE]) is None

    run(test, data, socket, Access(path))


def test_token_is_never_told(
    data: Path, socket: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, tokens = token_file(tmp_path, Role.READ)
    token = tokens[Role.READ]

    async def test(it: Served) -> None:
        said = await answer(it, "PutCache", token)
        assert isinstance(said, Denied) and token not in str(said)
        assert isinstance(await answer(it, "PutCache", f"{token}x"), Unauthenticated)

    caplog.set_level(0)
    run(test, data, socket, Access(path))
    assert token not in caplog.text and token not in path.read_text()


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("profile ci", 0o600, "line 1 is no token"),
        ("owner ci " + "0" * 64, 0o600, "the role owner is unknown"),
        ("", 0o644, "can be read by others"),
        ("\xff", 0o600, "it is no text"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_file_of_tokens_that_makes_no_sense(
    tmp_path: Path, text: str | None, mode: int, words: str
) -> None:
    path = tmp_path / "tokens"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
        path.chmod(mode)
    with pytest.raises(PlanError, match=words):
        Access(path)


def test_token_command_makes_a_line_and_shows_the_token_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "ci", "--role", "read"]) == 0
    out, err = capsys.readouterr()
    path = tmp_path / "tokens"
    path.write_text(out)
    path.chmod(0o600)
    Access(path)
    shown = err.strip().rpartition(" ")[2]
    assert shown not in out and len(shown) > 30
    assert main(["token", "a b"]) == 2
    assert main(["token", "ci", "--role", "owner"]) == 2
    assert "known are estimate, read, profile, admin" in capsys.readouterr().err


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with two authorities, a server's certificate and a client's of each."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for ca in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={ca}",
                "-keyout", f"{ca}.key", "-out", f"{ca}.pem")  # fmt: skip
    for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key",
                "-CAcreateserial", "-days", "2", "-extfile", "names",
                "-out", f"{name}.pem")  # fmt: skip
    return folder


class Running:
    """A server on a port of 127.0.0.1, in a thread."""

    def __init__(self, data: Path, access: Access, secured: Secured) -> None:
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._until: asyncio.Event | None = None
        self.port = 0
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._serve(data, access, secured))
        )

    async def _serve(self, data: Path, access: Access, secured: Secured) -> None:
        self._until = asyncio.Event()
        async with Served(data, None, access=access, secured=secured) as it:
            self.port = it.port
            self._ready.set()
            await self._until.wait()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._until is not None
        self._loop.call_soon_threadsafe(self._until.set)
        self._thread.join(30)
        self._loop.close()


def calls(monkeypatch: pytest.MonkeyPatch, port: int, **variables: Path | str) -> None:
    """Calls a server as whoever the variables say; returns where it was let in."""
    for name in ("CA_FILE", "CLIENT_CERT", "CLIENT_KEY", "TOKEN", "TOKEN_FILE"):
        monkeypatch.delenv(f"ADVISOR_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"ADVISOR_{name}", str(value))
    monkeypatch.setattr("advisor.client._CONNECT_S", 2.0)
    with Client(f"127.0.0.1:{port}") as client, pytest.raises(NotFoundError):
        client.get_advice("none")


def test_one_caller_has_so_many_campaigns_and_others_theirs(
    data: Path, socket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens = token_file(tmp_path, Role.PROFILE, Role.ADMIN)
    monkeypatch.setattr("advisor.service.jobs.MOST_OF_ONE", 1)

    async def test(it: Served) -> None:
        it.host.play = it.host.hang

        def asks(role: Role, steps: float) -> Any:
            shown = (("authorization", f"Bearer {tokens[role]}"),)
            return it.stub.Advise(request_message(request(steps)), metadata=shown)

        calls = [asks(Role.PROFILE, 1e6), asks(Role.ADMIN, 2e6)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError, match="campaigns of a-profile wait") as caught:
            await asks(Role.PROFILE, 3e6).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(test, data, socket, Access(path))


def test_tls_with_tokens(
    data: Path, tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens = token_file(tmp_path, Role.READ)
    secured = Secured.by(certificates / "server.pem", certificates / "server.key", None, asks=True)
    ca = certificates / "ca.pem"
    shown = tmp_path / "token"
    shown.write_text(tokens[Role.READ] + "\n")
    with Running(data, Access(path), secured) as it:
        calls(monkeypatch, it.port, CA_FILE=ca, TOKEN=tokens[Role.READ])
        calls(monkeypatch, it.port, CA_FILE=ca, TOKEN_FILE=shown)
        with pytest.raises(Unauthenticated, match="ADVISOR_TOKEN_FILE"):
            calls(monkeypatch, it.port, CA_FILE=ca)
        # In the clear, or trusting somebody else, nobody gets as far as that.
        with pytest.raises(HostError):
            calls(monkeypatch, it.port, TOKEN=tokens[Role.READ])
        with pytest.raises(HostError):
            calls(monkeypatch, it.port, CA_FILE=certificates / "other.pem")
        with pytest.raises(PlanError, match="ADVISOR_TOKEN_FILE"):
            calls(monkeypatch, it.port, CA_FILE=ca, TOKEN_FILE=tmp_path / "none")


def test_tls_with_certificates_of_clients(
    data: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = certificates / "ca.pem"
    secured = Secured.by(certificates / "server.pem", certificates / "server.key", ca, asks=True)
    with Running(data, Access(certified=Role.READ), secured) as it:
        calls(monkeypatch, it.port, CA_FILE=ca, CLIENT_CERT=certificates / "client.pem",
              CLIENT_KEY=certificates / "client.key")  # fmt: skip
        with pytest.raises(HostError):
            calls(monkeypatch, it.port, CA_FILE=ca)
        with pytest.raises(HostError):
            calls(monkeypatch, it.port, CA_FILE=ca, CLIENT_CERT=certificates / "stranger.pem",
                  CLIENT_KEY=certificates / "stranger.key")  # fmt: skip


def test_beyond_the_loopback_address_only_secured(certificates: Path) -> None:
    async def listen(asks: bool | None) -> None:
        secured = None
        if asks is not None:
            cert, key = certificates / "server.pem", certificates / "server.key"
            secured = Secured.by(cert, key, None, asks=asks)
        with bound(grpc.aio.server(), "192.0.2.1:50551", secured):
            raise AssertionError("no address of this machine")

    for asks in (None, False):
        with pytest.raises(PlanError, match="is not a loopback address"):
            asyncio.run(listen(asks))
    # An address of documentation (RFC 5737), so that it is not listened on even then.
    with pytest.raises(PlanError, match="cannot listen on"):
        asyncio.run(listen(True))


def test_check_says_whether_it_could_start(
    data: Path, certificates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = str(certificates / "server.pem"), str(certificates / "server.key")
    root = ["--workload-root", str(tmp_path)]
    assert main(["serve", "--check", "--listen", "127.0.0.1:0", *root]) == 0
    assert (
        "It would serve whoever reaches it on 127.0.0.1:0, without TLS" in capsys.readouterr().out
    )
    for options, words in (
        (["--listen", "192.0.2.1:1"], "not a loopback address"),
        (["--tls-cert", cert], "belong together"),
        (["--client-ca", cert], "belong together"),
        (["--tls-cert", cert, "--tls-key", str(tmp_path / "none")], "cannot be read"),
        (["--client-role", "owner", "--client-ca", cert, "--tls-cert", cert, "--tls-key", key],
         "--client-role 'owner' is unknown"),
        (["--token-file", str(tmp_path / "none")], "cannot be read"),
    ):  # fmt: skip
        assert main(["serve", "--check", "--listen", "127.0.0.1:0", *root, *options]) == 2
        assert words in capsys.readouterr().err


def test_request_of_who_may_not_run_code_is_not_even_read(
    data: Path, socket: Path, tmp_path: Path
) -> None:
    path, tokens = token_file(tmp_path, Role.READ)

    async def test(it: Served) -> None:
        call: Any = it.stub.Advise(
            request_message(request()), metadata=(("authorization", f"Bearer {tokens[Role.READ]}"),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert it.host.specs == []

    run(test, data, socket, Access(path))
