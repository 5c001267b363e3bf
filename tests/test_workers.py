"""Worker processes: results as they come, errors as they were raised, deaths noticed, none left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from lesonnx.errors import CheckpointError, LesonnxError
from lesonnx_export.workers import run_tasks


class Unportable(Exception):
    """An exception that pickling breaks."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def multiplier(factor: int) -> Callable[[int], int]:
    def work(task: int) -> int:
        if task == -1:
            raise CheckpointError("tensor 'x' is bad")
        if task == -2:
            raise FileNotFoundError(2, "No such file", "gone.bin")
        if task == -3:
            os.kill(os.getpid(), signal.SIGKILL)
        if task == -4:
            raise Unportable("a", "b")
        return task * factor

    return work


def broken(factor: int) -> Callable[[int], int]:
    raise CheckpointError("cannot be opened")


@pytest.fixture(autouse=True)
def none_left_behind() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_every_task_once(num_workers: int, count: int) -> None:
    assert sorted(run_tasks(multiplier, 3, range(count), num_workers)) == [(task, 3 * task) for task in range(count)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_errors_come_as_they_were_raised(num_workers: int) -> None:
    with pytest.raises(CheckpointError, match="tensor 'x' is bad"):
        list(run_tasks(multiplier, 3, [1, -1, 2], num_workers))
    with pytest.raises(FileNotFoundError) as caught:
        list(run_tasks(multiplier, 3, [1, -2, 2], num_workers))
    assert (caught.value.errno, caught.value.filename) == (2, "gone.bin")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        list(run_tasks(broken, 3, [1], num_workers))


def test_an_error_that_cannot_travel_keeps_its_text() -> None:
    with pytest.raises(RuntimeError, match="Unportable: ab"):
        list(run_tasks(multiplier, 3, [-4], 2))


@pytest.mark.parametrize("tasks", [[-3], [-3, -3], [1, -3, 2, 3], [1, 2, 3, 4, 5, -3]])
def test_a_death_is_noticed(tasks: list[int]) -> None:
    with pytest.raises(LesonnxError, match="a worker process died"):
        list(run_tasks(multiplier, 3, tasks, 2))


def test_closing_early_ends_the_workers() -> None:
    with closing(run_tasks(multiplier, 3, iter(range(1_000_000)), 2)) as results:  # type: ignore[type-var]
        assert next(results)[0] in (0, 1)
