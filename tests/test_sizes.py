"""``lesonnx inspect --shape``: sizes from a configuration alone, against an export of the same; the table in docs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import FIXTURES, read_config
from conftest import BundleFactory, Outcome

from lesonnx.bundle import Bundle
from lesonnx.errors import CheckpointError
from lesonnx_export.plan import ExportOptions
from lesonnx_export.shapes import SHAPES
from lesonnx_export.sizes import sizes_of, verdict

Lesonnx = Callable[..., Outcome]
DOCS = Path(__file__).resolve().parent.parent / "docs" / "models.md"


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3", "lfm2_moe", "gemma4_text"])
def test_sizes_are_those_of_an_export(bundle_of: BundleFactory, lesonnx: Lesonnx, name: str) -> None:
    bundle = bundle_of(name, bits=4)
    exported = json.loads(lesonnx("inspect", bundle, "--json").out)
    sizes = json.loads(lesonnx("inspect", "--shape", FIXTURES / name, "--json").out)
    for key in ("expert_bytes", "least_budget_bytes", "token_demand_bytes", "state_bytes_per_token"):
        assert sizes[key] == exported[key], key
    assert sizes["num_active_parameters"] == Bundle(bundle).manifest.model.num_active_parameters
    # The rest of the dense parts is graphs.
    assert 0 < exported["dense_bytes"] - sizes["dense_bytes"] < 200_000


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "lfm2-8b-a1b"])
def test_the_table_is_what_is_computed(name: str) -> None:
    sizes = sizes_of(SHAPES[name], ExportOptions(bits=4))
    row = next(line for line in DOCS.read_text().splitlines() if f"`{name}`" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[4] == f"{sizes.bundle_bytes / 1e9:.2f}"
    assert cells[6] == f"{sizes.token_demand_bytes / 1e6:,.0f}"
    assert cells[9] == f"{sizes.suggested_memory_bytes / 1e9:.2f}"


def test_every_shape_is_in_the_table() -> None:
    assert set(re.findall(r"^\| [^|]+ \| `([^`]+)` \|", DOCS.read_text(), re.MULTILINE)) >= set(SHAPES)


def test_a_device_is_judged_by_half_of_its_memory() -> None:
    sizes = sizes_of(read_config("qwen3_moe"), ExportOptions(bits=4))
    assert "will run it well" in verdict(sizes, 2 * sizes.suggested_memory_bytes)
    assert "slowly" in verdict(sizes, 2 * sizes.least_memory_bytes) or sizes.least_memory_bytes == (
        sizes.suggested_memory_bytes
    )
    assert "will not run it" in verdict(sizes, 2 * sizes.least_memory_bytes - 2)


def test_tied_embeddings_are_counted_once() -> None:
    config = SHAPES["lfm2-8b-a1b"]
    tied, untied = (sizes_of(config | {"tie_word_embeddings": tie}, ExportOptions(bits=4)) for tie in (True, False))
    assert untied.num_parameters - tied.num_parameters == config["vocab_size"] * config["hidden_size"]


def test_bad_shapes(lesonnx: Lesonnx, tmp_path: Path) -> None:
    assert "no such configuration file" in lesonnx("inspect", "--shape", "nothing-7b").error
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type 'llama' is not supported" in lesonnx("inspect", "--shape", tmp_path).error
    (tmp_path / "config.json").write_text("{")
    assert "not readable as JSON" in lesonnx("inspect", "--shape", tmp_path).error
    for arguments in (
        ("inspect",),
        ("inspect", tmp_path, "--shape", "olmoe-1b-7b"),
        ("inspect", tmp_path, "--memory", "1GB"),
    ):
        assert lesonnx(*arguments).code == 2
    with pytest.raises(CheckpointError, match="hidden_size"):
        sizes_of(SHAPES["olmoe-1b-7b"] | {"hidden_size": 0}, ExportOptions())
