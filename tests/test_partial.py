"""One export at a time writes to a target; what holds it goes with the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import fixture

from lesonnx.errors import InputError
from lesonnx_export.exporter import ExportOptions, export_bundle
from lesonnx_export.partial import held

HOLD = """
import sys
from pathlib import Path
from lesonnx_export.partial import held
with held(Path(sys.argv[1]), resume=False):
    (Path(sys.argv[1]) / "work").write_text("x")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("resume", [False, True])
def test_the_second_export_ends_in_one_line(quick_path: Path, resume: bool) -> None:
    partial, bundle = quick_path / ".bundle.partial", quick_path / "bundle"
    options = ExportOptions(num_workers=1)
    command = [sys.executable, "-c", HOLD, str(partial)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="another export to the same bundle is under way"):
            export_bundle(fixture("qwen3_moe"), bundle, options, resume=resume)
        # Nothing of the first one's is touched.
        assert [path.name for path in partial.iterdir()] == ["work"]
        assert not bundle.exists()
        # It is gone without a word, and so is its hold.
        first.kill()
    export_bundle(fixture("qwen3_moe"), bundle, options)
    assert [path.name for path in quick_path.iterdir()] == ["bundle"]


def test_a_directory_that_was_renamed_meanwhile_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other export ends between opening and locking: what is locked is its bundle, which must stay."""
    import lesonnx_export.partial as module

    partial, bundle = tmp_path / ".b.partial", tmp_path / "b"
    partial.mkdir()
    (partial / "manifest.json").write_text("{}")
    lock = module.fcntl.flock

    def ends_first(descriptor: int, operation: int) -> None:
        partial.rename(bundle)
        lock(descriptor, operation)

    monkeypatch.setattr(module.fcntl, "flock", ends_first)
    with pytest.raises(InputError, match="under way"), held(partial, resume=False):
        pytest.fail("was held")
    assert (bundle / "manifest.json").read_text() == "{}"


def test_begins_empty_and_goes_on_as_it_is(tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    with pytest.raises(InputError, match="nothing to resume"), held(partial, resume=True):
        pytest.fail("was held")
    with held(partial, resume=False):
        (partial / "a").mkdir()
        (partial / "a/b").write_text("")
        (partial / "c").symlink_to(tmp_path)
    with held(partial, resume=True):
        assert {path.name for path in partial.iterdir()} == {"a", "c"}
    with held(partial, resume=False):
        assert not list(partial.iterdir())
    partial.rmdir()
    partial.write_text("a file in the way")
    with held(partial, resume=False):
        assert partial.is_dir()
