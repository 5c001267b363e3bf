"""Routing traces: which experts a model chose, token by token and layer by layer, read from a CSV file.

It knows the file's format and nothing of caches. Lines that begin with ``#`` hold facts (``# layer=3
expert_bytes=1024``, ``# model=NAME n_expert=128``); then comes a line of column names, of which ``phase`` (0 prefill,
1 decode), ``step``, ``layer``, ``slot`` and ``expert`` are needed and ``turn``, ``chosen`` and ``score`` are known;
then one line for each expert that was chosen. A line whose ``chosen`` is 0 (``route_trace v2``) is a near miss: an
expert that the router ranked next; it has slots after those of the chosen ones, and ``score``, what the router ranks
by. A file without the column ``chosen`` (v1) has no near misses.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import isfinite
from pathlib import Path

from lesonnx.errors import InputError
from lesonnx.manifest import page_ceil

# Far above any layer, expert, step or byte count: larger numbers are no trace.
MAX_NUMBER = 1 << 40
MAX_EXPERTS = 1 << 14
NEEDED = ("phase", "step", "layer", "slot", "expert")
CHOSEN, SCORE = "chosen", "score"
Row = list[int]
# A row's near misses: expert -> its score by that of the weakest expert chosen, 0 to 1.
NearMisses = dict[int, float]


@dataclass(frozen=True)
class Step:
    """One pass over the layers: for each layer its rows of experts (a layer may compute fewer rows than the step).

    ``near`` has an entry for each of these rows, empty where the trace holds no near misses.
    """

    is_decode: bool
    layers: list[list[Row]]
    near: list[list[NearMisses]]


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

    @property
    def has_near_misses(self) -> bool:
        return any(row for step in self.steps for rows in step.near for row in rows)

    def row_by_row(self) -> RoutingTrace:
        """The same rows, each a decode step of its own: a text that was read, taken as one that is written."""
        steps = []
        for step in self.steps:
            # A layer that computes fewer rows than the step computes its last ones.
            most = max(len(rows) for rows in step.layers)
            for back in range(most, 0, -1):
                layers = [rows[-back:][:1] if back <= len(rows) else [] for rows in step.layers]
                near = [rows[-back:][:1] if back <= len(rows) else [] for rows in step.near]
                steps.append(Step(True, layers, near))
        return replace(self, steps=steps)


@dataclass
class _ReadRow:
    """What a file says of one row and layer: an expert by slot, its score, and which of them were chosen."""

    slots: dict[int, int] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    chosen: set[int] = field(default_factory=set)

    def experts(self) -> Row:
        return [expert for _, expert in sorted(self.slots.items()) if expert in self.chosen]

    def near(self) -> NearMisses:
        missed = [expert for _, expert in sorted(self.slots.items()) if expert not in self.chosen]
        weakest = min(self.scores[expert] for expert in self.chosen)
        return {expert: min(1.0, max(0.0, self.scores[expert] / weakest)) if weakest > 0 else 0.0 for expert in missed}


def read_trace(path: Path) -> RoutingTrace:
    """Read and check a trace; the prefill rows of a turn make one step. InputError, one line, for what is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file: expected a routing trace in CSV") from None
    model, num_experts, bytes_of = _facts(path, lines)
    read: dict[tuple[int, int, int], dict[int, _ReadRow]] = {}
    for number, record, score in _records(path, lines):
        where = f"{path}, line {number}"
        phase, step, layer, slot, expert = (record[name] for name in NEEDED)
        if layer not in bytes_of:
            raise InputError(f"{where}: layer {layer} has no header line `# layer={layer} expert_bytes=...`")
        if phase not in (0, 1) or (num_experts and expert >= num_experts):
            raise InputError(f"{where}: expected phase 0 or 1 and an expert below {num_experts}, got {phase}, {expert}")
        row = read.setdefault((record.get("turn", 0), step, phase), {}).setdefault(layer, _ReadRow())
        if slot in row.slots or expert in row.scores:
            raise InputError(f"{where}: slot {slot} or expert {expert} comes twice in a row")
        if record.get(CHOSEN, 1) not in (0, 1):
            raise InputError(f"{where}: expected 0 or 1 in the column {CHOSEN}, got {record[CHOSEN]}")
        row.slots[slot] = expert
        row.scores[expert] = score
        if record.get(CHOSEN, 1):
            row.chosen.add(expert)
    for (_, step, _), by_layer in read.items():
        for layer, row in by_layer.items():
            if not row.chosen:
                raise InputError(f"{path}: step {step}, layer {layer} has near misses and no expert that was chosen")
    layers = sorted({layer for by_layer in read.values() for layer in by_layer})
    most = max((expert for by_layer in read.values() for row in by_layer.values() for expert in row.scores), default=0)
    steps = _steps(read, layers)
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


def _records(path: Path, lines: list[str]) -> Iterator[tuple[int, dict[str, int], float]]:
    """Every line below the column names: its number in the file, its integers, and its score (0 without one)."""
    body = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not body:
        raise InputError(f"{path} is empty: expected a routing trace in CSV")
    names = next(csv.reader([body[0][1]]))
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise InputError(f"{path}, line {body[0][0]}: expected the columns {', '.join(NEEDED)}; missing {missing[0]}")
    columns = [(name, names.index(name)) for name in (*NEEDED, "turn", CHOSEN) if name in names]
    score_at = names.index(SCORE) if SCORE in names else None
    for (number, _), fields in zip(body[1:], csv.reader(line for _, line in body[1:]), strict=True):
        try:
            record = {name: int(fields[place]) for name, place in columns}
            if min(record.values()) < 0 or max(record.values()) > MAX_NUMBER or record["expert"] >= MAX_EXPERTS:
                raise ValueError
            score = 0.0 if score_at is None else float(fields[score_at])
            if not isfinite(score):
                raise ValueError
        except (IndexError, ValueError, csv.Error):
            also = "" if score_at is None else f" and a number for {SCORE}"
            raise InputError(f"{path}, line {number}: expected whole numbers for {', '.join(NEEDED)}{also}") from None
        yield number, record, score


def _steps(read: dict[tuple[int, int, int], dict[int, _ReadRow]], layers: list[int]) -> list[Step]:
    """Rows in order of turn and step; neighbouring prefill rows of a turn together, decode rows one by one."""
    steps: list[Step] = []
    for (_, phase), keys in groupby(sorted(read), key=lambda key: (key[0], key[2])):
        rows = [read[key] for key in keys]
        for part in [[row] for row in rows] if phase else [rows]:
            by_layer = [[row[layer] for row in part if layer in row] for layer in layers]
            experts = [[row.experts() for row in rows] for rows in by_layer]
            steps.append(Step(bool(phase), experts, [[row.near() for row in rows] for rows in by_layer]))
    return steps
