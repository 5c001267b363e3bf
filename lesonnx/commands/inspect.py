"""``lesonnx inspect``: what a bundle holds, and whether it is whole."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from lesonnx.bundle import Bundle
from lesonnx.commands.options import BUNDLE, SIZE
from lesonnx.commands.vision_facts import count, vision_bits, vision_facts, vision_line
from lesonnx.manifest import AnyVision, Calibration, Drafter, Manifest, TokenizerFiles
from lesonnx.memory import format_bytes
from lesonnx.providers import CPU
from lesonnx.step_states import StepStates

if TYPE_CHECKING:
    from lesonnx.bench.load import LoadCost
    from lesonnx.usability import Report

# Loads of each kind of expert that ``--loads`` times on each engine.
LOADS_A_KIND = 16


@click.command()
@click.argument("bundle", type=BUNDLE, required=False)
@click.option("--verify", is_flag=True, help="Compare every file with checksums.json.")
@click.option("--loads", is_flag=True, help="Measure what loading an expert of each kind costs, on each engine.")
@click.option("--shape", metavar="CONFIG", help="Instead of a bundle: sizes from a config.json, or of a known model.")
@click.option("--bits", type=click.Choice(["32", "8", "4", "2"]), default="4", help="With --shape: bits of experts.")
@click.option("--dense-bits", type=click.Choice(["32", "8", "4"]), help="With --shape: bits of the rest, as exported.")
@click.option("--vision-bits", type=click.Choice(["32", "8", "4"]), help="With --shape: bits of what reads pictures.")
@click.option("--no-vision", is_flag=True, help="With --shape: without what reads pictures.")
@click.option("--memory", type=SIZE, help="With --shape: say whether a device with so much memory will run it.")
@click.option(
    "--target", type=click.Choice(["ios", "android"]), help="Say what CoreML or NNAPI would take of it, part by part."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(
    bundle: Path | None,
    verify: bool,
    loads: bool,
    shape: str | None,
    bits: str,
    dense_bits: str | None,
    vision_bits: str | None,
    no_vision: bool,
    memory: int | None,
    target: Literal["ios", "android"] | None,
    as_json: bool,
) -> None:
    """Show the model, parts, states and bytes of the bundle BUNDLE."""
    if shape is not None:
        if bundle is not None or verify or loads or target:
            raise click.UsageError("--shape needs no bundle: give one of both")
        from lesonnx_export.plan import ExportOptions
        from lesonnx_export.sizes import print_sizes

        options = ExportOptions(
            bits=int(bits),  # type: ignore[arg-type]
            dense_bits=int(dense_bits) if dense_bits else None,  # type: ignore[arg-type]
            vision_bits=int(vision_bits) if vision_bits else None,  # type: ignore[arg-type]
            vision=not no_vision,
        )
        print_sizes(shape, options, memory, as_json)
        return
    if bundle is None:
        raise click.UsageError("Missing argument 'BUNDLE' (or --shape).")
    for name, given in (
        ("--memory", memory),
        ("--dense-bits", dense_bits),
        ("--vision-bits", vision_bits),
        ("--no-vision", no_vision or None),
    ):
        if given is not None:
            raise click.UsageError(f"{name} goes with --shape")
    opened = Bundle(bundle)
    if target is not None:
        from lesonnx.usability import check_bundle

        _print_usability(check_bundle(opened, target), as_json)
        return
    verified = _verify(opened, quiet=as_json) if verify else None
    costs = _measure_loads(opened) if loads else None
    if as_json:
        print(json.dumps(describe(opened, verified, costs)))
        return
    console = Console()
    _print_facts(console, opened)
    _print_parts(console, opened)
    _print_layers(console, opened)
    _print_loads(console, opened, costs)
    if verified is not None:
        console.print(f"checksums: all {verified} files are as exported")


def _print_usability(report: Report, as_json: bool) -> None:
    """Parts that read alike but for their layer are one row; the verdict is the last line.

    First comes what the twins are for, where it is not what was checked.
    """
    from lesonnx.usability import CHECKED, WHY_NOT_EXPERTS

    if as_json:
        print(json.dumps(asdict(report)))
        return
    rows: dict[tuple[str, ...], list[str]] = {}
    for part in report.parts:
        name = re.sub(r"_\d{3}", "_<layer>", part.name)
        runs_on = part.provider.removesuffix("ExecutionProvider")
        breaks = ", ".join(blocker.rpartition(":")[2] for blocker in part.blockers if blocker != WHY_NOT_EXPERTS)
        key = (name, runs_on, f"{part.supported} of {part.nodes}", str(part.partitions), breaks)
        rows.setdefault(key, []).append(part.name)
    table = Table("part", "runs on", "taken", "pieces", title=f"What {report.checked} would take", title_justify="left")
    table.add_column("what breaks it", overflow="fold")
    for (name, *cells), names in rows.items():
        table.add_row(names[0] if len(names) == 1 else f"{name} ({len(names)})", *cells)
    console = Console()
    if unknown := sorted({part.provider for part in report.parts} - {CPU, CHECKED[report.target][0]}):
        shown = " and ".join(name.removesuffix("ExecutionProvider") for name in unknown)
        line = f"The bundle's twins are for {shown}, which this checker does not know"
        console.print(f"{line}: it says what {report.checked} would take.", soft_wrap=True, highlight=False)
    console.print(table)
    for line in (WHY_NOT_EXPERTS, report.verdict):
        console.print(line, soft_wrap=True, highlight=False)


def _verify(bundle: Bundle, quiet: bool) -> int:
    total = sum(path.stat().st_size for path in bundle.directory.rglob("*") if path.is_file())
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        task = progress.add_task("checking", total=total)
        return bundle.verify(lambda num_bytes: progress.advance(task, num_bytes))


def _measure_loads(bundle: Bundle) -> list[LoadCost]:
    from lesonnx.bench.load import measure

    return measure(bundle, LOADS_A_KIND * len(bundle.manifest.expert_kinds), num_threads=1)


def describe(bundle: Bundle, verified_files: int | None, loads: list[LoadCost] | None = None) -> dict[str, Any]:
    """What ``--json`` prints."""
    manifest = bundle.manifest
    losses = expected_losses(manifest)
    return {
        "model": manifest.model.model_dump(mode="json"),
        "num_parameters": num_parameters(manifest),
        "quantization": manifest.quantization.model_dump(mode="json"),
        "onnxruntime_at_least": manifest.onnxruntime_at_least,
        "chat": chat_facts(manifest.tokenizer),
        "drafter": drafter_facts(manifest.drafter),
        "vision": vision_facts(bundle),
        "prefill_chunk_tokens": manifest.prefill_chunk_tokens,
        "parts": [{"name": part.name, "role": part.role, "layer_idx": part.layer_idx} for part in manifest.parts],
        "states": [{"name": state.name, "kind": state.kind, "shape": state.shape} for state in manifest.states],
        "dense_bytes": dense_bytes(bundle),
        "twin_bytes": twin_bytes(bundle),
        "expert_bytes": bundle.expert_bytes,
        "layers": [
            {
                "layer_idx": layer.layer_idx,
                "num_experts": layer.num_experts,
                "bytes": bundle.pack_bytes(layer),
                "kind": manifest.expert_kinds[layer.kind].name,
                "shared_kind": None if layer.shared_kind is None else manifest.expert_kinds[layer.shared_kind].name,
                "expected_loss": losses.get(layer.layer_idx),
            }
            for layer in manifest.expert_layers
        ],
        "kinds": [
            {
                "name": kind.name,
                "cost_bytes": kind.cost_bytes,
                "matrices": {
                    name: {"bits": matrix.bits, "block_size": matrix.block_size}
                    for name, matrix in kind.matrices.items()
                },
            }
            for kind in manifest.expert_kinds
        ],
        "loads": None if loads is None else [asdict(cost) for cost in loads],
        "least_budget_bytes": bundle.least_budget_bytes,
        "token_demand_bytes": bundle.token_demand_bytes,
        "state_bytes_per_token": state_bytes_per_token(bundle),
        "fixed_state_bytes": StepStates(manifest).num_bytes,
        "skipped_tensors": manifest.skipped_tensors,
        "verified_files": verified_files,
    }


def num_parameters(manifest: Manifest) -> int:
    """Those of the model, with its eyes where they are in the bundle."""
    return manifest.model.num_parameters + (manifest.vision.num_parameters if manifest.vision else 0)


def expected_losses(manifest: Manifest) -> dict[int, float]:
    """What rounding a layer's experts is expected to cost, in nats of KL a token; empty without calibration."""
    calibration = manifest.quantization.calibration
    return {} if calibration is None else {layer.layer_idx: layer.expected_loss for layer in calibration.layers}


def chat_facts(files: TokenizerFiles | None) -> dict[str, Any]:
    """Whether there is a chat template, and the roles of the plain format; None where there is no such format."""
    chat_format = files.chat_format if files else None
    return {
        "template": bool(files and files.chat_template),
        "plain_roles": list(chat_format.messages) if chat_format else None,
    }


def drafter_facts(drafter: Drafter | None) -> dict[str, Any] | None:
    """What the bundle's own drafter is and what it keeps of a token; None where there is none."""
    if drafter is None:
        return None
    return {
        "kind": drafter.kind,
        "block_size": drafter.block_size,
        "target_layer_ids": drafter.target_layer_ids,
        "num_parameters": drafter.num_parameters,
        "cache_bytes_per_token": 4 * sum(drafter.cache_sizes.values()),
    }


def dense_bytes(bundle: Bundle) -> int:
    """Bytes of the dense parts: graphs and weights."""
    directories = {bundle.part_file(part).parent for part in bundle.manifest.parts}
    return sum(path.stat().st_size for directory in directories for path in directory.iterdir()) - twin_bytes(bundle)


def twin_bytes(bundle: Bundle) -> int:
    """Bytes of twins and what goes with them; 0 without."""
    twins = bundle.manifest.twins
    paths = {twins.data, *(model.path for model in (*twins.helpers, *twins.parts))} if twins else set()
    return sum(bundle.file(path).stat().st_size for path in paths)


def state_bytes_per_token(bundle: Bundle) -> int:
    """What one more token of context costs in attention caches."""
    total = 0
    for state in bundle.manifest.states:
        if "S" in state.shape:
            count = np.dtype(state.dtype).itemsize
            for size in state.shape:
                count *= 1 if isinstance(size, str) else size
            total += count
    return total


def _print_facts(console: Console, bundle: Bundle) -> None:
    manifest = bundle.manifest
    model, quantization = manifest.model, manifest.quantization
    fixed_bytes = StepStates(manifest).num_bytes
    fixed = f", and {format_bytes(fixed_bytes)} for states of fixed shape" if fixed_bytes else ""
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "bundle": f"{bundle.directory}  (format {manifest.format_version}, {manifest.producer})",
        "model": f"{model.model_type}, {count(num_parameters(manifest))} parameters{_of_eyes(manifest.vision)},"
        f" {count(model.num_active_parameters)} active a token",
        "layers": f"{model.num_hidden_layers}, of which {len(manifest.expert_layers)} with experts:"
        f" {model.num_experts} each, {model.num_experts_per_tok} a token",
        "context": f"{model.max_position_embeddings} tokens, {format_bytes(state_bytes_per_token(bundle))} a token"
        f" ({'int8' if quantization.kv_bits == 8 else f'float{quantization.kv_bits}'} caches){fixed}",
        "weights": f"experts {_bits(*manifest.expert_bits)}, dense {_bits(quantization.dense_bits)}{_eyes(bundle)}",
        "chat": _chat(manifest.tokenizer),
        "drafter": _drafter(manifest.drafter),
        "pictures": vision_line(bundle),
        "needs": f"ONNX Runtime {manifest.onnxruntime_at_least} or later",
        "dense parts": f"{format_bytes(dense_bytes(bundle))}{_twins(bundle)}",
        "experts": f"{format_bytes(bundle.expert_bytes)}; least budget {format_bytes(bundle.least_budget_bytes)},"
        f" one token's demand {format_bytes(bundle.token_demand_bytes)}",
    }
    if calibration := quantization.calibration:
        rows["calibrated"] = _calibrated(bundle, calibration)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    console.print(table)


def _of_eyes(vision: AnyVision | None) -> str:
    return "" if vision is None else f" ({count(vision.num_parameters)} of them eyes)"


def _eyes(bundle: Bundle) -> str:
    bits = vision_bits(bundle)
    return "" if bits is None else f", eyes {_bits(bits)}"


def _twins(bundle: Bundle) -> str:
    twins = bundle.manifest.twins
    if twins is None:
        return ""
    rows = ", ".join(map(str, sorted({twin.rows for twin in twins.parts})))
    shown = f"{format_bytes(twin_bytes(bundle))} in float{twins.float_bits}"
    return f"; twins {shown}, for steps of {rows} tokens over caches of {twins.capacity_tokens}"


def _calibrated(bundle: Bundle, calibration: Calibration) -> str:
    """One line on what experts were quantized for."""
    text = "random tokens" if calibration.text_sha256 is None else f"a text ({calibration.text_sha256[:12]}…)"
    share = bundle.expert_bytes / calibration.baseline_bytes
    asked = "" if calibration.target_size is None else f" (asked for: {calibration.target_size:g})"
    return f"on {calibration.num_tokens:,} tokens of {text}; {share:.3f} of the bytes of uniform 4 bits{asked}"


def _chat(files: TokenizerFiles | None) -> str:
    """One line on chat: who can have one, and of which messages."""
    facts = chat_facts(files)
    if not facts["template"]:
        return "no chat template: completion only"
    roles = facts["plain_roles"]
    if roles is None:
        return "by its template; no plain format, so hosts without Jinja offer completion"
    alone = "" if "assistant" in roles else ", one question at a time"
    return f"by its template; plain format of {', '.join(roles)} messages{alone}"


def _drafter(drafter: Drafter | None) -> str:
    """One line on the drafter that is in the bundle."""
    facts = drafter_facts(drafter)
    if facts is None:
        return "none in the bundle"
    return (
        f"{facts['kind']}, blocks of {facts['block_size']}, {count(facts['num_parameters'])} parameters,"
        f" {format_bytes(facts['cache_bytes_per_token'])} a token"
    )


def _print_parts(console: Console, bundle: Bundle) -> None:
    """Parts that take and give the same are one row: layers differ only in their number."""
    manifest = bundle.manifest
    rows: dict[tuple[str, str, str], list[str]] = {}
    for part in manifest.parts:
        states = [state for state in manifest.states if state.part == part.name]
        carried = {name for state in states for name in (state.input, state.output, *state.row_names)}
        takes = [value.name for value in part.inputs if value.name not in carried]
        gives = [value.name for value in part.outputs if value.name not in carried]
        row = (_numberless(takes), _numberless(gives), _numberless([state.name for state in states]))
        rows.setdefault(row, []).append(part.name)
    for part in manifest.vision.parts if manifest.vision else ():
        row = (_numberless([value.name for value in part.inputs]), _numberless([v.name for v in part.outputs]), "")
        rows[row] = [part.name]
    title = "Dense parts, and those that read pictures" if manifest.vision else "Dense parts"
    table = Table("part", "takes", "gives", "states", title=title, title_justify="left")
    for row, names in rows.items():
        shown = names[0] if len(names) == 1 else f"{names[0]} … {names[-1].rpartition('_')[2]} ({len(names)})"
        table.add_row(shown, *row)
    console.print(table)


def _numberless(names: list[str]) -> str:
    """Names in a row, layer numbers replaced, so that the same value of two layers reads alike."""
    return ", ".join(dict.fromkeys(re.sub(r"_\d+$", "_<layer>", name) for name in names))


def _print_layers(console: Console, bundle: Bundle) -> None:
    losses = expected_losses(bundle.manifest)
    table = Table("layer", "experts", "each", "bits (block)", "shared", "pack", title="Experts", title_justify="left")
    if losses:
        table.add_column("expected loss", justify="right")
    kinds = bundle.manifest.expert_kinds
    for layer in bundle.manifest.expert_layers:
        kind = kinds[layer.kind]
        shared = ""
        if layer.shared_kind is not None:
            shared_kind = kinds[layer.shared_kind]
            shared = f"{format_bytes(shared_kind.cost_bytes)}, {shared_kind.precision}"
        table.add_row(
            str(layer.layer_idx),
            str(layer.num_experts),
            format_bytes(kind.cost_bytes),
            kind.precision,
            shared,
            format_bytes(bundle.pack_bytes(layer)),
            *([f"{losses[layer.layer_idx]:.2g}"] if losses else []),
        )
    console.print(table)


def _print_loads(console: Console, bundle: Bundle, costs: list[LoadCost] | None) -> None:
    """What a load costs, where it was measured; otherwise, of mixed precision, how to find out."""
    if costs is None:
        if len(bundle.manifest.expert_kinds) > 1:
            console.print(
                "A load costs its bytes with the kernel engine; sessions pack the weights too, by bits and blocks:"
                " --loads measures both.",
                soft_wrap=True,
            )
        return
    table = Table(
        "bits (block)", "engine", "load, ms", "processor, ms", "read", title="Loads of one expert, with its first run"
    )
    table.title_justify = "left"
    for cost in costs:
        row = (cost.precision, cost.engine, f"{cost.wall_ms:.2f}", f"{cost.cpu_ms:.2f}", format_bytes(cost.read_bytes))
        table.add_row(*row)
    console.print(table)


def _bits(*bits: int) -> str:
    return "float32" if bits == (32,) else f"int{'/'.join(map(str, bits))}"
