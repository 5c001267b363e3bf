"""Writing a layer's experts: quantized in worker processes, each expert straight to its place in the layer's pack.

It knows where experts lie and who does the work, not what the parts around them are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lesonnx.errors import LesonnxError
from lesonnx.manifest import ExpertKind
from lesonnx_export.architectures import make_decoder
from lesonnx_export.architectures.base import Decoder
from lesonnx_export.checkpoint import Checkpoint, Weights
from lesonnx_export.config import Config
from lesonnx_export.expert import PACK_NAME, ExpertModel, expert_bytes

# Experts a task takes at a time: few enough for a smooth progress bar, enough to make the hand-over cheap.
EXPERTS_A_TASK = 4


def layer_directory(root: Path, layer_idx: int) -> Path:
    """Where a layer's experts lie in a bundle."""
    return root / "experts" / f"layer_{layer_idx:03d}"


@dataclass(frozen=True)
class LayerPlan:
    """The experts of one layer and their kinds; the shared expert, where there is one, is the last of the pack."""

    layer_idx: int
    num_experts: int
    kind: ExpertKind
    shared_kind: ExpertKind | None

    @property
    def pack_bytes(self) -> int:
        shared = self.shared_kind.cost_bytes if self.shared_kind else 0
        return self.num_experts * self.kind.cost_bytes + shared

    @property
    def places(self) -> list[int | None]:
        """Every expert of the pack in order; None is the shared one."""
        return [*range(self.num_experts), *([None] if self.shared_kind else [])]

    def offset_bytes(self, expert_idx: int | None) -> int:
        return (self.num_experts if expert_idx is None else expert_idx) * self.kind.cost_bytes

    def kind_of(self, expert_idx: int | None) -> ExpertKind:
        kind = self.shared_kind if expert_idx is None else self.kind
        if kind is None:
            raise LesonnxError(f"layer {self.layer_idx} has no shared expert")
        return kind


def read_expert(architecture: Decoder, weights: Weights, layer_idx: int, expert_idx: int | None) -> dict[str, object]:
    """An expert's float32 tensors; None asks for the shared one."""
    if expert_idx is None:
        return dict(architecture.shared_expert(weights, layer_idx))
    return dict(architecture.expert(weights, layer_idx, expert_idx))


_architecture: Decoder
_weights: Weights


def _open_checkpoint(directory: Path) -> None:
    """Open the checkpoint, once a process."""
    global _architecture, _weights
    checkpoint = Checkpoint(directory)
    _architecture, _weights = make_decoder(Config(checkpoint.config)), Weights(checkpoint)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, not even while Python starts: it is the parent's to handle."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _InProcess(Executor):
    """One worker without a process of its own: a task is done when it is given."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  (raised again where the result is asked for)
            future.set_exception(error)
        return future


def _write_experts(path: Path, plan: LayerPlan, places: list[int | None]) -> int:
    """Read, quantize and write some experts; gives the bytes written."""
    written = 0
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for expert_idx in places:
            name = f"layer {plan.layer_idx} expert {'shared' if expert_idx is None else expert_idx}"
            tensors = read_expert(_architecture, _weights, plan.layer_idx, expert_idx)
            block = expert_bytes(plan.kind_of(expert_idx), tensors, name)  # type: ignore[arg-type]
            view = memoryview(block.data)
            offset = plan.offset_bytes(expert_idx)
            while view:
                count = os.pwrite(descriptor, view, offset)
                view, offset = view[count:], offset + count
            written += block.nbytes
        os.fsync(descriptor)
        # What is written is not read again: leave the page cache to the checkpoint.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return written


def write_models(root: Path, plan: LayerPlan) -> int:
    """Every expert's own .onnx beside the pack; gives the bytes written."""
    directory = layer_directory(root, plan.layer_idx)
    models = {id(kind): ExpertModel(kind) for kind in (plan.kind, plan.shared_kind) if kind is not None}
    written = 0
    for expert_idx in plan.places:
        name = "shared.onnx" if expert_idx is None else f"expert_{expert_idx:03d}.onnx"
        data = models[id(plan.kind_of(expert_idx))].serialize(plan.offset_bytes(expert_idx))
        (directory / name).write_bytes(data)
        written += len(data)
    return written


class PackWriter:
    """Writes packs with a pool of processes, one worker in this process. A layer is announced once it is on disk."""

    def __init__(self, checkpoint_directory: Path, root: Path, num_workers: int) -> None:
        self._root = root
        self._pool: Executor
        if num_workers == 1:
            _open_checkpoint(checkpoint_directory)
            self._pool = _InProcess()
            self._ahead = 1
            return
        self._pool = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_open_checkpoint,
            initargs=(checkpoint_directory,),
        )
        self._ahead = 2 * num_workers

    def write(self, plans: list[LayerPlan], progress: Callable[[int], None]) -> Iterator[LayerPlan]:
        """Write the layers' packs; yields each when complete, calls ``progress`` with bytes as they are written."""
        pending: dict[Future[int], LayerPlan] = {}
        open_tasks: dict[int, int] = {}
        tasks = self._tasks(plans, open_tasks)
        try:
            exhausted = False
            while pending or not exhausted:
                while not exhausted and len(pending) < self._ahead:
                    task = next(tasks, None)
                    if task is None:
                        exhausted = True
                        break
                    plan, places = task
                    path = layer_directory(self._root, plan.layer_idx) / PACK_NAME
                    pending[self._submit(path, plan, places)] = plan
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    plan = pending.pop(future)
                    progress(future.result())
                    open_tasks[plan.layer_idx] -= 1
                    if open_tasks[plan.layer_idx] == 0:
                        write_models(self._root, plan)
                        yield plan
        except BrokenProcessPool:
            raise LesonnxError("a worker process died (out of memory?); export again with --resume") from None

    def _submit(self, path: Path, plan: LayerPlan, places: list[int | None]) -> Future[int]:
        if isinstance(self._pool, _InProcess):
            return self._pool.submit(_write_experts, path, plan, places)
        with _interrupts_held():
            return self._pool.submit(_write_experts, path, plan, places)

    def _tasks(
        self, plans: list[LayerPlan], open_tasks: dict[int, int]
    ) -> Iterator[tuple[LayerPlan, list[int | None]]]:
        for plan in plans:
            directory = layer_directory(self._root, plan.layer_idx)
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / PACK_NAME).open("wb") as file:
                file.truncate(plan.pack_bytes)
            starts = range(0, len(plan.places), EXPERTS_A_TASK)
            open_tasks[plan.layer_idx] = len(starts)
            for start in starts:
                yield plan, plan.places[start : start + EXPERTS_A_TASK]

    def close(self) -> None:
        """End the workers without waiting for tasks that have not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)
