"""The errors that this project raises: what is wrong, why, and how to mend it.

A trial that went wrong after it started is not an error but a status (`records.TrialStatus`):
a failed trial is knowledge for the campaign. The command maps these errors to exit codes, the
service to gRPC status codes; nothing else does.
"""


class AdvisorError(Exception):
    """Base of all errors meant for a person. `str(error)` is one complete message."""

    def __init__(self, what: str, why: str = "", mend: str = "") -> None:
        self.what = what
        self.why = why
        self.mend = mend
        super().__init__(what, why, mend)

    def __str__(self) -> str:
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.mend:
            text += f" ({self.mend})"
        return text


class WorkloadError(AdvisorError):
    """The person's training file, function, model or batches cannot be used.

    `user_traceback` holds the person's own frames, as text, where their code raised.
    """

    def __init__(self, what: str, why: str = "", mend: str = "", user_traceback: str = "") -> None:
        super().__init__(what, why, mend)
        self.user_traceback = user_traceback


class PlanError(AdvisorError):
    """The person's numbers or options (steps, hours, mode, device, limits) make no sense."""


class StoreError(AdvisorError):
    """The results database cannot be read or written."""


class DamagedError(StoreError):
    """What is kept or was sent is not what it should be: its hash is another."""


class NotFoundError(StoreError):
    """The store holds no row of that name."""


class HostError(AdvisorError):
    """The trial host could not be started, or ended by itself."""


class Interrupted(AdvisorError):
    """The campaign was stopped by the person who asked for it."""
