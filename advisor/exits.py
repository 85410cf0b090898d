"""The exit codes of `advise`, and how an error is said before it ends with one.

0: an advice was given, either way; 1: `advise check` found something worse; 2: the request was
wrong; 3: no trial could run; 130: interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from advisor.profiler.errors import AdvisorError

GIVEN, WORSE, WRONG_REQUEST, NO_TRIAL, INTERRUPTED = 0, 1, 2, 3, 130


def say(error: AdvisorError) -> int:
    """Says an error, after the person's own traceback and what the server logged.

    Returns its exit code.
    """
    from advisor.profiler.errors import Interrupted, NotFoundError, PlanError, WorkloadError
    from advisor.profiler.units import printable

    for note in getattr(error, "__notes__", ()):
        print(printable(note), file=sys.stderr)
    if isinstance(error, WorkloadError) and error.user_traceback:
        print(printable(error.user_traceback).rstrip(), file=sys.stderr)
    print(f"advise: {printable(str(error))}", file=sys.stderr)
    if isinstance(error, Interrupted):
        return INTERRUPTED
    wrong = isinstance(error, WorkloadError | PlanError | NotFoundError)
    return WRONG_REQUEST if wrong else NO_TRIAL


def say_wrong_options(error: Exception) -> int:
    """Says what typer found wrong with the options, and returns the exit code."""
    # The message of "no command was given" is the whole help; it says so itself.
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
    else:
        print(f"advise: {' '.join(message.split())} (see advise --help)", file=sys.stderr)
    return WRONG_REQUEST


def say_interrupted() -> int:
    """Says that the command was interrupted, and returns the exit code."""
    print("advise: interrupted", file=sys.stderr)
    return INTERRUPTED


def say_inside(error: Exception) -> int:
    """Says that a mistake of ours ended the command, and keeps its traceback for a report.

    Returns the exit code.
    """
    import tempfile
    import traceback

    if os.environ.get("ADVISOR_DEBUG"):
        raise error
    with tempfile.NamedTemporaryFile(
        "w", prefix="advise-error-", suffix=".txt", delete=False
    ) as file:
        file.writelines(traceback.format_exception(error))
    print(
        f"advise: internal error, {type(error).__name__} (please report it with {file.name})",
        file=sys.stderr,
    )
    return NO_TRIAL
