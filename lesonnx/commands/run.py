"""``lesonnx run``: generate from one prompt, streaming the text."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lesonnx.commands.options import BUNDLE, load_options, make_generation_options, make_load_options, sampling_options
from lesonnx.errors import InputError
from lesonnx.memory import format_bytes, peak_bytes
from lesonnx.timeline import Timeline

if TYPE_CHECKING:
    from lesonnx.generate import GenerationReport
    from lesonnx.model import Model


@click.command()
@click.argument("bundle", type=BUNDLE)
@click.option("--prompt", help="The text to go on from; - reads standard input.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="A file that holds the prompt.")
@click.option("--prompt-ids", help="Token ids instead of text, parted by commas; needs no tokenizer.")
@click.option(
    "--image",
    "images",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A picture, for the prompt's placeholder or in front of it; may be given several times.",
)
@sampling_options
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@load_options
@click.option("--trace", type=click.Path(path_type=Path), help="Write a timeline that Perfetto opens to this file.")
@click.option(
    "--record-routing", type=click.Path(path_type=Path), help="Write which experts were chosen to this CSV file."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming text.")
def run(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_ids: str | None,
    images: tuple[Path, ...],
    ignore_eos: bool,
    trace: Path | None,
    record_routing: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Generate from a prompt with the bundle BUNDLE.

    The text goes on from the prompt as it is; `lesonnx chat` asks as the model's chat template says.
    """
    from lesonnx.model import load

    source = _prompt(prompt, prompt_file, prompt_ids)
    generation_options = make_generation_options(values, ignore_eos=ignore_eos)
    for path in (trace, record_routing):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: no such directory to write into")
        if path is not None and path.is_dir():
            raise InputError(f"{path}: is a directory, expected a file to write")
    timeline = Timeline() if trace else None
    with load(bundle, replace(make_load_options(values), timeline=timeline)) as model:
        for note in model.notes:
            print(f"note: {note}", file=sys.stderr)
        recorder = None
        if record_routing:
            from lesonnx.bench.recorder import RoutingRecorder

            recorder = model.runner.recorder = RoutingRecorder(model.bundle)
        generation = model.generate(source, generation_options, images)
        if as_json:
            text = generation.text()
            print(json.dumps(describe(model, generation.report, text)))
        else:
            for token in generation:
                print(token.text, end="", flush=True)
            print()
            print(summary(model, generation.report), file=sys.stderr)
        if about_drafts := drafts_note(model, generation.report):
            print(f"note: {about_drafts}", file=sys.stderr)
        if timeline and trace:
            timeline.save(trace)
        if recorder and record_routing:
            recorder.save(record_routing, generation.report.prompt_tokens)


def _prompt(prompt: str | None, prompt_file: Path | None, prompt_ids: str | None) -> str | list[int]:
    if sum(value is not None for value in (prompt, prompt_file, prompt_ids)) != 1:
        raise InputError("give exactly one of --prompt, --prompt-file and --prompt-ids")
    if prompt_ids is not None:
        try:
            return [int(item) for item in prompt_ids.split(",")]
        except ValueError:
            raise InputError(f"--prompt-ids {prompt_ids!r} is not a list of token ids parted by commas") from None
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{prompt_file}: not readable as text: {error}") from None
    if prompt == "-":
        if sys.stdin is None:
            raise InputError("--prompt - reads standard input, which is closed")
        return sys.stdin.read()
    return str(prompt)


def describe(model: Model, report: GenerationReport, text: str) -> dict[str, Any]:
    """What ``--json`` prints: text, tokens, times, bytes read, peak memory."""
    telemetry = model.telemetry
    return {
        "text": text,
        "tokens": report.token_ids,
        "prompt_tokens": report.prompt_tokens,
        "pictures": report.pictures,
        "image_tokens": report.image_tokens,
        "pictures_read": report.pictures_read,
        "vision_ms": round(report.vision_ms, 3),
        "finish_reason": report.finish_reason,
        "prefill_ms": round(report.prefill_ms, 3),
        "decode_ms": round(report.decode_ms, 3),
        "tokens_per_s": round(report.tokens_per_s, 3),
        **{name: round(value, 3) for name, value in asdict(telemetry).items()},
        "peak_memory_bytes": peak_bytes(),
        "expert_bytes": model.bundle.expert_bytes,
        "schedule": model.options.schedule,
        "engine": model.engine_name,
        "expert_budget_bytes": model.runner.loader.expert_budget_bytes,
        "accelerate": model.options.accelerate if twins_ran(model, report) else "off",
        "draft": model.options.draft,
        "drafts": None if report.drafts is None else asdict(report.drafts),
    }


def twins_ran(model: Model, report: GenerationReport) -> bool:
    """Whether a generation on an empty sequence had a step that twins are for: of their width, within their caches."""
    runner = model.runner
    if runner.layer_reader is not None:
        return False
    prompt, chunk = report.prompt_tokens, runner.prefill_chunk_tokens
    # Rows of steps, and tokens up to their ends: the first chunk, the last, and the first step behind the prompt.
    steps = [(min(prompt, chunk),) * 2, (prompt % chunk, prompt), (1 if len(report.token_ids) > 1 else 0, prompt + 1)]
    return any(rows in runner.twins.widths and end <= runner.twins.capacity_tokens for rows, end in steps)


def drafts_note(model: Model, report: GenerationReport) -> str | None:
    """What to know of drafts that were verified on a quantized bundle; None without."""
    manifest = model.bundle.manifest
    bits = {*manifest.expert_bits, manifest.quantization.dense_bits}
    if report.drafts is None or not report.drafts.passes or bits == {32}:
        return None
    return "drafts on a quantized bundle: some tokens may differ from those without drafts (docs/speculation.md)"


def _drafts(report: GenerationReport) -> str:
    """How many drafted tokens stayed, for the summary; nothing without a drafter."""
    drafts = report.drafts
    if drafts is None:
        return ""
    first = f", {drafts.accepted[0] / drafts.judged[0]:.0%} of the first ones" if drafts.judged[0] else ""
    return f"{sum(drafts.accepted)} of {sum(drafts.drafted)} drafted tokens accepted{first}; "


def _pictures(report: GenerationReport) -> str:
    """What the prompt's pictures took, for the summary, and how many were known already; nothing without."""
    parts = []
    if read := report.pictures_read:
        noun = "picture" if read == 1 else "pictures"
        parts.append(f"{read} {noun} of {report.image_tokens_read} tokens read in {report.vision_ms / 1e3:.2f} s")
    if known := report.pictures - read:
        parts.append(f"{known} known" if read else f"no picture read, {known} known")
    return ", ".join(parts) + "; " if parts else ""


def _prompt_tokens(report: GenerationReport) -> str:
    """The prompt's tokens and the time that those took which ran."""
    seconds = f"{report.prefill_ms / 1e3:.2f} s"
    if not report.reused_tokens:
        return f"{report.prompt_tokens} prompt tokens in {seconds}"
    ran = report.prompt_tokens - report.reused_tokens
    return f"{report.prompt_tokens} prompt tokens, {ran} run in {seconds} and {report.reused_tokens} reused"


def summary(model: Model, report: GenerationReport) -> str:
    """One line on how it went."""
    telemetry = model.telemetry
    twins = "twins ran; " if twins_ran(model, report) else ""
    return (
        f"[{_pictures(report)}{_prompt_tokens(report)}, {len(report.token_ids)} generated"
        f" at {report.tokens_per_s:.1f} tokens/s; {telemetry.loads} expert loads, {format_bytes(telemetry.read_bytes)}"
        f" read; {twins}{_drafts(report)}experts {format_bytes(model.bundle.expert_bytes)},"
        f" budget {format_bytes(model.runner.loader.expert_budget_bytes)}; process peak {format_bytes(peak_bytes())}]"
    )
