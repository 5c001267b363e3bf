"""Routing traces: which experts a model chose, token by token and layer by layer, read from a CSV file.

It knows the file's format and nothing of caches. Lines that begin with ``#`` hold facts (``# layer=3
expert_bytes=1024``, ``# model=NAME n_expert=128``); then comes a line of column names, of which ``phase`` (0 prefill,
1 decode), ``step``, ``layer``, ``slot`` and ``expert`` are needed and ``turn`` is known; then one line for each expert
that was chosen.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lesonnx.errors import InputError
from lesonnx.manifest import page_ceil

# Far above any layer, expert, step or byte count: larger numbers are no trace.
MAX_NUMBER = 1 << 40
MAX_EXPERTS = 1 << 14
NEEDED = ("phase", "step", "layer", "slot", "expert")
Row = list[int]


@dataclass(frozen=True)
class Step:
    """One pass over the layers: for each layer its rows of experts (a layer may compute fewer rows than the step)."""

    is_decode: bool
    layers: list[list[Row]]


@dataclass(frozen=True)
class RoutingTrace:
    """A whole trace. ``cost_bytes`` of an expert by layer, in whole pages; layers are numbered in their order."""

    model: str
    num_experts: int
    num_experts_per_tok: list[int]
    cost_bytes: list[int]
    steps: list[Step]

    @property
    def token_bytes(self) -> int:
        """One token's demand: the sum over the layers of what one row needs."""
        return sum(k * cost for k, cost in zip(self.num_experts_per_tok, self.cost_bytes, strict=True))


def read_trace(path: Path) -> RoutingTrace:
    """Read and check a trace; the prefill rows of a turn make one step. InputError, one line, for what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file: expected a routing trace in CSV") from None
    model, num_experts, bytes_of = _facts(path, lines)
    chosen: dict[tuple[int, int, int], dict[int, dict[int, int]]] = {}
    for number, record in _records(path, lines):
        where = f"{path}, line {number}"
        phase, step, layer, slot, expert = (record[name] for name in NEEDED)
        if layer not in bytes_of:
            raise InputError(f"{where}: layer {layer} has no header line `# layer={layer} expert_bytes=...`")
        if phase not in (0, 1) or (num_experts and expert >= num_experts):
            raise InputError(f"{where}: expected phase 0 or 1 and an expert below {num_experts}, got {phase}, {expert}")
        row = chosen.setdefault((record.get("turn", 0), step, phase), {}).setdefault(layer, {})
        if slot in row or expert in row.values():
            raise InputError(f"{where}: slot {slot} or expert {expert} comes twice in a row")
        row[slot] = expert
    layers = sorted({layer for row in chosen.values() for layer in row})
    most = max((expert for by in chosen.values() for row in by.values() for expert in row.values()), default=0)
    steps = _steps(chosen, layers)
    if not any(step.is_decode for step in steps):
        raise InputError(f"{path} has no decode steps (phase 1)")
    per_tok = [max(len(row) for step in steps for row in step.layers[place]) for place in range(len(layers))]
    costs = [page_ceil(bytes_of[layer]) for layer in layers]
    return RoutingTrace(model, num_experts or most + 1, per_tok, costs, steps)


def _facts(path: Path, lines: list[str]) -> tuple[str, int, dict[int, int]]:
    model, num_experts, bytes_of = path.stem, 0, {}
    for number, line in enumerate(lines, 1):
        if not line.startswith("#"):
            continue
        facts = dict(word.split("=", 1) for word in line[1:].split() if "=" in word)
        try:
            if "layer" in facts:
                bytes_of[int(facts["layer"])] = size = int(facts["expert_bytes"])
                if not 0 < size <= MAX_NUMBER:
                    raise ValueError
            num_experts = int(facts.get("n_expert", num_experts))
            if not 0 <= num_experts <= MAX_EXPERTS:
                raise ValueError
        except (KeyError, ValueError):
            raise InputError(f"{path}, line {number}: expected `# layer=N expert_bytes=M`, got {line[:80]!r}") from None
        model = facts.get("model", model)
    return model, num_experts, bytes_of


def _records(path: Path, lines: list[str]) -> Iterator[tuple[int, dict[str, int]]]:
    """Every line below the column names, as integers, with its number in the file."""
    body = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not body:
        raise InputError(f"{path} is empty: expected a routing trace in CSV")
    names = next(csv.reader([body[0][1]]))
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise InputError(f"{path}, line {body[0][0]}: expected the columns {', '.join(NEEDED)}; missing {missing[0]}")
    columns = [(name, names.index(name)) for name in (*NEEDED, "turn") if name in names]
    for (number, _), fields in zip(body[1:], csv.reader(line for _, line in body[1:]), strict=True):
        try:
            record = {name: int(fields[place]) for name, place in columns}
            if min(record.values()) < 0 or max(record.values()) > MAX_NUMBER or record["expert"] >= MAX_EXPERTS:
                raise ValueError
        except (IndexError, ValueError, csv.Error):
            raise InputError(f"{path}, line {number}: expected whole numbers for {', '.join(NEEDED)}") from None
        yield number, record


def _steps(chosen: dict[tuple[int, int, int], dict[int, dict[int, int]]], layers: list[int]) -> list[Step]:
    """Rows in order of turn and step; neighbouring prefill rows of a turn together, decode rows one by one."""
    steps: list[Step] = []
    for (_, phase), keys in groupby(sorted(chosen), key=lambda key: (key[0], key[2])):
        rows = [{layer: [e for _, e in sorted(row.items())] for layer, row in chosen[key].items()} for key in keys]
        for part in [[row] for row in rows] if phase else [rows]:
            steps.append(Step(bool(phase), [[row[layer] for row in part if layer in row] for layer in layers]))
    return steps
