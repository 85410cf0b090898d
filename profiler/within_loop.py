"""Coroutines run to their end from plain code, also within an event loop that runs already.

Notebooks run their cells within one. There the coroutine gets a thread and a loop of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """Returns what a coroutine returns. Ctrl-C cancels it, and waits until it has ended.

    The thread's current event loop stays what it is, which `asyncio.run` would unset.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work)
    return _run_in_thread(work)


def _run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    begun = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def noted() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        begun.set()
        return await work

    def call() -> None:
        try:
            result.set_result(_run(noted()))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            result.set_exception(error)
        finally:
            begun.set()

    # With the caller's context: a notebook shows what a callback prints by it.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(call,), daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        begun.wait()
        for loop, task in running:
            _cancel(loop, task)
        _wait_for(thread)
        raise
    return result.result()


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    with contextlib.suppress(RuntimeError):  # closed: it has ended meanwhile
        loop.call_soon_threadsafe(task.cancel)


def _wait_for(thread: threading.Thread) -> None:
    """Waits for the end of a thread, however often Ctrl-C comes: it is ending processes."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            continue
