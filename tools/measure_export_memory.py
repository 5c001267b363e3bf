"""Measure the memory and the speed of an export on a synthetic checkpoint of several gigabytes.

    python tools/measure_export_memory.py DIRECTORY

makes a bfloat16 Qwen3-MoE checkpoint of random weights in DIRECTORY (kept and used again unless ``--delete``), exports
it in a process of its own, adds up the memory of that process and all its workers several times a second, and compares
the peak with what the exporter promises: two layers in float32, the embedding in float32, and 0.5 GB. Exit code 1 above
that. Linux only: it reads /proc.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import ml_dtypes
import numpy as np

SPARE_BYTES = 500_000_000
SHARD_BYTES = 1_000_000_000
# Values that every tensor's data is cut from; large enough that no two experts look alike to a block search.
POOL_ELEMENTS = 1 << 24
# The export as a process of its own, saying on stdout how far it is.
CHILD = """
import json, sys, time
from pathlib import Path
from lesonnx_export.exporter import ExportOptions, export_bundle
began = time.perf_counter()
def progress(what, num_bytes):
    print(json.dumps([what, num_bytes, time.perf_counter() - began]), flush=True)
options = ExportOptions(**json.loads(sys.argv[3]))
export_bundle(Path(sys.argv[1]), Path(sys.argv[2]), options, progress=progress)
progress("done", 0)
"""


@dataclass(frozen=True)
class Shape:
    """The synthetic model; defaults are Qwen3-30B-A3B's proportions with fewer experts and layers."""

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128

    def config(self) -> dict[str, object]:
        """A config.json in transformers 4 spelling."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 4096,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    def layer_tensors(self, layer_idx: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of one layer's tensors."""
        prefix = f"model.layers.{layer_idx}."
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        yield f"{prefix}input_layernorm.weight", (self.hidden_size,)
        yield f"{prefix}self_attn.q_proj.weight", (queries, self.hidden_size)
        yield f"{prefix}self_attn.k_proj.weight", (keys, self.hidden_size)
        yield f"{prefix}self_attn.v_proj.weight", (keys, self.hidden_size)
        yield f"{prefix}self_attn.o_proj.weight", (self.hidden_size, queries)
        yield f"{prefix}self_attn.q_norm.weight", (self.head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (self.head_dim,)
        yield f"{prefix}post_attention_layernorm.weight", (self.hidden_size,)
        yield f"{prefix}mlp.gate.weight", (self.num_experts, self.hidden_size)
        for expert_idx in range(self.num_experts):
            expert = f"{prefix}mlp.experts.{expert_idx}."
            yield f"{expert}gate_proj.weight", (self.moe_intermediate_size, self.hidden_size)
            yield f"{expert}up_proj.weight", (self.moe_intermediate_size, self.hidden_size)
            yield f"{expert}down_proj.weight", (self.hidden_size, self.moe_intermediate_size)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for layer_idx in range(self.num_hidden_layers):
            yield from self.layer_tensors(layer_idx)
        yield "model.norm.weight", (self.hidden_size,)
        yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    @property
    def layer_bytes(self) -> int:
        """One layer in float32."""
        return sum(math.prod(shape) for _, shape in self.layer_tensors(0)) * 4

    @property
    def limit_bytes(self) -> int:
        """What the exporter promises to stay under."""
        return 2 * self.layer_bytes + self.vocab_size * self.hidden_size * 4 + SPARE_BYTES

    @property
    def checkpoint_bytes(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors()) * 2


def write_checkpoint(directory: Path, shape: Shape) -> None:
    """Write config, shards of about 1 GB and their index; each tensor is a stretch of one pool of random values."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pool = (rng.standard_normal(POOL_ELEMENTS, np.float32) * np.float32(0.02)).astype(ml_dtypes.bfloat16)
    weight_map: dict[str, str] = {}
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, dims in shape.tensors():
        num_bytes = math.prod(dims) * 2
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, dims))
        size += num_bytes
    for place, tensors in enumerate(shards):
        file_name = f"model-{place + 1:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, dict[str, object]] = {}
        end = 0
        for name, dims in tensors:
            begin, end = end, end + math.prod(dims) * 2
            header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [begin, end]}
            weight_map[name] = file_name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file_name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for _, dims in tensors:
                left = math.prod(dims)
                while left:
                    start = int(rng.integers(POOL_ELEMENTS // 2))
                    piece = pool[start : start + left]
                    file.write(piece.tobytes())
                    left -= len(piece)
    index = {"metadata": {"total_size": shape.checkpoint_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # The config comes last: a directory that has it is whole.
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=1), encoding="utf-8")


# -- memory ----------------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """What a tree of processes holds, in bytes; peaks of the sums. PSS counts a page that n processes share as 1/n."""

    pss_bytes: int = 0
    rss_bytes: int = 0
    anonymous_bytes: int = 0
    processes: int = 0
    samples: int = 0
    peak_at_s: float = 0.0
    own_peaks: dict[int, int] = field(default_factory=dict)

    def sample(self, root: int, elapsed_s: float) -> None:
        """Add up the tree under a process as it is, and keep the greatest."""
        pss = rss = anonymous = 0
        tree = process_tree(root)
        for pid in tree:
            values = fields_of(Path(f"/proc/{pid}/smaps_rollup"))
            pss += values.get("Pss", 0)
            rss += values.get("Rss", 0)
            anonymous += values.get("Anonymous", 0)
            own = fields_of(Path(f"/proc/{pid}/status")).get("VmHWM", 0)
            self.own_peaks[pid] = max(self.own_peaks.get(pid, 0), own)
        self.samples += 1
        self.processes = max(self.processes, len(tree))
        if pss > self.pss_bytes:
            self.pss_bytes, self.peak_at_s = pss, elapsed_s
        self.rss_bytes = max(self.rss_bytes, rss)
        self.anonymous_bytes = max(self.anonymous_bytes, anonymous)


def process_tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            # The name in parentheses may hold anything; the parent is the second field after it.
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def fields_of(path: Path) -> dict[str, int]:
    """The "Name: 123 kB" lines of a file of /proc, in bytes; nothing where the process is gone."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    values = {}
    for line in lines:
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            values[words[0].rstrip(":")] = int(words[1]) * 1024
    return values


# -- the command -----------------------------------------------------------------------------------------------------


def timeline(lines: list[str]) -> dict[str, tuple[int, float, float]]:
    """Each kind of work's bytes, begin and end in seconds, from what the export said of itself."""
    stages: dict[str, tuple[int, float, float]] = {}
    before = 0.0
    for line in lines:
        what, num_bytes, at_s = json.loads(line)
        total, begin, _ = stages.get(what, (0, before, before))
        stages[what] = (total + num_bytes, begin, at_s)
        before = at_s
    return stages


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--hidden-size", default=2048, show_default=True)
@click.option("--moe-intermediate-size", default=768, show_default=True)
@click.option("--experts", default=64, show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--vocab-size", default=151936, show_default=True)
@click.option("--bits", type=click.Choice(["2", "4", "8", "32"]), default="4", show_default=True)
@click.option("--workers", type=int, help="Processes that quantize; as many as there are cores by default.")
@click.option("--interval", default=0.1, show_default=True, help="Seconds between two samples.")
@click.option("--delete", is_flag=True, help="Remove the checkpoint at the end.")
def main(
    directory: Path,
    hidden_size: int,
    moe_intermediate_size: int,
    experts: int,
    layers: int,
    vocab_size: int,
    bits: str,
    workers: int | None,
    interval: float,
    delete: bool,
) -> None:
    """Make a synthetic checkpoint in DIRECTORY, export it, and compare the peak memory with the limit."""
    shape = Shape(hidden_size, moe_intermediate_size, experts, layers, vocab_size)
    checkpoint, bundle = directory / "checkpoint", directory / "bundle"
    config = checkpoint / "config.json"
    if not config.exists() or json.loads(config.read_text(encoding="utf-8")) != shape.config():
        shutil.rmtree(checkpoint, ignore_errors=True)
        began = time.perf_counter()
        write_checkpoint(checkpoint, shape)
        click.echo(f"checkpoint of {shape.checkpoint_bytes / 1e9:.2f} GB made in {time.perf_counter() - began:.0f} s")
    shutil.rmtree(bundle, ignore_errors=True)
    options: dict[str, int] = {"bits": int(bits)} | ({"num_workers": workers} if workers else {})
    memory = Memory()
    log = directory / "progress.jsonl"
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(checkpoint), str(bundle), json.dumps(options)], stdout=file
        )
        try:
            while child.poll() is None:
                memory.sample(child.pid, time.perf_counter() - began)
                time.sleep(interval)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    seconds = time.perf_counter() - began
    try:
        if child.returncode != 0:
            raise click.ClickException(f"the export ended with code {child.returncode}")
        report(shape, memory, timeline(log.read_text(encoding="utf-8").splitlines()), seconds, interval)
    finally:
        log.unlink()
        shutil.rmtree(bundle, ignore_errors=True)
        if delete:
            shutil.rmtree(checkpoint)
    sys.exit(0 if memory.pss_bytes <= shape.limit_bytes else 1)


def report(
    shape: Shape, memory: Memory, stages: dict[str, tuple[int, float, float]], seconds: float, interval: float
) -> None:
    """Print the figures."""
    source = shape.checkpoint_bytes
    experts = shape.num_hidden_layers * shape.num_experts * 3 * shape.hidden_size * shape.moe_intermediate_size * 2
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = usage.ru_utime + usage.ru_stime
    click.echo(f"exported {source / 1e9:.2f} GB in {seconds:.1f} s: {source / 1e6 / seconds:.1f} MB/s of checkpoint;")
    click.echo(f"  {cpu_s:.1f} s of processor time in all processes: {source / 1e6 / cpu_s:.1f} MB/s a core")
    for what, read_bytes in (("dense parts", source - experts), ("experts", experts), ("checksums", 0), ("done", 0)):
        if what in stages:
            written, begin, end = stages[what]
            took = max(end - begin, 1e-9)
            rate = f", reads {read_bytes / 1e6 / took:.1f} MB/s" if read_bytes else ""
            click.echo(f"  {what:12} {begin:7.1f} .. {end:7.1f} s  writes {written / 1e6:8.1f} MB{rate}")
    click.echo(f"peak PSS of up to {memory.processes} processes together: {memory.pss_bytes / 1e9:.2f} GB", nl=False)
    click.echo(f" at {memory.peak_at_s:.1f} s ({memory.samples} samples, one each {interval} s and what it takes)")
    click.echo(f"  of it anonymous at most {memory.anonymous_bytes / 1e9:.2f} GB; RSS {memory.rss_bytes / 1e9:.2f} GB;")
    own = sum(memory.own_peaks.values())
    click.echo(f"  sum of each process's own RSS peak, whenever it was: {own / 1e9:.2f} GB")
    embedding_bytes = shape.vocab_size * shape.hidden_size * 4
    verdict = "within" if memory.pss_bytes <= shape.limit_bytes else "OVER"
    click.echo(
        f"limit: 2 layers {2 * shape.layer_bytes / 1e9:.2f} + embedding {embedding_bytes / 1e9:.2f}"
        f" + 0.50 = {shape.limit_bytes / 1e9:.2f} GB: {verdict}"
    )


if __name__ == "__main__":
    main()
