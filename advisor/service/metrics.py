"""What a server counts, for Prometheus: calls, campaigns, trials. On a loopback port of its own.

`prometheus_client` is of the extra `metrics`; without `--metrics` nothing of it is imported.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable, Iterator
from typing import Any

from advisor.profiler.errors import PlanError
from advisor.profiler.records import Trial

# A call of the cost model takes a millisecond, a stream as long as its campaign.
_CALL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0)


class Metrics:
    """Counts nothing: what a server has that was not asked to count."""

    def called(self, method: str, code: str, seconds: float) -> None:
        """Counts a call that ended."""

    def tried(self, trial: Trial) -> None:
        """Counts a trial that ended."""

    @contextlib.contextmanager
    def exported(self, live: Callable[[], int]) -> Iterator[None]:
        """Offers what is counted within the block; `live` returns the campaigns to be ended."""
        yield


class Prometheus(Metrics):
    """Counts, and offers what it counts to whoever asks on a port of this machine."""

    def __init__(self, address: str) -> None:
        """Raises `PlanError` for an address beyond loopback, or without `prometheus_client`."""
        self._host, self._port = _loopback(address)
        try:
            import prometheus_client
        except ImportError as error:
            raise PlanError(
                "--metrics needs prometheus_client",
                "it is not installed",
                'pip install "compile-advisor[metrics]"',
            ) from error
        self._client: Any = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._calls = prometheus_client.Counter(
            "advisor_calls", "Calls that ended.", ("method", "code"), registry=self._registry
        )
        self._call_s = prometheus_client.Histogram(
            "advisor_call_seconds",
            "How long calls took.",
            ("method",),
            buckets=_CALL_S,
            registry=self._registry,
        )
        self._trials = prometheus_client.Counter(
            "advisor_trials", "Trials that ended.", ("kind", "status"), registry=self._registry
        )
        self._live = prometheus_client.Gauge(
            "advisor_campaigns", "Campaigns that wait or run.", registry=self._registry
        )

    def called(self, method: str, code: str, seconds: float) -> None:
        """Counts a call that ended."""
        self._calls.labels(method, code).inc()
        self._call_s.labels(method).observe(seconds)

    def tried(self, trial: Trial) -> None:
        """Counts a trial that ended."""
        self._trials.labels(trial.kind.value, trial.status.value).inc()

    @contextlib.contextmanager
    def exported(self, live: Callable[[], int]) -> Iterator[None]:
        """Serves HTTP within the block. Raises `PlanError` for a port that is taken."""
        self._live.set_function(live)
        try:
            server, thread = self._client.start_http_server(
                self._port, self._host, registry=self._registry
            )
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise PlanError(f"--metrics cannot listen on {where}", error.strerror or "") from error
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _loopback(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    try:
        local = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = False
    if not local or not port.isdigit() or int(port) > 65_535:
        raise PlanError(
            f"--metrics {address!r} is not a loopback address",
            "whoever reads it learns whom this server works for",
            "give 127.0.0.1:PORT, and let a collector beside it forward",
        )
    return host.strip("[]"), int(port)
