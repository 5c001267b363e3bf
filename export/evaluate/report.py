"""What an evaluation says: figures with intervals from sums, as one document and as tables.

It runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Literal

import numpy as np
from rich.table import Table

from lesonnx_export.evaluate.bootstrap import Estimate, Sums, estimate
from lesonnx_export.evaluate.evaluation import TaskSums
from lesonnx_export.evaluate.windows import WindowSums

Metric = Literal["acc", "acc_norm"]


@dataclass(frozen=True)
class TextFigures:
    """Of one or several texts. Without a reference all but ``perplexity`` is None.

    ``perplexity_ratio``: the bundle's by the reference's; ``kl``: nats a token, KL(reference || bundle).
    """

    tokens: int
    perplexity: Estimate
    reference_perplexity: Estimate | None
    perplexity_ratio: Estimate | None
    kl: Estimate | None
    top1_agreement: Estimate | None


@dataclass(frozen=True)
class TaskFigures:
    """Of one task or the mean over several, each of them counting alike.

    ``difference``: the bundle's accuracy less the reference's, on the same items.
    """

    items: int
    passages: int
    skipped: dict[str, int]
    accuracy: Estimate
    reference: Estimate | None
    difference: Estimate | None


def text_figures(texts: Sequence[WindowSums]) -> TextFigures:
    """Figures over the windows of some texts, all tokens counting alike; windows are what is drawn again."""
    has_reference = texts[0].has_reference
    rows = np.concatenate(
        [np.stack([t.tokens, t.predicted, t.loss, t.reference_loss, t.kl, t.agreed], axis=1) for t in texts]
    )

    def figure(of: Callable[[Sums], Sums]) -> Estimate:
        return estimate([rows], of)

    def compared(of: Callable[[Sums], Sums]) -> Estimate | None:
        return figure(of) if has_reference else None

    return TextFigures(
        tokens=int(rows[:, 0].sum()),
        perplexity=figure(lambda sums: np.exp(_ratio(sums[:, 2], sums[:, 1]))),
        reference_perplexity=compared(lambda sums: np.exp(_ratio(sums[:, 3], sums[:, 1]))),
        perplexity_ratio=compared(lambda sums: np.exp(_ratio(sums[:, 2] - sums[:, 3], sums[:, 1]))),
        kl=compared(lambda sums: _ratio(sums[:, 4], sums[:, 0])),
        top1_agreement=compared(lambda sums: _ratio(sums[:, 5], sums[:, 0])),
    )


def _ratio(sums: Sums, counts: Sums) -> Sums:
    # Windows of one token predict nothing.
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def task_figures(tasks: Sequence[TaskSums], metric: Metric, has_reference: bool) -> TaskFigures:
    """Figures of one task, or the mean of several; passages are what is drawn again, within each task."""
    groups = [task.groups for task in tasks]
    right = 1 + (metric == "acc_norm")

    def compared(of: Callable[[Sums], Sums]) -> Estimate | None:
        return estimate(groups, of) if has_reference else None

    return TaskFigures(
        items=sum(task.num_items for task in tasks),
        passages=sum(len(each) for each in groups),
        skipped=dict(sum((task.skipped for task in tasks), Counter[str]())),
        accuracy=estimate(groups, lambda sums: sums[:, right] / sums[:, 0]),
        reference=compared(lambda sums: sums[:, right + 2] / sums[:, 0]),
        difference=compared(lambda sums: (sums[:, right] - sums[:, right + 2]) / sums[:, 0]),
    )


@dataclass(frozen=True)
class Report:
    """All figures of an evaluation. ``texts`` and ``tasks`` by name; over all of them None where there are none."""

    metric: Metric
    texts: dict[str, TextFigures]
    all_texts: TextFigures | None
    tasks: dict[str, TaskFigures]
    mean: TaskFigures | None


def make_report(
    texts: dict[str, WindowSums], tasks: dict[str, TaskSums], metric: Metric, has_reference: bool
) -> Report:
    """The figures of what was added up."""
    return Report(
        metric=metric,
        texts={name: text_figures([sums]) for name, sums in texts.items()},
        all_texts=text_figures(list(texts.values())) if texts else None,
        tasks={name: task_figures([sums], metric, has_reference) for name, sums in tasks.items()},
        mean=task_figures(list(tasks.values()), metric, has_reference) if tasks else None,
    )


# -- as a document -----------------------------------------------------------------------------------------------------


def document(report: Report) -> dict[str, Any]:
    """What ``--json`` prints of the figures; docs/evaluation.md says what each is."""
    nothing = dict.fromkeys([field.name for field in fields(TextFigures)]) | {"intervals": {}}
    figures = _flat(report.all_texts) if report.all_texts else nothing
    texts = {name: _flat(text) for name, text in report.texts.items()}
    return {**figures, "texts": texts, "accuracy": _accuracy(report)}


def _accuracy(report: Report) -> dict[str, Any] | None:
    if report.mean is None:
        return None
    mean = _flat(report.mean)
    mean["mean"] = mean.pop("accuracy")
    mean["intervals"]["mean"] = mean["intervals"].pop("accuracy")
    return {"metric": report.metric, **mean, "tasks": {name: _flat(task) for name, task in report.tasks.items()}}


def _flat(figures: TextFigures | TaskFigures) -> dict[str, Any]:
    """Figures as numbers, their intervals under one key; None where there is no number."""
    flat: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    for name, value in ((field.name, getattr(figures, field.name)) for field in fields(figures)):
        flat[name] = value
        if isinstance(value, Estimate):
            flat[name] = value.value if isfinite(value.value) else None
            intervals[name] = value.interval if flat[name] is not None else None
    return {**flat, "intervals": intervals}


# -- as tables ---------------------------------------------------------------------------------------------------------


def text_table(report: Report) -> Table:
    """A row a text, and one for all."""
    table = Table("text", title="± and brackets: 95 % intervals", title_justify="left", title_style="dim")
    for column in ("tokens", "perplexity", "reference", "ratio", "KL", "same top token"):
        table.add_column(column, justify="right")
    rows = list(report.texts.items())
    if report.all_texts is not None and len(rows) > 1:
        rows.append(("all", report.all_texts))
    for name, text in rows:
        table.add_row(
            name,
            f"{text.tokens:,}",
            _shown(text.perplexity, ".2f"),
            _shown(text.reference_perplexity, ".2f"),
            _compared(text.perplexity_ratio, ".4f"),
            _shown(text.kl, ".4f"),
            _shown(text.top1_agreement, ".2%"),
        )
    return table


def task_table(report: Report) -> Table:
    """A row a task, and one for their mean."""
    table = Table("task", title=f"accuracy ({report.metric})", title_justify="left", title_style="dim")
    for column in ("items", "passages", "bundle", "reference", "points of difference"):
        table.add_column(column, justify="right")
    rows = list(report.tasks.items())
    if report.mean is not None and len(rows) > 1:
        rows.append(("mean", report.mean))
    for name, task in rows:
        table.add_row(
            name,
            f"{task.items:,}",
            f"{task.passages:,}",
            _shown(task.accuracy, ".2%"),
            _shown(task.reference, ".2%"),
            _compared(task.difference, "+.2f", 100),
        )
    return table


def _shown(found: Estimate | None, form: str) -> str:
    """A figure, and half the width of its interval."""
    if found is None:
        return ""
    if found.interval is None:
        return f"{found.value:{form}}"
    low, high = found.interval
    return f"{found.value:{form}} ±{(high - low) / 2:{form}}"


def _compared(found: Estimate | None, form: str, times: float = 1) -> str:
    """A comparison, and its interval: whether the one value that says "alike" lies in it is what is read from it."""
    if found is None:
        return ""
    if found.interval is None:
        return f"{times * found.value:{form}}"
    low, high = found.interval
    return f"{times * found.value:{form}} \\[{times * low:{form}}, {times * high:{form}}]"
