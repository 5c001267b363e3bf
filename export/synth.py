"""``lesonnx bench synth``: a bundle of a real model's shape with random weights, written fast and without a checkpoint.

Its words mean nothing; its sizes, its arithmetic and its reads are the real model's, which is what speed depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lesonnx.errors import InputError
from lesonnx_export.architectures import make_decoder
from lesonnx_export.checkpoint import Checkpoint, Float32, TensorInfo, Weights
from lesonnx_export.cli import print_summary
from lesonnx_export.compensate import quantize_expert
from lesonnx_export.config import Config
from lesonnx_export.contract import make_manifest
from lesonnx_export.expert import PACK_NAME, ExpertPrecision, MatrixPrecision, expert_bytes
from lesonnx_export.exporter import finish, quantize_kv, write_all_twins, write_stages
from lesonnx_export.journal import Journal
from lesonnx_export.pack import LayerPlan, layer_directory, write_models
from lesonnx_export.parts import write_parts
from lesonnx_export.plan import ExportOptions, ExportPlan, LayerPrecision, make_plan
from lesonnx_export.shapes import SHAPES
from lesonnx_export.sources import read_expert

# Different experts in a pack; more would only cost time.
DISTINCT_EXPERTS = 8


class SyntheticWeights(Weights):
    """Weights of whatever shape is asked for: ones for norms, normal numbers scaled by the fan-in for the rest."""

    def __init__(self, checkpoint: Checkpoint, rehearsal: bool, tied: bool) -> None:
        super().__init__(checkpoint, rehearsal)
        self._tied = tied

    def __contains__(self, name: str) -> bool:
        return name == "lm_head.weight" and not self._tied

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        self.checkpoint.tensors[name] = TensorInfo(Path(name), name, shape, "BF16")
        self.used.add(name)

    def __call__(self, name: str, *shape: int) -> Float32:
        self.expect(name, shape)
        return self._zeros(shape) if self.rehearsal else self._random(name, shape)

    def item(self, name: str, index: int, *shape: int) -> Float32:
        self.expect(name, shape)
        return self._zeros(shape[1:]) if self.rehearsal else self._random(f"{name}[{index}]", shape[1:])

    def chunks(self, name: str, rows_at_once: int, *shape: int) -> Iterator[Float32]:
        self.expect(name, shape)
        for start in range(0, shape[0], rows_at_once):
            piece = (min(rows_at_once, shape[0] - start), *shape[1:])
            yield self._zeros(piece) if self.rehearsal else self._random(f"{name}[{start}]", piece)

    def same(self, one: str, other: str, rows_at_once: int = 256) -> bool:
        return self._tied

    @staticmethod
    def _random(name: str, shape: tuple[int, ...]) -> Float32:
        if "norm" in name:
            return np.ones(shape, np.float32)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        values *= np.float32(shape[-1] ** -0.5)
        return values


class SyntheticCheckpoint(Checkpoint):
    """A checkpoint that is only a configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.directory = Path()
        self.config = config
        self.tensors = {}


def with_low_layers(options: ExportOptions, config: dict[str, Any], low_layers: int) -> ExportOptions:
    """Mixed precision as calibration tends to choose it: in so many of the MoE layers, spread evenly, gate and up have
    2 bits and down 4; the others have what ``options`` say. InputError for more layers than there are.
    """
    num_layers = len(make_decoder(Config(config)).moe_layers)
    if low_layers > num_layers:
        raise InputError(f"{low_layers} layers of low precision, the model has {num_layers} with experts")
    low, down = MatrixPrecision(2, options.block_size), MatrixPrecision(4, options.block_size)
    plain = LayerPrecision.uniform(options.bits, options.block_size)
    mixed = LayerPrecision(ExpertPrecision(low, low, down), plain.shared)
    # Of any stretch of layers a share of low_layers / num_layers, the first ones last.
    is_low = [(place + 1) * low_layers // num_layers > place * low_layers // num_layers for place in range(num_layers)]
    return replace(options, precisions=tuple(mixed if low else plain for low in is_low))


def changed_shape(shape: str, changes: dict[str, int]) -> dict[str, Any]:
    """The configuration of a known shape, entries of its text model replaced."""
    config = SHAPES[shape]
    if "text_config" in config:
        return config | {"text_config": config["text_config"] | changes}
    return config | changes


def write_synthetic(
    shape: str,
    bundle: Path,
    options: ExportOptions,
    changes: dict[str, int],
    console: Console | None = None,
    low_layers: int = 0,
) -> None:
    """Write a bundle of a known shape; ``changes`` replace entries of its configuration. InputError as for export.

    ``low_layers``: see `with_low_layers`.
    """
    if shape not in SHAPES:
        raise InputError(f"shape {shape!r} is not known, expected one of {', '.join(SHAPES)}")
    if bundle.exists():
        raise InputError(f"{bundle}: already exists; remove it or choose another name")
    config = changed_shape(shape, changes)
    if low_layers:
        options = with_low_layers(options, config, low_layers)
    checkpoint = SyntheticCheckpoint(config)
    tied = bool(Config(config).values.get("tie_word_embeddings", False))
    plan = make_plan(checkpoint, options, SyntheticWeights(checkpoint, rehearsal=True, tied=tied))
    bundle.mkdir(parents=True)
    journal = Journal.create(bundle, "synthetic")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = console or Console()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("dense parts", total=plan.total_bytes)

        def progress(what: str, num_bytes: int) -> None:
            bar.update(task, description=what, advance=num_bytes)

        weights = SyntheticWeights(checkpoint, rehearsal=False, tied=tied)
        dense = write_parts(plan, options, bundle, journal, progress, weights)
        for layer in plan.layers:
            progress("experts", _write_layer(plan, layer, weights, bundle))
        write_stages(plan, bundle)
        twins = write_all_twins(plan, options, bundle, progress, weights)
        manifest = make_manifest(plan, options, dense, None, twins=twins)
        if options.kv_bits == 8:
            manifest = quantize_kv(bundle, journal, progress, manifest)
        manifest = manifest.model_copy(update={"producer": f"{manifest.producer}, synthetic {shape}: random weights"})
        note = "random weights: for measuring speed and memory, not for text"
        report = finish(plan, bundle, progress, manifest, [note])
        journal.remove()
    print_summary(console, report)


def _write_layer(plan: ExportPlan, layer: LayerPlan, weights: SyntheticWeights, bundle: Path) -> int:
    """A pack of a few different experts over and over; gives its bytes."""
    directory = layer_directory(bundle, layer.layer_idx)
    directory.mkdir(parents=True)
    blocks = {}
    with (directory / PACK_NAME).open("wb") as file:
        for expert_idx in layer.places:
            place = expert_idx if expert_idx is None else expert_idx % DISTINCT_EXPERTS
            if place not in blocks:
                tensors = read_expert(plan.architecture, weights, 0, place)
                kind = layer.kind_of(expert_idx)
                quantized = quantize_expert(kind, tensors, None, place, f"expert {place}")
                blocks[place] = expert_bytes(kind, tensors, quantized.matrices).data
            file.write(blocks[place])
    write_models(bundle, layer)
    return layer.pack_bytes


@click.command()
@click.argument("shape", type=click.Choice(sorted(SHAPES)))
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--bits", type=click.Choice(["32", "8", "4", "2"]), default="4", show_default=True, help="Expert bits.")
@click.option("--dense-bits", type=click.Choice(["32", "8", "4"]), default="4", show_default=True, help="Dense bits.")
@click.option("--kv-bits", type=click.Choice(["32", "16", "8"]), default="32", show_default=True, help="Cache bits.")
@click.option(
    "--operators",
    type=click.Choice(["native", "portable"]),
    default="native",
    show_default=True,
    help="Of recurrences.",
)
@click.option("--accelerate", type=click.Choice(["dense"]), help="With twins of dense parts.")
@click.option("--num-experts-per-tok", type=click.IntRange(1), help="Other than the model's own.")
@click.option("--num-hidden-layers", type=click.IntRange(1), help="Other than the model's own.")
@click.option(
    "--low-layers", type=click.IntRange(1), help="Mixed precision: in so many layers gate and up have 2 bits, down 4."
)
def synth(
    shape: str,
    bundle: Path,
    bits: str,
    dense_bits: str,
    kv_bits: str,
    operators: str,
    accelerate: str | None,
    num_experts_per_tok: int | None,
    num_hidden_layers: int | None,
    low_layers: int | None,
) -> None:
    """Write a bundle of a real model's SHAPE with random weights to BUNDLE."""
    options = ExportOptions(
        bits=int(bits),  # type: ignore[arg-type]
        dense_bits=int(dense_bits),  # type: ignore[arg-type]
        kv_bits=int(kv_bits),  # type: ignore[arg-type]
        operators=operators,  # type: ignore[arg-type]
        accelerate=accelerate,  # type: ignore[arg-type]
        vision=False,
    )
    wanted = {"num_experts_per_tok": num_experts_per_tok, "num_hidden_layers": num_hidden_layers}
    changes = {key: value for key, value in wanted.items() if value is not None}
    write_synthetic(shape, bundle, options, changes, low_layers=low_layers or 0)
