"""Who may call what: bearer tokens and client certificates, each with a role.

A file of tokens has a line `ROLE NAME SHA256` for each; the token itself stands nowhere. Changed,
it is read again, so that tokens come and go while the server runs. Several may stand for one name,
for one to follow another.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.profiler.errors import PlanError
from advisor.service.errors import Denied, Unauthenticated

log = logging.getLogger(__name__)


class Role(enum.IntEnum):
    """What a caller may do; each holds those before it."""

    ESTIMATE = 1
    READ = 2
    # Runs code on this machine.
    PROFILE = 3
    ADMIN = 4


# A method without a row is nobody's: a test holds this table and the service together.
METHODS: Mapping[str, Role] = {
    "Estimate": Role.ESTIMATE,
    "GetAdvice": Role.READ,
    "WatchAdvice": Role.READ,
    "ListAdvices": Role.READ,
    "ListTrials": Role.READ,
    "GetCache": Role.READ,
    "Advise": Role.PROFILE,
    "CancelAdvice": Role.PROFILE,
    # What is learnt moves everybody's estimates, and a compile cache is code.
    "ReportOutcome": Role.PROFILE,
    "PutCache": Role.PROFILE,
}

_LINE = re.compile(r"(?P<role>[a-z]+)\s+(?P<name>[A-Za-z0-9_.-]{1,64})\s+(?P<digest>[0-9a-f]{64})")
_HEADER = "authorization"
_SCHEME = "Bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, by the name of a token or of a certificate, and what they may do."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class _Token:
    caller: Caller
    digest: bytes


# Who makes the call that is being answered.
CALLER: ContextVar[str] = ContextVar("caller", default="")
# Who reaches a socket that only this machine's user can reach, where nobody asked for more.
_LOCAL = Caller("", Role.ADMIN)


class Access:
    """Who may call. Without tokens and certificates: whoever reaches the socket, everything."""

    def __init__(self, tokens: Path | None = None, *, certified: Role | None = None) -> None:
        """`certified` is the role of who shows a certificate that the client CA has signed.

        Raises `PlanError` for a file of tokens that cannot be read, or that others can.
        """
        self._file = tokens
        self._certified = certified
        self._changed = 0
        self._tokens: Sequence[_Token] = ()
        if tokens is not None:
            self._tokens = _read(tokens)
            self._changed = tokens.stat().st_mtime_ns

    @property
    def asks(self) -> bool:
        """Whether callers have to say who they are."""
        return self._file is not None or self._certified is not None

    def check(self, method: str, context: Any) -> Caller:
        """Returns who calls a method. Raises `Unauthenticated` or `Denied`."""
        caller = self._caller(context) if self.asks else _LOCAL
        needed = METHODS.get(method)
        if needed is None or caller.role < needed:
            raise Denied(
                f"{method} is not for the role {caller.role.name.lower()}",
                f"{caller.name} has no other" if caller.name else "",
                f"it takes {needed.name.lower()}" if needed is not None else "",
            )
        return caller

    def _caller(self, context: Any) -> Caller:
        if self._certified is not None:
            names = context.auth_context().get("x509_common_name", ())
            if names:
                return Caller(names[0].decode(errors="replace"), self._certified)
        shown = dict(context.invocation_metadata() or ()).get(_HEADER, "")
        if isinstance(shown, str) and shown.startswith(_SCHEME):
            digest = hashlib.sha256(shown.removeprefix(_SCHEME).encode()).digest()
            # Each is compared, in constant time: how long it takes tells nothing.
            fits = [t for t in self._live() if hmac.compare_digest(t.digest, digest)]
            if fits:
                return fits[0].caller
        raise Unauthenticated(
            "the server does not know who calls",
            "it asks for a token" if self._file is not None else "it asks for a certificate",
            "set ADVISOR_TOKEN_FILE" if self._file is not None else "set ADVISOR_CLIENT_CERT",
        )

    def _live(self) -> Sequence[_Token]:
        """Returns the tokens as the file has them now; those known where it cannot be read."""
        if self._file is None:
            return ()
        try:
            changed = self._file.stat().st_mtime_ns
            if changed != self._changed:
                self._tokens, self._changed = _read(self._file), changed
        except (OSError, PlanError) as error:
            log.error("the file of tokens cannot be read again", extra={"why": str(error)})
        return self._tokens


def new_token(role: Role, name: str) -> tuple[str, str]:
    """Returns a new token, and the line that stands for it in the server's file.

    Raises `PlanError` for a name that a line cannot hold.
    """
    token = secrets.token_urlsafe(32)
    line = f"{role.name.lower()} {name} {hashlib.sha256(token.encode()).hexdigest()}"
    if _LINE.fullmatch(line) is None:
        mend = "1 to 64 letters, digits, '_', '.' and '-' expected"
        raise PlanError(f"{name!r} is not a name", mend=mend)
    return token, line


def _read(path: Path) -> Sequence[_Token]:
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or "" if isinstance(error, OSError) else "it is no text"
        raise PlanError(f"--token-file {path} cannot be read", why) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PlanError(
            f"--token-file {path} can be read by others",
            "it says whom this server trusts",
            f"chmod 600 {path}",
        )
    return tuple(
        _token(line.strip(), f"--token-file {path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    )


def _token(line: str, where: str) -> _Token:
    found = _LINE.fullmatch(line)
    if found is None:
        raise PlanError(f"{where} is no token", mend="ROLE NAME SHA256 expected (advise token)")
    try:
        role = Role[found["role"].upper()]
    except KeyError:
        known = ", ".join(role.name.lower() for role in Role)
        raise PlanError(f"{where}: the role {found['role']} is unknown", mend=known) from None
    return _Token(Caller(found["name"], role), bytes.fromhex(found["digest"]))
