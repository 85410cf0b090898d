"""Structured logging: one JSON object a line, on stderr."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON; what `extra` holds are its further keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line: no value, whatever it holds, can begin another one."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _OWN}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        safe = {
            key: value.encode("utf-8", "backslashreplace").decode()
            if isinstance(value, str)
            else value
            for key, value in line.items()
        }
        return msgspec.json.encode(safe, enc_hook=str).decode()


def log_to_stderr(level: int = logging.INFO) -> None:
    """Sends all logging of this process to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
