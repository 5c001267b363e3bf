"""The export as a whole: one result or none, the same bytes whatever happened on the way, resumable at every point."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FAMILIES, Tensors, derive, fixture, read_config, read_tensors
from conftest import BundleFactory
from forward import file_bytes

import lesonnx_export.exporter as exporter
import lesonnx_export.parts as parts
from lesonnx.bundle import Bundle
from lesonnx.errors import CheckpointError, InputError, LesonnxError
from lesonnx_export.checkpoint import Checkpoint
from lesonnx_export.exporter import ExportOptions, export_bundle, make_plan
from lesonnx_export.graph import DenseStore
from lesonnx_export.journal import NAME as JOURNAL
from lesonnx_export.journal import Journal
from lesonnx_export.workers import Worker

NAME = "qwen2_moe"
ALONE = ExportOptions(bits=4, num_workers=1)


class Broken(Exception):
    """What stands for the end of the process in these tests."""


@pytest.fixture(scope="module")
def clean(bundle_of: BundleFactory) -> dict[str, bytes]:
    """The files of an export that nothing disturbed."""
    return file_bytes(bundle_of(NAME, bits=4))


@pytest.fixture
def tmp_path(quick_path: Path) -> Path:
    """An export waits for the disk after every part."""
    return quick_path


def partial_of(bundle: Path) -> Path:
    return bundle.parent / f".{bundle.name}.partial"


def assert_resumes(bundle: Path, clean: dict[str, bytes]) -> None:
    assert not bundle.exists()
    export_bundle(fixture(NAME), bundle, ALONE, resume=True)
    assert file_bytes(bundle) == clean
    assert os.listdir(bundle.parent) == [bundle.name]


# -- the result --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_checksums_are_right(bundle_of: BundleFactory, name: str) -> None:
    bundle = bundle_of(name, bits=4)
    files = file_bytes(bundle)
    listed = json.loads(files.pop("checksums.json"))["files"]
    assert {path: entry["sha256"] for path, entry in listed.items()} == {
        path: hashlib.sha256(content).hexdigest() for path, content in files.items()
    }
    assert all(entry["size_bytes"] == len(files[path]) for path, entry in listed.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_facts(bundle_of: BundleFactory, name: str) -> None:
    facts = Bundle(bundle_of(name)).manifest.model
    config, tensors = read_config(name), read_tensors(name)
    assert facts.num_parameters == sum(tensor.size for tensor in tensors.values())
    experts = sum(tensor.size for key, tensor in tensors.items() if ".experts." in key)
    share = facts.num_experts_per_tok / facts.num_experts
    assert facts.num_active_parameters == facts.num_parameters - round(experts * (1 - share))
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "num_experts_per_tok"):
        assert getattr(facts, key) == config[key]
    assert facts.eos_token_ids == [2]
    assert facts.bos_token_id == 1


@pytest.mark.parametrize("bits", [32, 8, 4, 2])
def test_report_counts_what_is_there(tmp_path: Path, bits: Any) -> None:
    seen: dict[str, int] = {}

    def progress(what: str, num_bytes: int) -> None:
        seen[what] = seen.get(what, 0) + num_bytes

    plans: list[Any] = []
    options = ExportOptions(bits=bits, num_workers=1)
    report = export_bundle(fixture(NAME), tmp_path / "bundle", options, progress=progress, announce=plans.append)
    bundle = Bundle(tmp_path / "bundle")
    assert report.bundle == tmp_path / "bundle"
    assert report.total_bytes == sum(len(content) for content in file_bytes(tmp_path / "bundle").values())
    assert report.expert_bytes == bundle.expert_bytes == seen["experts"]
    assert report.dense_bytes == (tmp_path / "bundle/dense/dense.bin").stat().st_size == seen["dense parts"]
    assert [plan.total_bytes for plan in plans] == [report.dense_bytes + report.expert_bytes]
    assert report.checkpoint_bytes == sum(tensor.nbytes for tensor in read_tensors(NAME).values())


def test_smaller_blocks_where_a_matrix_is_narrow_are_said(tmp_path: Path) -> None:
    report = export_bundle(fixture(NAME), tmp_path / "bundle", ALONE)
    used = {m.block_size for kind in report.manifest.expert_kinds for m in kind.matrices.values()}
    assert used == {32, 64}
    assert any("block size 128" in note and "32, 64" in note for note in report.notes)


def test_unread_keys_are_said(tmp_path: Path) -> None:
    checkpoint = derive(NAME, tmp_path / "in", config=lambda config: config | {"logit_scale": 2})
    report = export_bundle(checkpoint, tmp_path / "out", ALONE)
    assert any("logit_scale" in note for note in report.notes)


def test_tensors_with_a_reason_are_skipped_and_named(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> Tensors:
        frequencies = np.ones(8, np.float32)
        return tensors | {
            "model.layers.0.self_attn.rotary_emb.inv_freq": frequencies,
            "mtp.fc.weight": np.ones((2, 2), np.float32),
        }

    report = export_bundle(derive(NAME, tmp_path / "in", tensors=add), tmp_path / "out", ALONE)
    assert set(report.manifest.skipped_tensors) == {"model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.fc.weight"}


def test_an_export_after_a_run_in_one_process(tmp_path: Path, sample_bundle: Path) -> None:
    """What running leaves in a process, ONNX Runtime's thread pools say, must not change an export."""
    script = f"""
from pathlib import Path
import lesonnx, lesonnx.sample
from lesonnx_export.exporter import ExportOptions, export_bundle
with lesonnx.load({str(sample_bundle)!r}) as model:
    model.generate("x", lesonnx.GenerationOptions(max_new_tokens=1)).text()
options = ExportOptions(bits=4, dense_bits=8, num_workers=1)
export_bundle(Path(lesonnx.sample.__file__).parent, Path({str(tmp_path / "bundle")!r}), options)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert file_bytes(tmp_path / "bundle") == file_bytes(sample_bundle)


def test_a_plan_reads_no_weights(tmp_path: Path) -> None:
    """All that can be wrong with names and shapes is found before any work; only a head beside an embedding is read."""
    checkpoint = Checkpoint(derive("qwen3_moe_tied_dense0", tmp_path))
    (tmp_path / "model.safetensors").unlink()
    plan = make_plan(checkpoint, ALONE)
    assert plan.total_bytes > 0


@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_number_of_workers_does_not_change_a_byte(
    tmp_path: Path, clean: dict[str, bytes], num_workers: int
) -> None:
    options = ExportOptions(bits=4, num_workers=num_workers)
    assert file_bytes(export_bundle(fixture(NAME), tmp_path / "bundle", options).bundle) == clean
    assert os.listdir(tmp_path) == ["bundle"]


# -- broken off and gone on with ---------------------------------------------------------------------------------------


def break_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, *, after: bool, error: Any) -> None:
    """Let the given call (from 0) of a function raise, before or after its work."""
    original, calls = getattr(owner, name), iter(range(1_000_000))

    def broken(*args: Any, **kwargs: Any) -> Any:
        is_it = next(calls) == call
        if is_it and not after:
            raise error
        result = original(*args, **kwargs)
        if is_it:
            raise error
        return result

    monkeypatch.setattr(owner, name, broken)


def export_broken(
    bundle: Path, owner: Any, name: str, call: int, *, after: bool, error: BaseException
) -> BaseException:
    """An export that breaks at a call of a function, counted from the end of the rehearsal; what it raised."""
    with pytest.MonkeyPatch.context() as patch:

        def announce(plan: Any) -> None:
            break_at(patch, owner, name, call, after=after, error=error)

        with pytest.raises((type(error), LesonnxError)) as caught:
            export_bundle(fixture(NAME), bundle, ALONE, announce=announce)
    return caught.value


POINTS: dict[str, tuple[Any, str, range]] = {
    # embed, three segments, two lookaheads, head, three layers
    "journal": (Journal, "add", range(10)),
    "weights of parts": (DenseStore, "write", range(0, 30, 4)),
    "a part": (parts, "save_part", range(7)),
    "experts": (os, "pwrite", range(0, 27, 4)),
    "stages": (exporter, "write_stages", range(1)),
    "tokenizer": (exporter, "export_tokenizer", range(1)),
    "manifest": (exporter, "make_manifest", range(1)),
    "checksums": (exporter, "write_checksums", range(1)),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_resume(tmp_path: Path, clean: dict[str, bytes], point: str, after: bool) -> None:
    owner, name, calls = POINTS[point]
    for call in calls:
        bundle = tmp_path / f"bundle_{call}" / "bundle"
        bundle.parent.mkdir()
        export_broken(bundle, owner, name, call, after=after, error=KeyboardInterrupt())
        assert_resumes(bundle, clean)


def test_resume_again_and_again(tmp_path: Path, clean: dict[str, bytes]) -> None:
    """An export that is broken off after every single step ends all the same."""
    bundle = tmp_path / "bundle"
    attempts = 0
    while not bundle.exists():
        with pytest.MonkeyPatch.context() as patch:
            break_at(patch, Journal, "add", 0, after=True, error=Broken())
            try:
                export_bundle(fixture(NAME), bundle, ALONE, resume=attempts > 0)
            except Broken:
                attempts += 1
    assert attempts == 10
    assert file_bytes(bundle) == clean


@pytest.fixture
def broken_off(tmp_path: Path) -> Path:
    """A bundle whose export stopped after the first of three layers."""
    export_broken(tmp_path / "bundle", Journal, "add", 7, after=True, error=KeyboardInterrupt())
    return tmp_path / "bundle"


def test_what_is_finished_is_not_done_again(broken_off: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def progress(what: str, num_bytes: int) -> None:
        written.append(what)

    saved: list[str] = []
    monkeypatch.setattr(parts, "save_part", lambda built, partial: saved.append(built.part.name))
    packs = []
    original = exporter.write_packs

    def write(checkpoint: Path, root: Path, plans: Any, *args: Any) -> Iterator[Any]:
        packs.extend(plan.layer_idx for plan in plans)
        return original(checkpoint, root, plans, *args)

    monkeypatch.setattr(exporter, "write_packs", write)
    export_bundle(fixture(NAME), broken_off, ALONE, resume=True, progress=progress)
    assert saved == []
    assert packs == [1, 2]


def test_progress_of_a_resumed_export_ends_at_the_whole(broken_off: Path) -> None:
    total, plans = 0, []

    def progress(what: str, num_bytes: int) -> None:
        nonlocal total
        total += num_bytes

    export_bundle(fixture(NAME), broken_off, ALONE, resume=True, progress=progress, announce=plans.append)
    assert total == plans[0].total_bytes


def tear_journal(partial: Path) -> None:
    """A line that was being written when the power went."""
    journal = partial / JOURNAL
    journal.write_bytes(journal.read_bytes() + b'{"what": "experts", "by')


def grow_dense(partial: Path) -> None:
    with (partial / "dense/dense.bin").open("ab") as file:
        file.write(b"half a tensor")


def lose_models(partial: Path) -> None:
    """Small files that had not reached the disk."""
    for path in (partial / "experts/layer_000").glob("*.onnx"):
        path.write_bytes(b"")


def leave_files(partial: Path) -> None:
    """Files of a tokenizer that the checkpoint no longer has."""
    (partial / "tokenizer").mkdir(exist_ok=True)
    (partial / "tokenizer/old.json").write_text("{}")


@pytest.mark.parametrize("damage", [tear_journal, grow_dense, lose_models, leave_files])
def test_what_a_crash_leaves_does_no_harm(
    broken_off: Path, clean: dict[str, bytes], damage: Callable[[Path], None]
) -> None:
    damage(partial_of(broken_off))
    assert_resumes(broken_off, clean)


def test_other_workers_and_another_chunk_may_resume(broken_off: Path, clean: dict[str, bytes]) -> None:
    options = ExportOptions(bits=4, num_workers=2, prefill_chunk_tokens=64)
    manifest = export_bundle(fixture(NAME), broken_off, options, resume=True).manifest
    assert manifest.prefill_chunk_tokens == 64
    files = file_bytes(broken_off)
    different = {path for path in clean if files[path] != clean[path]}
    assert different == {"manifest.json", "checksums.json"}


def truncate_pack(partial: Path) -> None:
    os.truncate(partial / "experts/layer_000/experts.pack", 4096)


def lose_dense(partial: Path) -> None:
    (partial / "dense/dense.bin").unlink()


def garble_journal(partial: Path) -> None:
    (partial / JOURNAL).write_bytes(b"\xff\xfe\n")


def lose_journal(partial: Path) -> None:
    (partial / JOURNAL).unlink()


@pytest.mark.parametrize("damage", [truncate_pack, lose_dense, garble_journal, lose_journal])
def test_damage_that_cannot_be_resumed_is_said(
    broken_off: Path, clean: dict[str, bytes], damage: Callable[[Path], None]
) -> None:
    damage(partial_of(broken_off))
    with pytest.raises(InputError, match="export without --resume to begin anew"):
        export_bundle(fixture(NAME), broken_off, ALONE, resume=True)
    export_bundle(fixture(NAME), broken_off, ALONE)
    assert file_bytes(broken_off) == clean


@pytest.mark.parametrize(
    "options", [{"bits": 8}, {"dense_bits": 8}, {"block_size": 16}, {"kv_bits": 16}, {"kv_bits": 8}]
)
def test_other_options_may_not_resume(broken_off: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="was begun with another checkpoint or options"):
        export_bundle(fixture(NAME), broken_off, ExportOptions(**options, num_workers=1), resume=True)
    assert partial_of(broken_off).is_dir()


def test_another_checkpoint_may_not_resume(broken_off: Path, tmp_path: Path) -> None:
    checkpoint = derive(NAME, tmp_path / "in")
    with pytest.raises(InputError, match="was begun with another checkpoint or options"):
        export_bundle(checkpoint, broken_off, ALONE, resume=True)


def test_without_resume_an_export_begins_anew(broken_off: Path, clean: dict[str, bytes]) -> None:
    (partial_of(broken_off) / "stray").write_text("x")
    export_bundle(fixture(NAME), broken_off, ALONE)
    assert file_bytes(broken_off) == clean


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to resume"):
        export_bundle(fixture(NAME), tmp_path / "bundle", ALONE, resume=True)
    assert os.listdir(tmp_path) == []


# -- targets and failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["file", "directory", "dangling link"])
def test_an_existing_target_is_refused(tmp_path: Path, what: str) -> None:
    target = tmp_path / "bundle"
    if what == "file":
        target.write_text("precious")
    elif what == "directory":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="already exists"):
        export_bundle(fixture(NAME), target, ALONE)
    assert os.listdir(tmp_path) == ["bundle"]


def test_a_target_that_appears_meanwhile_is_left_alone(tmp_path: Path, clean: dict[str, bytes]) -> None:
    target = tmp_path / "bundle"
    with pytest.raises(InputError, match="already exists"):
        export_bundle(fixture(NAME), target, ALONE, announce=lambda plan: target.mkdir())
    target.rmdir()
    assert_resumes(target, clean)


def test_values_that_are_not_finite_leave_nothing(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        tensors["model.layers.2.mlp.experts.7.down_proj.weight"][1, 1] = np.nan
        return tensors

    checkpoint = derive(NAME, tmp_path / "in", tensors=spoil)
    for num_workers in (1, 2):
        with pytest.raises(CheckpointError, match="experts.7.down_proj.weight' holds values that are not finite"):
            export_bundle(checkpoint, tmp_path / "out", ExportOptions(bits=32, num_workers=num_workers))
        assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize(("owner", "name"), [(os, "pwrite"), (DenseStore, "write"), (Journal, "add")])
def test_a_full_disk_can_be_resumed(tmp_path: Path, clean: dict[str, bytes], owner: Any, name: str) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raised = export_broken(tmp_path / "bundle", owner, name, 3, after=False, error=full)
    assert re.search(r"disk is full.*--resume", str(raised))
    assert isinstance(raised, LesonnxError)
    assert raised.exit_code == 1
    assert_resumes(tmp_path / "bundle", clean)


def test_a_disk_too_small_is_known_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 100_000

    monkeypatch.setattr(exporter.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(LesonnxError, match=r"needs [\d,]+ bytes, the disk has 100,000 free"):
        export_bundle(fixture(NAME), tmp_path / "bundle", ALONE)
    assert os.listdir(tmp_path) == []


def test_a_killed_worker_can_be_resumed(
    tmp_path: Path, clean: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Worker.give

    def give(self: Worker, task: Any) -> None:
        original(self, task)
        if task.plan.layer_idx == 1:
            os.kill(int(self.process.pid or 0), signal.SIGKILL)

    monkeypatch.setattr(Worker, "give", give)
    with pytest.raises(LesonnxError, match=r"worker process died.*--resume"):
        export_bundle(fixture(NAME), tmp_path / "bundle", ExportOptions(bits=4, num_workers=2))
    monkeypatch.undo()
    assert_resumes(tmp_path / "bundle", clean)


# Ctrl-C reaches the whole process group, workers included: at a part, at the first layer, in the middle of one.
INTERRUPTED = """
    import sys, threading
    import lesonnx_export.journal, lesonnx_export.workers
    from lesonnx.cli import main

    owner, name = {point}
    original, calls = getattr(owner, name), []

    def wait_to_be_interrupted(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append(name)
        if len(calls) == {call}:
            print("here", flush=True)
            threading.Event().wait(60)
        return result

    setattr(owner, name, wait_to_be_interrupted)
    sys.argv = ["lesonnx", "export", {checkpoint!r}, {bundle!r}, "--bits", "4", "--workers", "2"]
    main()
"""
JOURNAL_ADD = "lesonnx_export.journal.Journal, 'add'"
GIVE = "lesonnx_export.workers.Worker, 'give'"


@pytest.mark.parametrize(("point", "call"), [(JOURNAL_ADD, 3), (JOURNAL_ADD, 8), (GIVE, 1), (GIVE, 2), (GIVE, 5)])
def test_interrupt(tmp_path: Path, clean: dict[str, bytes], point: str, call: int) -> None:
    bundle = tmp_path / "bundle"
    script = textwrap.dedent(INTERRUPTED).format(
        point=point, call=call, checkpoint=str(fixture(NAME)), bundle=str(bundle)
    )
    (tmp_path / "script.py").write_text(f"if __name__ == '__main__':\n{textwrap.indent(script, '    ')}")
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) and "here" not in line:
        pass
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    (tmp_path / "script.py").unlink()
    assert process.returncode == 130
    assert err.splitlines() == ["interrupted; go on with --resume"]  # below the terminal's own ^C
    assert os.listdir(tmp_path) == [partial_of(bundle).name]
    assert_resumes(bundle, clean)
