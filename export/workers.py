"""Worker processes, each on a pipe of its own: a task at a time, results as they come, a death noticed at once.

It knows nothing of what the tasks are. (``ProcessPoolExecutor`` may wait forever for a process that it was starting
while another one died.)
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from lesonnx.errors import LesonnxError

Argument = TypeVar("Argument")
Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(
    open_worker: Callable[[Argument], Callable[[Task], Result]],
    argument: Argument,
    tasks: Iterable[Task],
    num_workers: int,
) -> Generator[tuple[Task, Result], None, None]:
    """Each task with its result, in the order in which they end. Closing the iterator ends the workers.

    ``open_worker(argument)``, called once a process, gives what does a task; it is a plain function of a module. One
    worker works in this process. Raises what a task raises, and LesonnxError where a process dies.
    """
    if num_workers == 1:
        work = open_worker(argument)
        for task in tasks:
            yield task, work(task)
        return
    workers: list[Worker] = []
    coming = iter(tasks)
    try:
        for task in coming:
            workers.append(Worker(open_worker, argument))
            workers[-1].give(task)
            if len(workers) == num_workers:
                break
        while busy := {worker.connection: worker for worker in workers if worker.is_busy}:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]
                task, result = worker.take()
                # The next task first: what the caller does with this result should not keep the process waiting.
                for following in coming:
                    worker.give(following)
                    break
                yield task, result
    finally:
        for worker in workers:
            worker.end()


class Worker:
    """One process and this end of its pipe. Belongs to one thread."""

    def __init__(self, open_worker: Callable[[Any], Callable[[Any], Any]], argument: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, open_worker, argument), daemon=True)
        with _interrupts_held():
            self.process.start()
        theirs.close()
        self.is_busy = False
        self._task: Any = None

    def give(self, task: Any) -> None:
        """Hand over a task; the worker must be idle."""
        self._task, self.is_busy = task, True
        try:
            self.connection.send(task)
        except OSError:
            raise self._died() from None

    def take(self) -> tuple[Any, Any]:
        """The task that was given and its result, waiting for it; raises what the task raised."""
        try:
            result, error = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        self.is_busy = False
        if error is not None:
            raise error
        return self._task, result

    def end(self) -> None:
        """An idle worker ends by itself when its pipe closes; one that is in the middle of a task is stopped."""
        self.connection.close()
        if self.is_busy:
            self.process.kill()
        self.process.join()

    @staticmethod
    def _died() -> LesonnxError:
        return LesonnxError("a worker process died (out of memory?); export again with --resume")


def _serve(connection: Connection, open_worker: Callable[[Any], Callable[[Any], Any]], argument: Any) -> None:
    """The worker's side: tasks in, (result, error) out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work: Callable[[Any], Any] | None = None
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        answer: tuple[Any, BaseException | None]
        try:
            work = work or open_worker(argument)
            answer = work(task), None
        except Exception as error:  # noqa: BLE001  (raised again on the other side)
            error.add_note(traceback.format_exc())
            answer = None, _portable(error)
        try:
            connection.send(answer)
        except OSError:
            return


def _portable(error: Exception) -> Exception:
    """The exception, or one with its text where it does not survive the way through a pipe."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (a foreign class may raise anything)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, not even while Python starts: it is the parent's to handle."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Started with the first process otherwise, and then it would let the signal through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
