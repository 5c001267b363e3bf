"""What CoreML and NNAPI would take of a bundle, by ONNX Runtime's own checker; and that experts are refused there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BundleFactory, Outcome

from lesonnx.bundle import Bundle
from lesonnx.usability import WHY_NOT_EXPERTS, check_bundle

TWINS = {"accelerate": "dense", "twin_capacity_tokens": 48, "prefill_chunk_tokens": 4}
Call = Callable[..., Outcome]


@pytest.fixture(scope="session", params=["sample", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def bundle(request: pytest.FixtureRequest, bundle_of: BundleFactory) -> Path:
    return bundle_of(request.param, **TWINS)


def test_coreml_takes_every_twin_as_one_partition(bundle: Path) -> None:
    report = check_bundle(Bundle(bundle), "ios")
    twins = [part for part in report.parts if " for " in part.name]
    assert len(twins) == 2 * len(Bundle(bundle).manifest.expert_layers) + 1
    for twin in twins:
        assert (twin.supported, twin.partitions, twin.blockers) == (twin.nodes, 1, [])
        assert twin.nodes > 10
    assert f"CoreML (ML Program) would take {len(twins)} of {len(twins)} twins as one partition each" in report.verdict


def test_what_remains_for_nnapi_is_named(bundle: Path, bundle_of: BundleFactory) -> None:
    """Every operator is in its table, and no twin of float16 is for it; of float32 they are."""
    report = check_bundle(Bundle(bundle), "android")
    twins = [part for part in report.parts if " for " in part.name]
    assert {(part.supported == part.nodes, part.partitions, *part.blockers) for part in twins} == {
        (True, 1, "float16, where NNAPI takes float32")
    }
    assert f"NNAPI would take 0 of {len(twins)} twins" in report.verdict
    wide = check_bundle(Bundle(bundle_of("qwen3_moe", target="android", twin_bits=32, **TWINS)), "android")
    assert all(part.is_whole for part in wide.parts if " for " in part.name)
    assert wide.parts[0].provider == "QNNExecutionProvider"
    assert "of QNNExecutionProvider, XnnpackExecutionProvider this checker knows nothing" in wide.verdict


def test_what_twins_are_for_comes_first(lesonnx: Call, bundle_of: BundleFactory) -> None:
    shown = "The bundle's twins are for QNN, which this checker does not know: it says what NNAPI would take."
    android = bundle_of("qwen3_moe", target="android", **TWINS)
    assert lesonnx("inspect", android, "--target", "android").out.startswith(shown)
    for bundle, target in ((bundle_of("qwen3_moe", target="ios", **TWINS), "ios"), (bundle_of("qwen3_moe"), "android")):
        assert "does not know" not in lesonnx("inspect", bundle, "--target", target).out


@pytest.mark.parametrize("target", ["ios", "android"])
def test_a_bundle_without_twins(lesonnx: Call, sample_bundle: Path, target: str) -> None:
    """Dense parts of few bits and experts: nothing is taken, with the operators that break it and the reason."""
    document = json.loads(lesonnx("inspect", sample_bundle, "--target", target, "--json").out)
    parts = {part["name"]: part for part in document["parts"]}
    assert set(document["parts"][0]) == {"name", "provider", "nodes", "supported", "partitions", "blockers"}
    assert {part["provider"] for part in parts.values()} == {"CPUExecutionProvider"}
    assert {part["supported"] for part in parts.values()} == {0}
    assert {"com.microsoft:MatMulNBits", "com.microsoft:GroupQueryAttention"} < set(parts["segment_001"]["blockers"])
    assert WHY_NOT_EXPERTS in parts["experts of kind stage_0"]["blockers"]
    assert "(export --accelerate dense makes twins)" in document["verdict"]


def test_the_verdict_is_the_last_line(lesonnx: Call, bundle: Path) -> None:
    outcome = lesonnx("inspect", bundle, "--target", "ios")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[-1].startswith("ios: CoreML (ML Program) would take ")
    assert "the manifest lists no provider for ios, so no twin is used there" in lines[-1]
    assert lines[-2] == WHY_NOT_EXPERTS
    assert sum(WHY_NOT_EXPERTS in line for line in lines) == 1


def test_a_target_needs_a_bundle(lesonnx: Call) -> None:
    assert lesonnx("inspect", "--shape", "qwen3-30b-a3b", "--target", "ios").code == 2
