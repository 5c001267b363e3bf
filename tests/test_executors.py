"""Any executor does the tasks of an export: the same results and bytes, errors as raised, nothing left running."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import fixture
from conftest import BundleFactory, Outcome
from forward import file_bytes
from test_workers import broken, multiplier

from lesonnx.errors import CheckpointError, LesonnxError
from lesonnx_export.executors import TASKS_A_WORKER, run_on
from lesonnx_export.exporter import ExportOptions, export_bundle

Call = Callable[..., Outcome]


class Inline:
    """An object with ``submit`` and nothing else: does a task when it is handed over."""

    def __init__(self) -> None:
        self.submitted = 0

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        self.submitted += 1
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001  (an executor hands on whatever is raised)
            future.set_exception(error)
        return future


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.mark.parametrize("count", [0, 1, 20])
def test_every_task_once(threads: ThreadPoolExecutor, count: int) -> None:
    expected = [(task, 3 * task) for task in range(count)]
    assert sorted(run_on(threads, 3, multiplier, 3, range(count))) == expected
    assert list(run_on(Inline(), 1, multiplier, 3, range(count))) == expected


def test_errors_come_as_they_were_raised(threads: ThreadPoolExecutor) -> None:
    with pytest.raises(CheckpointError, match="tensor 'x' is bad"):
        list(run_on(threads, 3, multiplier, 3, [1, -1, 2]))
    with pytest.raises(FileNotFoundError):
        list(run_on(threads, 3, multiplier, 3, [1, -2, 2]))
    with pytest.raises(CheckpointError, match="cannot be opened"):
        list(run_on(threads, 3, broken, 3, [1]))
    with pytest.raises(LesonnxError, match="a task did not end well: Unportable: ab"):
        list(run_on(threads, 3, multiplier, 3, [-4]))


def test_tasks_are_taken_as_they_are_done() -> None:
    taken, executor = [], Inline()
    with closing(run_on(executor, 1, multiplier, 3, (taken.append(n) or n for n in range(1_000_000)))) as results:
        for _ in range(5):
            next(results)
    assert len(taken) == executor.submitted <= 5 + TASKS_A_WORKER


def test_closing_waits_for_what_runs(threads: ThreadPoolExecutor) -> None:
    started, gate = threading.Event(), threading.Event()
    ended: list[int] = []

    def opened(argument: None) -> Callable[[int], int]:
        def work(task: int) -> int:
            if task:
                started.set()
                gate.wait(10)
                ended.append(task)
            return task

        return work

    results = run_on(threads, 3, opened, None, range(3))
    next(results)
    assert started.wait(10)
    closing_thread = threading.Thread(target=results.close)
    closing_thread.start()
    assert not ended
    gate.set()
    closing_thread.join(10)
    assert not closing_thread.is_alive()
    assert ended


@pytest.mark.parametrize("name", ["threads", "inline"])
def test_the_same_bytes(bundle_of: BundleFactory, quick_path: Path, threads: ThreadPoolExecutor, name: str) -> None:
    executor = threads if name == "threads" else Inline()
    options = ExportOptions(bits=4)
    report = export_bundle(fixture("qwen2_moe"), quick_path / "bundle", options, run_tasks=partial(run_on, executor, 3))
    assert file_bytes(report.bundle) == file_bytes(bundle_of("qwen2_moe", bits=4))


def test_a_dask_cluster(bundle_of: BundleFactory, quick_path: Path) -> None:
    """A scheduler and a worker that were there before, as processes of their own."""
    pytest.importorskip("distributed", reason="the extra dask is not installed")
    script = f"""
    from pathlib import Path
    from distributed import LocalCluster
    from lesonnx_export.executors import dask_tasks
    from lesonnx_export.exporter import ExportOptions, export_bundle
    if __name__ == "__main__":
        with LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster:
            with dask_tasks(cluster.scheduler_address) as run_tasks:
                bundle = Path({str(quick_path / "bundle")!r})
                export_bundle(Path({str(fixture("qwen2_moe"))!r}), bundle, ExportOptions(bits=4), run_tasks=run_tasks)
    """
    (quick_path / "script.py").write_text(textwrap.dedent(script))
    subprocess.run([sys.executable, str(quick_path / "script.py")], check=True, cwd=quick_path)
    assert file_bytes(quick_path / "bundle") == file_bytes(bundle_of("qwen2_moe", bits=4))


def test_no_dask_is_one_line(lesonnx: Call, quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    outcome = lesonnx("export", fixture("qwen2_moe"), quick_path / "bundle", "--dask", "tcp://127.0.0.1:1")
    assert (outcome.code, outcome.error.startswith("error: this needs the package distributed: pip install")) == (
        2,
        True,
    )
