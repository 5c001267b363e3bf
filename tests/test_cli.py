"""The command: what its subcommands print, their exit codes, and that the README tells the same as --help."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import SAMPLE, fixture, read_reference
from click.testing import CliRunner
from conftest import BundleFactory, Outcome
from test_generate import chat_bundle  # noqa: F401  (a fixture)

import lesonnx as package
from lesonnx import cli as cli_module
from lesonnx.bundle import Bundle
from lesonnx.cli import COMMANDS, cli

README = Path(__file__).resolve().parent.parent / "README.md"
PROMPT = "In the beginning God"
Call = Callable[..., Outcome]


def ids(count: int = 8) -> str:
    return ",".join(map(str, read_reference("qwen3_moe")["input_ids"][:count].tolist()))


# -- help --------------------------------------------------------------------------------------------------------------


def test_version_and_help(lesonnx: Call) -> None:
    assert lesonnx("--version").out.split() == ["lesonnx,", "version", package.__version__]
    shown = lesonnx("-h")
    assert shown.code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", shown.out, re.MULTILINE), name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith("Usage:")


def test_readme_tells_what_help_tells() -> None:
    """The README's table of commands: each command with the first sentence of its help."""
    context = click.Context(cli)
    rows = []
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        rows.append(f"| `lesonnx {name}` | {command.get_short_help_str(200)} |")
    assert "\n".join(rows) in README.read_text(encoding="utf-8")


def test_readme_example_runs(
    sample_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python example of the README, on the demo's bundle."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo/sample.bundle").symlink_to(sample_bundle)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    exec(blocks[0], {})
    text, counted = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert len(text) > 30
    assert re.fullmatch(r"[\d,]+ bytes of experts read", counted)


def test_readme_names_files_that_exist() -> None:
    """Every file and link that the README names is there."""
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (README.parent / target).exists(), target
    tree = re.search(r"## Files\n```\n(.*?)```", text, re.DOTALL)
    assert tree is not None
    root = README.parent
    for line in tree[1].splitlines():
        names = line[:27].split()
        if not line.startswith(" "):
            root = README.parent / names[0]
            assert root.is_dir(), line
            continue
        for name in names:
            assert name == "..." or (root / name).exists(), line


def test_readme_names_every_family() -> None:
    from lesonnx_export.architectures import supported

    section = README.read_text(encoding="utf-8").partition("## What can be exported")[2].partition("\n## ")[0]
    families = re.findall(r"^\| `(\w+)` \| \w", section, re.MULTILINE)
    families.remove("model_type")
    assert sorted(families) == supported()


def test_no_arguments_show_help(lesonnx: Call) -> None:
    outcome = lesonnx()
    assert outcome.code == 2
    assert "Commands:" in outcome.err + outcome.out


def test_help_does_not_load_the_runtime() -> None:
    script = (
        "import sys; from lesonnx.cli import cli; sys.exit(any(m.startswith(('onnx', 'numpy')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_missing_extra_is_named(lesonnx: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the exporter's packages its commands say what to install, and hide none of the others."""
    original = cli_module.importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        if name.startswith("lesonnx_export"):
            raise ModuleNotFoundError("No module named 'onnx'", name="onnx")
        return original(name, package)

    monkeypatch.setattr(cli_module.importlib, "import_module", import_module)
    outcome = lesonnx("export", "a", "b")
    assert outcome.code == 2
    assert outcome.error == "error: this needs the package onnx: pip install '.[export]' in a clone of lesonnx"
    assert lesonnx("--help").code == 0


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_streams_text_and_sums_up(lesonnx: Call, sample_bundle: Path) -> None:
    outcome = lesonnx("run", sample_bundle, "--prompt", PROMPT, "--max-tokens", 12, "--expert-budget", "2MB")
    assert outcome.code == 0
    with package.load(sample_bundle, expert_budget_bytes=2_000_000) as model:
        expected = model.generate(PROMPT, package.GenerationOptions(max_new_tokens=12)).text()
    assert outcome.out == expected + "\n"
    assert "12 generated" in outcome.error
    assert "budget 2 MB" in outcome.error


def test_run_json(lesonnx: Call, sample_bundle: Path) -> None:
    outcome = lesonnx("run", sample_bundle, "--prompt", PROMPT, "--max-tokens", 12, "--json")
    assert outcome.err == ""
    report = json.loads(outcome.out)
    expected = {"text", "tokens", "prompt_tokens", "finish_reason", "prefill_ms", "decode_ms", "tokens_per_s"}
    expected |= {"read_bytes", "peak_memory_bytes", "loads", "hits", "schedule", "engine", "expert_budget_bytes"}
    assert expected <= set(report)
    assert len(report["tokens"]) == 12
    assert report["finish_reason"] == "length"
    assert 0 < report["read_bytes"] <= report["expert_bytes"] == Bundle(sample_bundle).expert_bytes


def test_run_says_what_drafts_may_change(lesonnx: Call, sample_bundle: Path, bundle_of: BundleFactory) -> None:
    note = "note: drafts on a quantized bundle: some tokens may differ from those without drafts"
    prompt = "alpha = 1\nbeta = 2\n" * 8
    for bundle, draft, is_told in (
        (sample_bundle, "ngram", True),
        (sample_bundle, "none", False),
        (bundle_of("sample"), "ngram", False),
    ):
        arguments = ("--prompt", prompt, "--max-tokens", 60, "--ignore-eos", "--draft", draft)
        outcome = lesonnx("run", bundle, *arguments, "--json")
        report = json.loads(outcome.out)
        assert report["accelerate"] == "off"
        assert (report["drafts"] is not None and report["drafts"]["passes"] > 0) == (draft == "ngram")
        assert (note in outcome.err) is is_told


def test_run_takes_a_prompt_from_anywhere(
    lesonnx: Call, sample_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    with package.load(sample_bundle) as model:
        token_ids = ",".join(map(str, model.encode(PROMPT)))
    sources = (
        ("--prompt", PROMPT),
        ("--prompt", "-"),
        ("--prompt-file", tmp_path / "prompt.txt"),
        ("--prompt-ids", token_ids),
    )
    texts = [lesonnx("run", sample_bundle, *source, "--max-tokens", 8).out for source in sources]
    assert texts == texts[:1] * 4


def test_run_with_every_switch(lesonnx: Call, sample_bundle: Path) -> None:
    plain = json.loads(lesonnx("run", sample_bundle, "--prompt", PROMPT, "--max-tokens", 12, "--json").out)["tokens"]
    for switches in (
        ("--schedule", "on-demand"),
        ("--schedule", "cache", "--policy", "lfu", "--loaders", "2"),
        ("--schedule", "resident"),
        ("--no-lookahead", "--no-compute-first", "--expert-budget", "1MB"),
        ("--stop", "never to be seen", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.1", "--seed", "3"),
    ):
        outcome = lesonnx("run", sample_bundle, "--prompt", PROMPT, "--max-tokens", 12, "--json", *switches)
        assert json.loads(outcome.out)["tokens"] == plain, switches


def test_run_without_a_tokenizer(lesonnx: Call, bundle_of: BundleFactory) -> None:
    bundle = bundle_of("qwen3_moe")
    reference = read_reference("qwen3_moe")
    outcome = lesonnx("run", bundle, "--prompt-ids", ids(24), "--max-tokens", 40, "--ignore-eos", "--json")
    assert json.loads(outcome.out)["tokens"] == reference["greedy_ids"].tolist()


def test_a_closed_pipe_ends_it_quietly(sample_bundle: Path) -> None:
    command = [sys.executable, "-m", "lesonnx", "run", str(sample_bundle), "--prompt", PROMPT, "--max-tokens", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == -signal.SIGPIPE


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat(lesonnx: Call, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    lines = ["In the beginning", "", "And then?", "/reset", "In the beginning", "/exit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    outcome = lesonnx("chat", chat_bundle, "--max-tokens", 6)
    assert outcome.code == 0
    summaries = outcome.err.splitlines()
    assert len(summaries) == 3
    prompts = [int(re.match(r"\[(\d+) prompt tokens", summary)[1]) for summary in summaries]  # type: ignore[index]
    assert prompts[0] == prompts[2] < prompts[1]
    with package.load(chat_bundle) as model:
        first = [{"role": "user", "content": "In the beginning"}]
        answer = model.chat(first, package.GenerationOptions(max_new_tokens=6)).text()
    assert outcome.out.startswith(answer + "\n")
    assert outcome.out.endswith(answer + "\n")


def test_chat_sends_no_command_to_the_model(
    lesonnx: Call,
    chat_bundle: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ["/imgae x", "/help", " /reset now", "/exit now", "/reset", "/etc/x is what?", "/", "/exit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    outcome = lesonnx("chat", chat_bundle, "--max-tokens", 2)
    assert outcome.code == 0
    *errors, path, slash = outcome.err.splitlines()
    known = "there are /image FILE, /reset and /exit"
    assert errors == [
        f"error: unknown command /imgae; {known}",
        f"error: unknown command /help; {known}",
        "error: /reset takes nothing behind it",
        "error: /exit takes nothing behind it",
    ]
    assert [line.startswith("[") for line in (path, slash)] == [True, True]
    assert re.match(r"\[\d+ prompt tokens, \d+ run in \S+ s and \d+ reused, ", slash)


def test_chat_with_a_system_message_until_the_end_of_input(
    lesonnx: Call,
    chat_bundle: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    plain = lesonnx("chat", chat_bundle, "--max-tokens", 2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    system = lesonnx("chat", chat_bundle, "--max-tokens", 2, "--system", "Answer in verse.")
    assert plain.code == system.code == 0
    prompts = [int(outcome.err.split(" ", 1)[0][1:]) for outcome in (plain, system)]
    assert prompts[0] < prompts[1]


def test_chat_without_a_template_names_run(lesonnx: Call, sample_bundle: Path) -> None:
    outcome = lesonnx("chat", sample_bundle)
    assert outcome.code == 2
    assert outcome.error.startswith(f"error: {sample_bundle}: has no chat template; use `lesonnx run")


def test_chat_says_when_the_context_is_full(lesonnx: Call, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 3000 + "\n/reset\nHello\n"))
    outcome = lesonnx("chat", chat_bundle, "--max-tokens", 2)
    assert outcome.code == 0
    assert "leaves no room in the model's context of 2048; /reset begins anew" in outcome.err.splitlines()[0]
    assert len(outcome.err.splitlines()) == 2


# -- inspect, export, demo ---------------------------------------------------------------------------------------------


def test_inspect(lesonnx: Call, sample_bundle: Path) -> None:
    outcome = lesonnx("inspect", sample_bundle, "--verify")
    assert outcome.code == 0
    files = sum(path.is_file() for path in sample_bundle.rglob("*")) - 1
    for text in ("qwen3_moe", "8.1 M parameters", "segment_001", "experts int4, dense int8", f"all {files} files"):
        assert text in outcome.out


def test_inspect_json(lesonnx: Call, sample_bundle: Path) -> None:
    bundle = Bundle(sample_bundle)
    document = json.loads(lesonnx("inspect", sample_bundle, "--json").out)
    assert document["model"]["num_experts"] == 32
    assert document["expert_bytes"] == bundle.expert_bytes == sum(layer["bytes"] for layer in document["layers"])
    assert document["least_budget_bytes"] == bundle.least_budget_bytes
    assert document["token_demand_bytes"] == bundle.token_demand_bytes
    assert document["dense_bytes"] == sum(path.stat().st_size for path in (sample_bundle / "dense").iterdir())
    assert document["verified_files"] is None
    assert len(document["parts"]) == len(bundle.manifest.parts)
    verified = json.loads(lesonnx("inspect", sample_bundle, "--json", "--verify").out)["verified_files"]
    assert verified == sum(path.is_file() for path in sample_bundle.rglob("*")) - 1


def test_export_sums_up(lesonnx: Call, tmp_path: Path) -> None:
    outcome = lesonnx("export", fixture("qwen2_moe"), tmp_path / "bundle", "--workers", 1, "--prefill-chunk", 64)
    assert outcome.code == 0
    assert outcome.err == ""
    bundle = Bundle(tmp_path / "bundle")
    assert bundle.manifest.prefill_chunk_tokens == 64
    assert bundle.manifest.quantization.expert_bits == bundle.manifest.quantization.dense_bits == 4
    for text in ("dense parts", "experts", "int4, blocks of 32", "checkpoint", "used 32, 64"):
        assert text in outcome.out


@pytest.mark.parametrize(
    ("options", "expert_bits", "dense_bits"),
    [(["--bits", "32"], 32, 32), (["--bits", "2"], 2, 4), (["--bits", "8", "--dense-bits", "32"], 8, 32)],
)
def test_export_bits(lesonnx: Call, tmp_path: Path, options: list[str], expert_bits: int, dense_bits: int) -> None:
    assert lesonnx("export", fixture("mixtral"), tmp_path / "bundle", "--workers", 1, *options).code == 0
    quantization = Bundle(tmp_path / "bundle").manifest.quantization
    assert (quantization.expert_bits, quantization.dense_bits) == (expert_bits, dense_bits)


def test_demo(lesonnx: Call, tmp_path: Path) -> None:
    for _ in range(2):  # the second one replaces its own bundle
        outcome = lesonnx("demo", "--into", tmp_path / "demo", "--max-tokens", 4)
        assert outcome.code == 0
        assert outcome.out.count("4 generated") == 2
    bundle = Bundle(tmp_path / "demo/sample.bundle")
    budget = re.search(r"--expert-budget (\d+)", " ".join(outcome.out.split()))
    assert budget is not None
    assert bundle.least_budget_bytes <= int(budget[1]) < bundle.expert_bytes


def test_demo_replaces_nothing_but_a_bundle(lesonnx: Call, tmp_path: Path) -> None:
    (tmp_path / "sample.bundle").mkdir()
    (tmp_path / "sample.bundle/thesis.txt").write_text("precious")
    outcome = lesonnx("demo", "--into", tmp_path)
    assert outcome.code == 2
    assert "exists and is no bundle" in outcome.error
    assert (tmp_path / "sample.bundle/thesis.txt").read_text() == "precious"


def test_installed_as_a_program() -> None:
    program = Path(sys.executable).with_name("lesonnx")
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert shown.split()[-1] == package.__version__


def test_sample_is_package_data() -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json", "reference.npz"} <= {p.name for p in SAMPLE.iterdir()}
