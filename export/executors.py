"""Handing tasks to any executor: a thread or process pool, or a Dask cluster that is there already.

The same contract as `workers.run_tasks`, which is what an export uses unless it is told otherwise.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from lesonnx.errors import InputError, LesonnxError

Argument = TypeVar("Argument")
Task = TypeVar("Task")
Result = TypeVar("Result")
# What does tasks: see `workers.run_tasks` for its parameters.
RunTasks = Callable[[Callable[[Any], Callable[[Any], Any]], Any, Iterable[Any]], Generator[tuple[Any, Any], None, None]]
# Tasks that wait in an executor beside those it works on: the next one is there before the last one is reported.
TASKS_A_WORKER = 2
CONNECT_SECONDS = 10


class Future(Protocol):
    """What an executor gives for a task."""

    def add_done_callback(self, function: Callable[[Any], object], /) -> None: ...
    def result(self) -> Any: ...
    def cancel(self) -> Any: ...


class Executor(Protocol):
    """Anything with the ``submit`` of ``concurrent.futures``."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future: ...


def run_on(
    executor: Executor,
    num_workers: int,
    open_worker: Callable[[Argument], Callable[[Task], Result]],
    argument: Argument,
    tasks: Iterable[Task],
) -> Generator[tuple[Task, Result], None, None]:
    """Each task with its result, in the order in which they end; a few tasks for each of ``num_workers`` are under way.

    Where a task runs, ``open_worker(argument)`` is called once a thread. Processes elsewhere must have lesonnx and see
    the same files under the same names. Closing the iterator cancels what has not begun and waits for what has.
    Raises what a task raises.
    """
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    under_way: dict[Any, Task] = {}
    coming = iter(tasks)
    try:
        while True:
            for task in coming:
                future = executor.submit(_work, open_worker, argument, task)
                under_way[future] = task
                future.add_done_callback(done.put)
                if len(under_way) >= num_workers * TASKS_A_WORKER:
                    break
            if not under_way:
                return
            future = done.get()
            yield under_way.pop(future), _result(future)
    finally:
        for future in under_way:
            future.cancel()
        # What still runs writes to files that the caller may be about to remove.
        for _ in range(len(under_way)):
            done.get()


def _result(future: Future) -> Any:
    """A future's result; what is no error of a task's own (a worker that died, say) becomes a LesonnxError."""
    try:
        return future.result()
    except (LesonnxError, OSError):
        raise
    except Exception as error:
        raise LesonnxError(f"a task did not end well: {type(error).__name__}: {error}") from error


_opened = threading.local()


def _work(open_worker: Callable[[Any], Callable[[Any], Any]], argument: Any, task: Any) -> Any:
    """Do a task where an executor runs it, opening what it needs at this thread's first."""
    key = open_worker, argument
    if getattr(_opened, "key", None) != key:
        _opened.work, _opened.key = open_worker(argument), key
    return _opened.work(task)


@contextmanager
def dask_tasks(address: str) -> Iterator[RunTasks]:
    """What does tasks on a Dask cluster that is there already. Needs the extra ``dask``.

    InputError where no scheduler answers at the address, LesonnxError where the cluster has no workers.
    """
    # Imported by name: what types it has are not strict, and it may not be there.
    distributed = importlib.import_module("distributed")
    try:
        client = distributed.Client(address, set_as_default=False, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise InputError(f"--dask {address}: no Dask scheduler answers there: {error}") from None
    try:
        threads = sum(client.nthreads().values())
        if not threads:
            raise LesonnxError(f"--dask {address}: the cluster has no workers")
        yield partial(run_on, client.get_executor(), threads)
    finally:
        client.close()
