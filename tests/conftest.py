"""What all tests share: a data folder that is not the person's own, and one compile cache."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor import prior_store
from advisor.models.prior import Prior

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """Returns the root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session", autouse=True)
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns the folder that the advisor stores its results in during the tests.

    Set for every test, and for the processes that tests start, so that a test run neither reads
    nor writes the results of the person who runs it.
    """
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADVISOR_DATA_DIR", str(folder))
        # The cost model is fitted once for all tests, by the first that needs it.
        patch.setenv("ADVISOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Puts the environment back as it was: what a test sets, later tests' processes would have."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Puts the root logger back as it was: a server in the test's own process sets it up anew."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def job_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps tests that share a compile cache from sharing which sizes turned out dynamic."""
    monkeypatch.setenv("TORCH_COMPILE_JOB_ID", f"test-{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns the compile cache that tests which compile in their own process share.

    The first of them pays for a graph, the others find it. Trials have caches of their own, empty
    ones, whatever is set here: that is what makes a cold start cold.
    """
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield folder


@pytest.fixture(scope="session")
def prior(data_dir: Path) -> Prior:
    """Returns the cost model of the whole corpus, as a person gets it at first use."""
    pytest.importorskip("sklearn")
    return prior_store.load()
