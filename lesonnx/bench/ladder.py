"""``lesonnx bench ladder``: the technique ladder, each row adding one, from plain ONNX Runtime to the full system.

It plans rows, runs each in a process of its own, checks that all generate the same, and sets them against the roofline.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from lesonnx.bench.busy import busy_cores
from lesonnx.bench.drafted_row import ORACLE
from lesonnx.bench.flash import measure_flash
from lesonnx.bench.ladder_result import Ladder, Row
from lesonnx.bench.ladder_table import print_ladder
from lesonnx.bench.row import PLAIN, TENSOR_MAJOR, RowSpec
from lesonnx.bench.tensor_major import room_problem, write_copy
from lesonnx.bench.trace import read_trace
from lesonnx.bench.turns import turns_of
from lesonnx.bundle import Bundle
from lesonnx.commands.options import BUNDLE, SIZE
from lesonnx.errors import InputError, LesonnxError
from lesonnx.limits import DEFAULT_LOADERS, MAX_LOADERS, MAX_THREADS
from lesonnx.memory import format_bytes

DEFAULT_PROMPT = "The list.append() method"
# Without --expert-budget: this share of all experts, or one token's demand if that is more.
BUDGET_SHARE = 4
HIT_WARMUP_TOKENS, HIT_TOKENS = 3, 8


@dataclass(frozen=True)
class Technique:
    """A row: what ``--rows`` calls it, what the table calls it, and the switches it runs with."""

    name: str
    title: str
    engine: str
    schedule: str
    parallel: bool = True
    policy: str | None = None
    compute_first: bool | None = None
    lookahead: bool | None = None
    governor: bool = False
    is_mixed: bool = False
    draft: str | None = None


TECHNIQUES = (
    Technique("plain", "plain ORT: a session per expert by path, serial", PLAIN, "on-demand", parallel=False),
    Technique("serial", "on-demand serial, tensor-major", TENSOR_MAJOR, "on-demand", parallel=False),
    Technique("parallel", "+ parallel loads, tensor-major", TENSOR_MAJOR, "on-demand"),
    Technique("serial-packs", "on-demand serial, contiguous packs", "auto", "on-demand", parallel=False),
    Technique("packs", "+ parallel loads, contiguous packs", "auto", "on-demand"),
    Technique("cache", "+ cache (lru)", "auto", "cache"),
    Technique("les", "+ les eviction", "auto", "les", policy="les", compute_first=False, lookahead=False),
    Technique("compute-first", "+ compute-first", "auto", "les", compute_first=True, lookahead=False),
    Technique("lookahead", "+ lookahead", "auto", "les", compute_first=True, lookahead=True),
    Technique("mixed", "+ mixed precision", "auto", "les", compute_first=True, lookahead=True, is_mixed=True),
    Technique("governed", "+ governor", "auto", "les", compute_first=True, lookahead=True, governor=True),
    Technique("ngram", "+ speculative (ngram)", "auto", "les", governor=True, draft="ngram"),
    Technique("dspark", "+ speculative (dspark)", "auto", "les", governor=True, draft="dspark"),
    Technique(ORACLE, "+ speculative (--acceptance)", "auto", "les", governor=True, draft=ORACLE),
)
BY_NAME = {technique.name: technique for technique in TECHNIQUES}
# Serial on-demand with the loader of the rows above it: what the other kernel rows are measured against.
SAME_LOADER = "serial-packs"
AGAIN = "again, for drift: "


@click.command()
@click.argument("bundle", type=BUNDLE)
@click.option("--expert-budget", type=SIZE, help="Most bytes of experts in memory.  [default: a quarter of them]")
@click.option("--tokens", type=click.IntRange(1), default=24, show_default=True, help="Tokens measured a row.")
@click.option("--warmup", type=click.IntRange(0), default=16, show_default=True, help="Tokens before them.")
@click.option("--prompt", help="The text to go on from, where the bundle has a tokenizer.")
@click.option("--routing", type=BUNDLE, help="Take required experts from this routing trace (random weights).")
@click.option("--recall", type=click.FloatRange(0, 1), default=0.886, show_default=True, help="Of its predictions.")
@click.option(
    "--mixed", type=BUNDLE, help="The same model in mixed precision: the row after the lookahead, and those behind it."
)
@click.option(
    "--acceptance", type=click.FloatRange(0, 1), default=0.7, show_default=True, help="Of drafts, with --routing."
)
@click.option("--rows", "names", help=f"Only these, in this order, parted by commas: {', '.join(BY_NAME)}.")
@click.option(
    "--loaders", type=click.IntRange(1, MAX_LOADERS), default=DEFAULT_LOADERS, show_default=True, help="Reads at once."
)
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="Threads that compute.  [default: all cores]")
@click.option(
    "--busy", type=click.IntRange(0, MAX_THREADS), default=0, show_default=True, help="Processes that spin beside it."
)
@click.option(
    "--temp", type=BUNDLE, help="Directory for a tensor-major copy, as large as all experts, gone afterwards."
)
@click.option("--plot", type=BUNDLE, help="Draw the ladder to this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def ladder(
    bundle: Path,
    expert_budget: int | None,
    tokens: int,
    warmup: int,
    prompt: str | None,
    routing: Path | None,
    recall: float,
    mixed: Path | None,
    acceptance: float,
    names: str | None,
    loaders: int,
    threads: int | None,
    busy: int,
    temp: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure BUNDLE technique by technique, from plain ONNX Runtime to the full system."""
    if plot is not None:
        from lesonnx.bench.plot import check_plot

        check_plot(plot)
    opened = Bundle(bundle)
    budget = expert_budget or max(opened.expert_bytes // BUDGET_SHARE, opened.token_demand_bytes)
    base = RowSpec(
        bundle=str(bundle),
        engine="auto",
        schedule="les",
        num_loaders=loaders,
        policy=None,
        compute_first=None,
        lookahead=None,
        expert_budget_bytes=budget,
        prompt_ids=prompt_ids(opened, prompt),
        warmup_tokens=warmup,
        tokens=tokens,
        routing=None if routing is None else trace_steps(routing, opened).tolist(),
        recall=recall,
        acceptance=acceptance,
        num_threads=threads,
    )
    room = opened.manifest.model.max_position_embeddings - len(base.prompt_ids)
    if max(warmup + tokens, HIT_WARMUP_TOKENS + 2 * HIT_TOKENS) > room:
        raise InputError(f"{warmup} + {tokens} tokens do not fit the model's context, {room} are left")
    console = Console(stderr=True)

    def progress(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    techniques = chosen(names, mixed is not None)
    if mixed is not None:
        check_same_model(opened, Bundle(mixed))
    with busy_cores(busy):
        here = drafting_here(opened, techniques, names, routing)
        found = run_ladder(opened, base, here, temp, progress, mixed)
    found.busy = busy
    labels = [] if routing is None else [f"routing from {routing.name}, random weights"]
    if busy:
        labels.append(f"beside {busy} spinning processes")
    found.label = "; ".join(labels) or None
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        print_ladder(found)
    if plot is not None:
        from lesonnx.bench.plot import plot_ladder

        plot_ladder(found, plot)


def chosen(names: str | None, has_mixed: bool = False) -> list[Technique]:
    """The techniques of ``--rows``; the same one may stand there several times (A, B, A). All without it."""
    if names is None:
        return keep_mixed([technique for technique in TECHNIQUES if has_mixed or not technique.is_mixed])
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in BY_NAME:
            raise InputError(f"--rows {name!r} is not one of {', '.join(BY_NAME)}")
        if BY_NAME[name].is_mixed and not has_mixed:
            raise InputError(f"--rows {name!r} needs a bundle: --mixed")
    return keep_mixed([BY_NAME[name] for name in wanted])


def keep_mixed(techniques: Sequence[Technique]) -> list[Technique]:
    """Every row adds one: those that the table has behind mixed precision keep it, where it comes before them."""
    kept, is_mixed = [], False
    for technique in techniques:
        is_mixed = is_mixed or technique.is_mixed
        kept.append(replace(technique, is_mixed=True) if is_mixed and technique.governor else technique)
    return kept


def check_same_model(bundle: Bundle, mixed: Bundle) -> None:
    """InputError where two bundles cannot be of one model."""
    ours, theirs = bundle.manifest, mixed.manifest
    # How many bytes its parameters take is what may differ.
    if ours.model != theirs.model or [e.layer_idx for e in ours.expert_layers] != [
        e.layer_idx for e in theirs.expert_layers
    ]:
        raise InputError(f"--mixed {mixed.directory}: is of another model than {bundle.directory}")


def drafting_here(
    bundle: Bundle, techniques: list[Technique], names: str | None, routing: Path | None
) -> list[Technique]:
    """Without the rows whose drafter has nothing to go by here; InputError where ``names`` asked for one.

    With a trace only an oracle can be right, without one only a drafter that knows the text or the model.
    """
    has_drafter = bundle.manifest.drafter is not None
    here = {
        None: True,
        "ngram": routing is None,
        "dspark": routing is None and has_drafter,
        ORACLE: routing is not None,
    }
    for technique in techniques if names is not None else ():
        if not here[technique.draft]:
            needed = "a bundle with its drafter" if technique.draft == "dspark" and routing is None else "no --routing"
            raise InputError(f"--rows {technique.name} needs {'--routing' if technique.draft == ORACLE else needed}")
    return [technique for technique in techniques if here[technique.draft]]


def prompt_ids(bundle: Bundle, prompt: str | None) -> list[int]:
    """The prompt's ids; one token where the bundle has no tokenizer."""
    files = bundle.manifest.tokenizer
    if files is None or files.json_path is None:
        if prompt is not None:
            raise InputError(f"{bundle.directory}: has no tokenizer for --prompt; leave it out")
        first = bundle.manifest.model.bos_token_id
        return [first if first is not None else 0]
    from lesonnx.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(bundle.file(files.json_path))
    ids = tokenizer.encode(DEFAULT_PROMPT if prompt is None else prompt, add_special_tokens=True)
    if not ids:
        raise InputError("--prompt is empty: at least one token is needed")
    return ids


def trace_steps(path: Path, bundle: Bundle) -> NDArray[np.int64]:
    """The decode steps [steps, layers, k] of a trace; InputError where they do not fit the bundle."""
    trace = read_trace(path)
    model = bundle.manifest.model
    per_tok = [layer.num_experts_per_tok for layer in bundle.manifest.expert_layers]
    if trace.num_experts > model.num_experts or trace.num_experts_per_tok != per_tok:
        theirs = f"{len(trace.num_experts_per_tok)} layers, {max(trace.num_experts_per_tok)} of {trace.num_experts}"
        raise InputError(
            f"{path}: is of {theirs} experts a token; {bundle.directory} has {len(per_tok)} layers, {max(per_tok)} of"
            f" {model.num_experts}"
        )
    if len(set(per_tok)) > 1:
        raise InputError(f"{bundle.directory}: layers differ in experts a token, which --routing does not take")
    return np.array([[rows[0] for rows in step.layers] for step in trace.steps if step.is_decode], np.int64)


# -- running -----------------------------------------------------------------------------------------------------------


def run_ladder(
    bundle: Bundle,
    base: RowSpec,
    techniques: Sequence[Technique],
    temp: Path | None,
    progress: Callable[[str], None] = lambda text: None,
    mixed: Path | None = None,
) -> Ladder:
    """Run the rows one after another. LesonnxError where two rows of one bundle and engine differ in a bit."""
    notes: list[str] = []
    techniques = list(techniques)
    with ExitStack() as stack:
        copy: Path | None = None
        if any(technique.engine == TENSOR_MAJOR for technique in techniques):
            problem = "no --temp was given" if temp is None else room_problem(bundle, temp)
            if problem is None and temp is not None:
                name = stack.enter_context(tempfile.TemporaryDirectory(prefix="lesonnx-ladder-", dir=temp))
                copy = Path(name)
                progress(f"writing the tensor-major copy, {format_bytes(bundle.expert_bytes)}")
                write_copy(bundle, copy)
            else:
                techniques = [technique for technique in techniques if technique.engine != TENSOR_MAJOR]
                notes.append(f"tensor-major rows are left out: {problem}")
        if not techniques:
            raise InputError(f"no row is left to run: {'; '.join(notes)}")
        rows: list[Row] = []
        speeds = [measure_flash(bundle, base.num_loaders)]
        first_kernel = next((technique for technique in techniques if technique.engine != PLAIN), None)
        plan = [(technique, technique.title) for technique in techniques]
        if first_kernel is not None and len(techniques) > 1:
            plan.append((first_kernel, AGAIN + first_kernel.title))
        for technique, title in plan:
            progress(title)
            row = run_process(spec_of(technique, base, copy, mixed))
            speeds.append(measure_flash(bundle, base.num_loaders))
            # Flash drifts: a row is held against the faster of what was measured just before and just after it.
            bytes_per_s = max(speed.bytes_per_s for speed in speeds[-2:])
            facts = {"technique": title, "name": technique.name, "is_mixed": technique.is_mixed}
            rows.append({**facts, "flash_bytes_per_s": bytes_per_s, **row})
    progress("compute alone")
    hits = run_process(hits_spec(bundle, base))
    notes += check_equal(rows)
    found = Ladder(
        rows=rows,
        notes=notes,
        flash_bytes_per_s=(min(speed.bytes_per_s for speed in speeds), max(speed.bytes_per_s for speed in speeds)),
        flash_is_direct=all(speed.is_direct for speed in speeds),
        compute_ms=hits["compute_ms"],
        num_loaders=base.num_loaders,
        expert_budget_bytes=base.expert_budget_bytes,
        bundle=bundle.directory.name,
        tokens=base.tokens,
        warmup_tokens=base.warmup_tokens,
    )
    compare(found)
    found.turns = turns_of([row for row in rows if not row["technique"].startswith(AGAIN)])
    return found


def spec_of(technique: Technique, base: RowSpec, copy: Path | None, mixed: Path | None = None) -> RowSpec:
    return replace(
        base,
        bundle=str(mixed) if technique.is_mixed and mixed is not None else base.bundle,
        engine=technique.engine,
        schedule=technique.schedule,
        num_loaders=base.num_loaders if technique.parallel else 1,
        policy=technique.policy,
        compute_first=technique.compute_first,
        lookahead=technique.lookahead,
        governor=technique.governor,
        draft=technique.draft,
        copy=None if copy is None or technique.engine != TENSOR_MAJOR else str(copy),
    )


def hits_spec(bundle: Bundle, base: RowSpec) -> RowSpec:
    """All hits, no lookahead: what is left is dense parts and experts, with nothing beside them."""
    return replace(
        base,
        schedule="les",
        lookahead=False,
        expert_budget_bytes=max(base.expert_budget_bytes, bundle.token_demand_bytes),
        warmup_tokens=HIT_WARMUP_TOKENS,
        tokens=HIT_TOKENS,
        hits=True,
    )


def run_process(spec: RowSpec) -> Row:
    """A row in a process of its own; its error becomes this process's."""
    command = [sys.executable, "-m", "lesonnx.bench.row"]
    done = subprocess.run(command, input=json.dumps(asdict(spec)), capture_output=True, text=True, check=False)
    try:
        answer: Row = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise LesonnxError(f"a row ended with code {done.returncode}: {last}") from None
    if "error" in answer:
        raise (InputError if done.returncode == InputError.exit_code else LesonnxError)(answer["error"])
    return answer


def check_equal(rows: Sequence[Row]) -> list[str]:
    """Within an engine, all logits are the same bits; across engines, gives where tokens first differ, if they do.

    Rows in mixed precision are of another model: they are compared with each other alone. Rows with drafts are held to
    tokens alone, and not to them where rounding may decide.
    """
    firsts: dict[tuple[bool, str], Row] = {}
    for row in rows:
        if row["digest"] is None:
            continue
        first = firsts.setdefault((row["is_mixed"], row["engine"]), row)
        if first["digest"] != row["digest"] or first["token_ids"] != row["token_ids"]:
            raise LesonnxError(f"rows {first['name']} and {row['name']} gave different logits, expected the same bits")
    notes = []
    for row in rows:
        plain = firsts.get((row["is_mixed"], row["engine"]))
        if row["digest"] is None and row["draft"] != ORACLE and plain and row["token_ids"] != plain["token_ids"]:
            notes.append(f"row {row['name']}: other tokens than without drafts, where a row's rounding decided")
    if any(is_mixed for is_mixed, _ in firsts):
        notes.append("mixed precision is another model: its tokens are its own, compared with its own rows alone")
    reference, *others = [row for (is_mixed, _), row in firsts.items() if not is_mixed] or [rows[0]]
    for row in others:
        pairs = enumerate(zip(reference["token_ids"], row["token_ids"], strict=True))
        where = next((number for number, (one, other) in pairs if one != other), None)
        if where is not None:
            notes.append(f"engines {reference['engine']} and {row['engine']} first differ at token {where}")
    return notes


def compare(found: Ladder) -> None:
    """Add to every row its share of the roofline and its ratios to other rows."""
    kernel = next((row for row in found.rows if row["engine"] != PLAIN), None)
    plain = next((row for row in found.rows if row["engine"] == PLAIN), None)
    same = next((row for row in found.rows if row["name"] == SAME_LOADER), None)
    for row in found.rows:
        flash_ms = row["bytes_per_token"] / row["flash_bytes_per_s"] * 1e3
        row["flash_ms"] = flash_ms
        row["roofline_ms"] = max(flash_ms, found.compute_ms)
        row["roofline_share"] = row["roofline_ms"] / row["ms_per_token"]
        row["other_ms"] = row["ms_per_token"] - sum(
            row[name] for name in ("dense_ms", "expert_ms", "schedule_ms", "lookahead_ms", "stall_ms")
        )
        for name, reference in (("ratio", kernel), ("ratio_plain", plain), ("ratio_same_loader", same)):
            row[name] = None if reference is None else row["tokens_per_s"] / reference["tokens_per_s"]
