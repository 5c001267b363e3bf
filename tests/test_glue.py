"""Glue: the checked-in specs are what the sample gives, and real compilers read from them what the manifest says."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compilers import ROOT, run_kotlin, run_swift
from conftest import BundleFactory, Outcome

from lesonnx.bundle import Bundle
from lesonnx.errors import BundleError, InputError
from lesonnx.manifest import Target
from lesonnx_export.glue.naming import comment, kotlin_int, kotlin_package, kotlin_string, swift_string
from lesonnx_export.glue.render import GlueOptions, render
from lesonnx_export.glue.spec import SYMBOLS, Spec, VisionSpec, read_spec, suggest_budgets

Call = Callable[..., Outcome]
PROGRAMS = Path(__file__).parent / "data" / "glue"
TITLE = "lesonnx sample"
# Target -> where the sample app has its spec, and the options that it is rendered with.
APPS: dict[Target, tuple[Path, list[str]]] = {
    "android": (
        ROOT / "android/app/src/main/kotlin/dev/lesonnx/app/generated",
        ["--package", "dev.lesonnx.app.generated"],
    ),
    "ios": (ROOT / "ios/SampleApp/Generated", []),
}
FILES: dict[Target, str] = {"android": "ModelSpec.kt", "ios": "ModelSpec.swift"}
NASTY = "\"'$x ${y} \\ \\(z) \\u{41} \n\r\t\0\x7f é\u2028 😀 */ // {{ a }} <|im_start|>"


@pytest.fixture(scope="session")
def bundle(bundle_of: BundleFactory) -> Path:
    """The sample as the apps run it."""
    return bundle_of("sample", bits=4)


def changed(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a bundle with another manifest."""
    shutil.copytree(source, target)
    document = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
    change(document)
    (target / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    return target


# -- what is checked in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", APPS)
def test_checked_in_specs_are_the_sample_s(lesonnx: Call, bundle: Path, target: Target) -> None:
    out, options = APPS[target]
    outcome = lesonnx("glue", bundle, "--target", target, out, "--title", TITLE, *options, "--check")
    assert outcome.code == 0, f"{outcome.err}render them again, as docs/mobile.md says"


def test_a_spec_depends_on_nothing_but_the_bundle(
    lesonnx: Call, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported by another number of processes, and called from elsewhere by a relative path."""
    assert lesonnx("export", ROOT / "lesonnx/sample", tmp_path / "sample", "--workers", 2).code == 0
    monkeypatch.chdir(tmp_path)
    for place, source in (("a", bundle), ("b", Path("sample"))):
        assert lesonnx("glue", source, "--target", "android", place).code == 0
    assert Path("a/ModelSpec.kt").read_bytes() == Path("b/ModelSpec.kt").read_bytes()


# -- what it says ------------------------------------------------------------------------------------------------------


def as_utf16(text: str) -> str:
    return text.encode("utf-16-be").hex()


def told(spec: Spec) -> list[str]:
    """What the programs in data/glue must print, taken from the manifest's records and not from rendered text."""

    def shape(sizes: list[int | str]) -> str:
        return str([SYMBOLS[size][0] if isinstance(size, str) else size for size in sizes])

    def option(value: int | None) -> str:
        return "none" if value is None else str(value)

    model, quantization = spec.model, spec.quantization
    lines = [
        f"title {as_utf16(spec.title)}",
        f"bytes {spec.download_bytes} {spec.dense_bytes} {spec.expert_bytes} {spec.least_budget_bytes}"
        f" {spec.token_demand_bytes} {spec.state_bytes_per_token} {spec.fixed_state_bytes}",
        f"model {model.model_type} {model.hidden_size} {model.num_hidden_layers} {model.vocab_size} {model.num_experts}"
        f" {model.num_experts_per_tok} {model.moe_intermediate_size} {model.max_position_embeddings}"
        f" {model.num_parameters} {model.num_active_parameters}",
        f"ids {model.eos_token_ids} {option(model.bos_token_id)} {option(model.pad_token_id)}",
        f"bits {quantization.expert_bits} {quantization.dense_bits} {quantization.kv_bits} {spec.prefill_chunk_tokens}"
        f" {spec.onnxruntime_at_least}",
    ]
    lines += [f"budget {as_utf16(budget.name)} {budget.num_bytes}" for budget in spec.budgets]
    for part in spec.parts:
        lines.append(f"part {part.name} {part.role} {part.path} {option(part.layer_idx)}")
        lines += [f"input {value.name} {value.dtype} {shape(value.shape)}" for value in part.inputs]
        lines += [f"output {value.name} {value.dtype} {shape(value.shape)}" for value in part.outputs]
        for provider in spec.providers[part.name]:
            options = [f"{as_utf16(key)}={as_utf16(value)}" for key, value in sorted(provider.options.items())]
            lines.append(f"provider {provider.name} [{', '.join(options)}]")
    lines += [
        f"state {s.name} {s.kind} {s.layer_idx} {s.part} {s.input} {s.output} {s.dtype} {shape(s.shape)}"
        for s in spec.states
    ]
    for kind in spec.kinds:
        bits = [matrix.bits for matrix in kind.matrices.values()]
        lines.append(
            f"kind {kind.name} {kind.hidden_size} {kind.intermediate_size} {kind.activation} {bits} {kind.length_bytes}"
            f" {kind.cost_bytes}"
        )
    for sizes in spec.layers:
        layer = sizes.layer
        lines.append(
            f"layer {layer.layer_idx} {layer.pack} {layer.num_experts} {layer.num_experts_per_tok} {layer.kind}"
            f" {option(layer.shared_kind)} {sizes.pack_bytes} {sizes.demand_bytes}"
        )
    chat = spec.chat_format
    lines.append("chat none" if chat is None else f"chat {as_utf16(chat.start)} {as_utf16(chat.answer)}")
    if chat is not None:
        for role, turn in sorted(chat.messages.items()):
            lines.append(f"turn {role} {as_utf16(turn.prefix)} {as_utf16(turn.suffix)}")
    vision = spec.vision
    lines.append(
        f"vision {vision.max_slices} {vision.max_image_tokens} {vision.vision_bytes} {vision.working_bytes}"
        if vision
        else "vision none"
    )
    message = f"manifest.json: SHA-256 is 0, this app was made for {spec.title} with {spec.manifest_sha256}"
    return [*lines, f"check {as_utf16(message)}"]


@pytest.fixture(scope="session")
def nasty_bundle(bundle_of: BundleFactory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared expert, token ids, providers, and texts that a careless template would break."""

    def change(document: dict[str, Any]) -> None:
        turn = {"prefix": NASTY, "suffix": NASTY[::-1]}
        chat_format = {"start": NASTY, "messages": {"user": turn, "assistant": turn}, "answer": ""}
        document["tokenizer"] = {"chat_format": chat_format}
        document["model"] |= {"eos_token_ids": [1, 2, 63], "bos_token_id": 1, "pad_token_id": None}
        provider = {"name": "XnnpackExecutionProvider", "options": {"intra_op_num_threads": "2", NASTY: NASTY}}
        document["parts"][1]["providers"] = {
            "android": [provider, {"name": "CPUExecutionProvider"}],
            "ios": [{"name": "CoreMLExecutionProvider", "options": {"ModelFormat": "MLProgram"}}],
        }

    return changed(bundle_of("qwen2_moe", bits=4), tmp_path_factory.mktemp("nasty") / "bundle", change)


def large(bundle: Path, target: Target) -> Spec:
    """A spec with as many parts, states and layers as a large model has: compilers have limits."""
    spec = read_spec(Bundle(bundle), target, NASTY)
    eyes = VisionSpec(max_slices=9, max_image_tokens=1280, vision_bytes=1 << 31, working_bytes=1 << 28)
    return replace(spec, parts=spec.parts * 10, states=spec.states * 12, layers=spec.layers * 12, vision=eyes)


def test_kotlin_says_what_the_manifest_says(nasty_bundle: Path, tmp_path: Path) -> None:
    spec = large(nasty_bundle, "android")
    source = tmp_path / "ModelSpec.kt"
    source.write_text(render(spec, GlueOptions("dev.in.generated"))["ModelSpec.kt"], encoding="utf-8")
    assert run_kotlin([source, PROGRAMS / "Main.kt"], "dev.lesonnx.glue.test.MainKt", tmp_path).splitlines() == told(
        spec
    )


def test_swift_says_what_the_manifest_says(nasty_bundle: Path, tmp_path: Path) -> None:
    spec = large(nasty_bundle, "ios")
    source, program = tmp_path / "ModelSpec.swift", tmp_path / "main.swift"
    source.write_text(render(spec, GlueOptions())["ModelSpec.swift"], encoding="utf-8")
    shutil.copyfile(PROGRAMS / "main.swift", program)
    assert run_swift([source, program], tmp_path).splitlines() == told(spec)


def test_a_spec_is_what_the_bundle_says(nasty_bundle: Path) -> None:
    opened = Bundle(nasty_bundle)
    spec = read_spec(opened, "ios")
    assert spec.title == "qwen2_moe, 0.3 M parameters, int4"
    assert spec.manifest_sha256 == hashlib.sha256((nasty_bundle / "manifest.json").read_bytes()).hexdigest()
    assert sum(sizes.pack_bytes for sizes in spec.layers) == spec.expert_bytes == opened.expert_bytes
    assert max(sizes.demand_bytes for sizes in spec.layers) == spec.least_budget_bytes
    assert sum(sizes.demand_bytes for sizes in spec.layers) == spec.token_demand_bytes
    assert [provider.name for provider in spec.providers["embed"]] == ["CPUExecutionProvider"]
    second = opened.manifest.parts[1].name
    assert [provider.name for provider in spec.providers[second]] == ["CoreMLExecutionProvider"]
    assert [p.name for p in read_spec(opened, "android").providers[second]] == [
        "XnnpackExecutionProvider",
        "CPUExecutionProvider",
    ]


def test_a_spec_of_a_bundle_that_takes_pictures(bundle_of: BundleFactory, bundle: Path) -> None:
    path = bundle_of("minicpmv4_7_moe")
    vision, record = read_spec(Bundle(path), "android").vision, Bundle(path).manifest.vision
    assert vision is not None
    assert record is not None
    # A crop of 112 x 112 pixels has 2 x 2 image tokens; the narrowest that pass have twice that.
    assert (vision.max_slices, vision.max_image_tokens) == (9, 10 * 8)
    assert vision.vision_bytes == sum(file.stat().st_size for file in (path / "vision").iterdir())
    assert vision.working_bytes == record.working_bytes
    assert read_spec(Bundle(bundle), "android").vision is None


def test_a_download_is_all_files(bundle: Path) -> None:
    total = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    assert read_spec(Bundle(bundle), "android").download_bytes == total


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((10, 40, 400), [("least", 10), ("one token", 40), ("a quarter", 100), ("half", 200), ("all", 400)]),
        ((10, 10, 16), [("least", 10), ("all", 16)]),
        ((10, 150, 200), [("least", 10), ("a quarter", 50), ("half", 100), ("one token", 150), ("all", 200)]),
        ((5, 5, 5), [("least", 5)]),
    ],
)
def test_suggested_budgets(sizes: tuple[int, int, int], expected: list[tuple[str, int]]) -> None:
    assert [(budget.name, budget.num_bytes) for budget in suggest_budgets(*sizes)] == expected


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", FILES)
def test_a_file_says_where_it_comes_from(lesonnx: Call, bundle: Path, tmp_path: Path, target: Target) -> None:
    outcome = lesonnx("glue", bundle, "--target", target, tmp_path / "new" / "out")
    path = tmp_path / "new" / "out" / FILES[target]
    assert (outcome.code, outcome.out) == (0, f"{path}: written\n")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    head = path.read_text(encoding="utf-8").splitlines()[:2]
    assert head[0].startswith("// Generated by `lesonnx glue`; do not edit.")
    assert hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest() in head[1]
    # What is generated is written over.
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert lesonnx("glue", bundle, "--target", target, path.parent).code == 0
    assert not path.read_text(encoding="utf-8").endswith("\n\n")


def test_check(lesonnx: Call, bundle: Path, tmp_path: Path) -> None:
    arguments = ("glue", bundle, "--target", "ios", tmp_path / "out")
    path = tmp_path / "out" / "ModelSpec.swift"
    missing = lesonnx(*arguments, "--check")
    assert missing.code == 1
    assert missing.error == f"error: {path}: is not there; run the same command without --check"
    assert not path.parent.exists()
    assert lesonnx(*arguments).code == 0
    assert lesonnx(*arguments, "--check").out == f"{path}: as the bundle gives it\n"
    other = lesonnx(*arguments, "--title", "another", "--check")
    assert other.code == 1
    assert other.error == f"error: {path}: line 4 is not what the bundle gives; run the same command without --check"
    path.write_text(path.read_text(encoding="utf-8") + "// more\n", encoding="utf-8")
    before = path.read_bytes()
    assert lesonnx(*arguments, "--check").code == 1
    assert path.read_bytes() == before


def test_check_notices_another_bundle(lesonnx: Call, bundle: Path, tmp_path: Path) -> None:
    assert lesonnx("glue", bundle, "--target", "android", tmp_path / "out").code == 0
    other = changed(bundle, tmp_path / "other", lambda document: document.update(producer="lesonnx 9"))
    outcome = lesonnx("glue", other, "--target", "android", tmp_path / "out", "--check")
    assert outcome.code == 1
    assert "ModelSpec.kt: line 2 is not what the bundle gives" in outcome.error


def test_a_file_written_by_hand_stays(lesonnx: Call, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "ModelSpec.kt").write_text("object ModelSpec", encoding="utf-8")
    outcome = lesonnx("glue", bundle, "--target", "android", tmp_path)
    assert outcome.code == 2
    assert (
        outcome.error
        == f"error: {tmp_path / 'ModelSpec.kt'}: is not generated by lesonnx glue, so it is not written over"
    )
    assert (tmp_path / "ModelSpec.kt").read_text(encoding="utf-8") == "object ModelSpec"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--target", "android", "--package", "a..b"],
            "--package 'a..b' is not a package name such as com.example.app",
        ),
        (["--target", "android", "--package", "a;b"], "--package 'a;b' is not a package name"),
        (["--target", "ios", "--package", "a.b"], "--package is for --target android"),
        (["--target", "desktop"], "'desktop' is not one of 'android', 'ios'"),
        ([], "Missing option '--target'"),
    ],
)
def test_bad_options(lesonnx: Call, bundle: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    outcome = lesonnx("glue", bundle, tmp_path / "out", *arguments)
    assert outcome.code == 2
    assert message in outcome.error
    assert not (tmp_path / "out").exists()


def test_no_bundle(lesonnx: Call, tmp_path: Path) -> None:
    outcome = lesonnx("glue", tmp_path / "none", "--target", "ios", tmp_path / "out")
    assert (outcome.code, outcome.error) == (2, f"error: {tmp_path / 'none'}: no such bundle directory")


def test_a_place_that_is_a_file(lesonnx: Call, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("", encoding="utf-8")
    outcome = lesonnx("glue", bundle, "--target", "ios", tmp_path / "out")
    assert outcome.code == 2
    assert str(tmp_path / "out") in outcome.error


def test_a_dimension_that_no_host_knows(bundle: Path, tmp_path: Path) -> None:
    def rename(document: dict[str, Any]) -> None:
        values = (value for part in document["parts"] for value in part["outputs"])
        next(value for value in values if value["name"].startswith("layer_output")).update(shape=[1, "Q", 64])

    other = changed(bundle, tmp_path / "other", rename)
    with pytest.raises(BundleError, match="'Q'"):
        read_spec(Bundle(other), "ios")


def test_glue_needs_none_of_the_exporter_s_packages(bundle: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from lesonnx.cli import main\n"
        "for name in ('onnx', 'onnxruntime', 'safetensors', 'ml_dtypes'): sys.modules[name] = None\n"
        f"sys.argv = ['lesonnx', 'glue', {str(bundle)!r}, '--target', 'ios', {str(tmp_path / 'out')!r}]\nmain()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "ModelSpec.swift").exists()


# -- naming ------------------------------------------------------------------------------------------------------------


def test_literals() -> None:
    assert kotlin_string('a"$b\\\n\0é😀') == '"a\\"\\$b\\\\\\n\\u0000\\u00e9\\ud83d\\ude00"'
    assert swift_string('a"$b\\\n\0é😀') == '"a\\"$b\\\\\\n\\u{0}\\u{e9}\\u{1f600}"'
    assert kotlin_int(2_048) == "2_048"
    with pytest.raises(InputError, match="2,147,483,648 is more than Kotlin's Int holds"):
        kotlin_int(1 << 31)


def test_packages() -> None:
    assert kotlin_package("in.Company_1.object") == "`in`.Company_1.`object`"
    for bad in ("", ".", "a.", "1a", "a-b", "a b", "a\n", "`a`", "é"):
        with pytest.raises(InputError, match="is not a package name"):
            kotlin_package(bad)


def test_comments_stay_comments() -> None:
    assert comment("a */ b /* c\nd\u2028e\0") == "a * / b / * c d e "
