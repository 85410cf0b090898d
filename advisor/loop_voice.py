"""What is said beside a script's own words: on stderr, one sentence for an event, by one rank."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

import torch

from advisor.profiler.units import printable

_PREFIX = "AutoCompile: "


class Voice(logging.Handler):
    """Speaks for the first rank; what the advisor logs as a warning is said too, and only here."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        logger = logging.getLogger("advisor")
        logger.addHandler(self)
        # A script that logs would say it once more.
        logger.propagate = False

    def say(self, sentence: str) -> None:
        """Says a sentence, if this is the rank that speaks."""
        if self.speaks:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"advise: {printable(sentence)}\n")
                sys.stderr.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """Says what was logged."""
        self.say(record.getMessage().removeprefix(_PREFIX))

    @property
    def speaks(self) -> bool:
        """Whether this is the first rank, or the only one."""
        if _distributed():
            return torch.distributed.get_rank() == 0
        return os.environ.get("RANK", "0") == "0"

    @property
    def ranks(self) -> int:
        """How many train together."""
        return torch.distributed.get_world_size() if _distributed() else 1


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
