"""`lesonnx eval`: its figures against plain computations, intervals, and what the command says and refuses."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SAMPLE, fixture
from conftest import BundleFactory, Outcome
from numpy.typing import NDArray

from lesonnx.bundle import Bundle
from lesonnx.errors import InputError, ToleranceError
from lesonnx.model import LoadOptions, Model, load
from lesonnx_export.evaluate import command, evaluation
from lesonnx_export.evaluate.bootstrap import estimate, resampled_sums
from lesonnx_export.evaluate.evaluation import TaskSums, open_evaluator
from lesonnx_export.evaluate.kept import KeptAnswers
from lesonnx_export.evaluate.places import PlacedItem, PlacedPassage
from lesonnx_export.evaluate.report import make_report, task_figures, task_table, text_figures, text_table
from lesonnx_export.evaluate.scoring import answer, score
from lesonnx_export.evaluate.windows import WindowSums, kl_to_reference, sum_windows

Call = Callable[..., Outcome]
SCRIPTURE = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was"
    " upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there be"
    " light: and there was light. And God saw the light, that it was good: and God divided the light from the darkness."
)


def log_probabilities(model: Model, ids: list[int]) -> NDArray[np.float64]:
    """Of every next token after every one of the ids, from an empty context, in a plain way."""
    model.runner.rewind(0)
    logits = model.runner.prefill(ids, all_logits=True).astype(np.float64)
    exps = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.log(exps / exps.sum(axis=1, keepdims=True))


# -- texts -------------------------------------------------------------------------------------------------------------


def test_sums_are_those_of_plain_formulas(bundle_of: BundleFactory, sample_bundle: Path) -> None:
    with load(sample_bundle) as bundle, load(bundle_of("sample")) as reference:
        ids = bundle.encode(SCRIPTURE)
        windows = [ids[:40], ids[40:41], ids[41:]]
        heard: list[int] = []
        sums = sum_windows(bundle, reference, windows, heard.append)
        assert heard == [len(window) for window in windows] == sums.tokens.tolist()
        for place, window in enumerate(windows):
            ours, theirs = log_probabilities(bundle, window), log_probabilities(reference, window)
            next_ids = np.array(window[1:], np.int64)
            rows = np.arange(len(next_ids))
            assert sums.predicted[place] == len(window) - 1
            assert sums.loss[place] == pytest.approx(-ours[rows, next_ids].sum(), rel=1e-6, abs=1e-9)
            assert sums.reference_loss[place] == pytest.approx(-theirs[rows, next_ids].sum(), rel=1e-6, abs=1e-9)
            assert sums.kl[place] == pytest.approx((np.exp(theirs) * (theirs - ours)).sum(), rel=1e-4)
            assert sums.agreed[place] == (ours.argmax(axis=1) == theirs.argmax(axis=1)).sum()
        assert sums.mean_kl == pytest.approx(sums.kl.sum() / len(ids))
        assert sums.mean_kl > 0.001
        assert sums.perplexity == pytest.approx(np.exp(sums.loss.sum() / (len(ids) - 3)))
        alone = sum_windows(bundle, None, windows)
        np.testing.assert_array_equal(alone.loss, sums.loss)
        assert (alone.mean_kl, alone.top1_agreement, alone.reference_perplexity) == (None, None, None)


def test_a_model_is_like_itself_whatever_the_chunk(bundle_of: BundleFactory) -> None:
    directory = bundle_of("sample")
    with load(directory) as bundle, load(directory) as same, load(directory, prefill_chunk_tokens=7) as other:
        ids = bundle.encode(SCRIPTURE)
        alike = kl_to_reference(bundle, same, ids)
        assert (alike.mean_kl, alike.top1_agreement) == (0, 1)
        with pytest.raises(ValueError, match="load the bundle twice"):
            kl_to_reference(bundle, bundle, ids)
        whole, chunked = kl_to_reference(bundle, other, ids), kl_to_reference(other, bundle, ids)
        assert chunked.perplexity == pytest.approx(whole.perplexity, rel=1e-4)
        assert whole.perplexity == pytest.approx(whole.reference_perplexity, rel=1e-4)


def test_what_kl_refuses(bundle_of: BundleFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundle_of("sample")) as bundle, load(bundle_of("qwen3_moe")) as other:
        with pytest.raises(InputError, match=r"has a vocabulary of 320, that of .* is 2048"):
            kl_to_reference(bundle, other, [1, 2])
        with pytest.raises(InputError, match="no tokens"):
            kl_to_reference(bundle, other, [])
        step = bundle.runner.step
        monkeypatch.setattr(bundle.runner, "step", lambda ids, rows: step(ids, rows) * np.float32("nan"))
        with pytest.raises(ToleranceError, match="the bundle gives logits that are not finite"):
            sum_windows(bundle, None, [[1, 2]])


def test_windows_are_spread_over_the_text(sample_bundle: Path) -> None:
    evaluator = open_evaluator(Bundle(sample_bundle), None)
    text = "".join(f"verse {number} {SCRIPTURE}\n" for number in range(400))
    ids = evaluator.tokenizer.encode(text, add_special_tokens=False)
    everything = evaluator.text_windows(text, None)
    assert [token for window in everything for token in window] == ids
    assert {len(window) for window in everything[:-1]} == {512}
    some = evaluator.text_windows(text, 5 * 512)
    assert [len(window) for window in some] == [512] * 5
    texts = [evaluator.tokenizer.decode(window) for window in some]
    assert all(found in text for found in texts)
    places = [text.index(found) for found in texts]
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] > 0.7 * len(text)
    assert evaluator.text_windows(SCRIPTURE, 512) == [evaluator.tokenizer.encode(SCRIPTURE, add_special_tokens=False)]
    assert len(evaluator.text_windows(text, 8000)) == 15
    evaluator.close()


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "lfm2_moe"])
@pytest.mark.parametrize("chunk", [512, 5])
def test_scores_are_those_of_context_and_choice_as_one_text(bundle_of: BundleFactory, name: str, chunk: int) -> None:
    """Choices of one token and of several, of attention and of recurrent models, in few chunks and in many."""
    rng = np.random.default_rng(0)
    with load(bundle_of(name), prefill_chunk_tokens=chunk) as model:
        vocab_size = model.bundle.manifest.model.vocab_size
        ids = rng.integers(vocab_size, size=31).tolist()
        items = []
        for num_context in (3, 17, 17, 26, 31, 9):
            lengths = (1, 1, 1) if num_context == 26 else (1, 2, 9)
            choices = [rng.integers(vocab_size, size=length).tolist() for length in lengths]
            items.append(PlacedItem(num_context, choices, [1, 2, 30], 1))
        scores = score(model, PlacedPassage(ids, items))
        expected = []
        for item, found in zip(items, scores, strict=True):
            sums = []
            for choice in item.choices:
                log_p = log_probabilities(model, ids[: item.num_context] + choice)
                rows = np.arange(item.num_context - 1, item.num_context - 1 + len(choice))
                sums.append(log_p[rows, choice].sum())
            np.testing.assert_allclose(found, sums, atol=2e-3)
            expected.append(sums)
        answers = answer(model, PlacedPassage(ids, items))
        assert answers.acc.tolist() == [int(np.argmax(sums)) == 1 for sums in expected]
        assert answers.acc_norm.tolist() == [int(np.argmax(np.array(sums) / [1, 2, 30])) == 1 for sums in expected]


# -- intervals ---------------------------------------------------------------------------------------------------------


def rate(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    return sums[:, 1] / sums[:, 0]


def test_the_interval_of_a_share_is_the_textbook_one() -> None:
    rng = np.random.default_rng(1)
    right = rng.random(5000) < 0.7
    groups = np.stack([np.ones(5000), right], axis=1)
    found = estimate([groups], rate)
    assert found.value == right.mean()
    assert found.interval is not None
    half = 1.96 * np.sqrt(right.mean() * (1 - right.mean()) / 5000)
    np.testing.assert_allclose(found.interval, [found.value - half, found.value + half], atol=half / 10)


def test_groups_are_drawn_whole() -> None:
    """Ten items a group that are all alike are worth one, not ten."""
    rng = np.random.default_rng(2)
    alike = (rng.random(400) < 0.5) * 10.0
    apart = rng.binomial(10, 0.5, size=400).astype(float)
    widths = []
    for right in (alike, apart):
        interval = estimate([np.stack([np.full(400, 10.0), right], axis=1)], rate).interval
        assert interval is not None
        widths.append(interval[1] - interval[0])
    assert widths[0] == pytest.approx(np.sqrt(10) * widths[1], rel=0.15)


def test_what_two_models_share_leaves_their_difference_alone() -> None:
    rng = np.random.default_rng(3)
    ours = rng.random(2000) < 0.5
    theirs = ours ^ (rng.random(2000) < 0.01)
    task = TaskSums(np.stack([np.ones(2000), ours, ours, theirs, theirs], axis=1).astype(float), Counter())
    figures = task_figures([task], "acc", has_reference=True)
    assert figures.difference is not None
    assert figures.difference.interval is not None
    assert figures.accuracy.interval is not None
    assert figures.difference.value == pytest.approx(ours.mean() - theirs.mean())
    width = figures.difference.interval[1] - figures.difference.interval[0]
    assert width < (figures.accuracy.interval[1] - figures.accuracy.interval[0]) / 4
    assert width == pytest.approx(2 * 1.96 * np.std(ours.astype(float) - theirs) / np.sqrt(2000), rel=0.1)


def test_drawing_sorts_of_groups_is_drawing_groups() -> None:
    groups = np.array([[1.0, 0.0]] * 30 + [[2.0, 1.0]] * 20 + [[5.0, 4.0]])
    quick = resampled_sums(groups, resamples=4000)
    rng = np.random.default_rng(7)
    plain = np.array([groups[rng.integers(len(groups), size=len(groups))].sum(axis=0) for _ in range(4000)])
    assert quick.shape == plain.shape
    np.testing.assert_allclose(quick.mean(axis=0), plain.mean(axis=0), rtol=0.02)
    np.testing.assert_allclose(quick.std(axis=0), plain.std(axis=0), rtol=0.08)
    np.testing.assert_array_equal(quick, resampled_sums(groups, resamples=4000))


def test_a_mean_counts_tasks_alike_and_one_group_has_no_interval() -> None:
    def task(right: list[float]) -> TaskSums:
        return TaskSums(np.array([[10.0, count, count, 0, 0] for count in right]), Counter(x=1))

    few, many = task([1, 3]), task([9] * 50)
    figures = task_figures([few, many], "acc", has_reference=False)
    assert figures.accuracy.value == pytest.approx((0.2 + 0.9) / 2)
    assert figures.accuracy.interval is not None
    assert (figures.items, figures.passages, figures.skipped) == (520, 52, {"x": 2})
    assert (figures.reference, figures.difference) == (None, None)
    assert task_figures([task([4])], "acc", has_reference=False).accuracy.interval is None


def test_tables_show_every_figure() -> None:
    window = np.ones(3)
    texts = {"prose": WindowSums(window * 9, window * 8, window * 16, window * 15, window, window * 3, True)}
    report = make_report(texts, {}, "acc", True)
    assert report.mean is None
    assert report.all_texts == report.texts["prose"] == text_figures([texts["prose"]])
    cells = [next(iter(column.cells)) for column in text_table(report).columns]
    assert cells[:2] == ["prose", "27"]
    assert cells[2].startswith(f"{np.exp(2):.2f}")
    assert task_table(report).row_count == 0


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and a task file of two passages and a question."""
    directory = tmp_path_factory.mktemp("material")
    (directory / "genesis.txt").write_text(SCRIPTURE, encoding="utf-8")
    records: list[dict[str, Any]] = []
    for passage in (SCRIPTURE[:250], SCRIPTURE[115:]):
        words = [word for word in (" the", " God", " light", " darkness") if word in passage[20:]]
        items = [
            {"at": passage.index(word, 20), "choices": [" of", word, " TABLE"], "answer": 1}
            for word in sorted(words, key=lambda word: passage.index(word, 20))
        ]
        records.append({"text": passage, "items": items})
    records.append({"context": "In the beginning", "choices": [" God created", " SELECT"], "answer": 0})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "verses.jsonl").write_text(lines, encoding="utf-8")
    return directory


def test_eval_json(lesonnx: Call, sample_bundle: Path, bundle_of: BundleFactory, material: Path) -> None:
    reference = bundle_of("sample")
    text, tasks = material / "genesis.txt", material / "verses.jsonl"
    arguments = ("eval", sample_bundle, "--reference", reference, "--text", text, "--tasks", tasks)
    outcome = lesonnx(*arguments, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert found["expert_bytes"] == Bundle(sample_bundle).expert_bytes
    assert found["reference"] == {
        "path": str(reference),
        "kind": "bundle",
        "expert_bytes": Bundle(reference).expert_bytes,
    }
    with load(sample_bundle) as ours, load(reference) as theirs:
        sums = kl_to_reference(ours, theirs, ours.encode(SCRIPTURE))
    for name, value in (("kl", sums.mean_kl), ("perplexity", sums.perplexity), ("top1_agreement", sums.top1_agreement)):
        assert found[name] == found["texts"]["genesis.txt"][name] == pytest.approx(value)
    accuracy = found["accuracy"]
    task = accuracy["tasks"]["verses"]
    assert task["items"] == accuracy["items"] > 6
    assert task["passages"] == 3
    assert accuracy["mean"] == task["accuracy"] > 0.5
    assert task["difference"] == pytest.approx(task["accuracy"] - task["reference"])
    low, high = task["intervals"]["difference"]
    assert low <= task["difference"] <= high
    assert accuracy["metric"] == "acc"
    shown = lesonnx(*arguments)
    assert "verses" in shown.out
    assert f"{task['accuracy']:.2%}" in shown.out


def test_a_checkpoint_is_the_float_reference_and_answers_are_kept(
    lesonnx: Call, sample_bundle: Path, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = tmp_path / "keep"
    arguments = ("eval", sample_bundle, "--reference", SAMPLE, "--tasks", material / "verses.jsonl", "--keep", keep)
    first = json.loads(lesonnx(*arguments, "--json").out)
    assert first["reference"]["kind"] == "checkpoint"
    assert first["reference"]["expert_bytes"] > 5 * first["expert_bytes"]
    assert first["tokens"] > 0, "without a text, the passages of tasks are the texts"
    assert len(list(keep.glob("answers-*.npz"))) == 2
    (bundle,) = keep.glob("*.bundle")
    written = (bundle / "manifest.json").stat().st_mtime_ns

    def never(*_: object) -> None:
        raise AssertionError("a kept answer was asked for again")

    monkeypatch.setattr(evaluation, "answer", never)
    assert json.loads(lesonnx(*arguments, "--json").out) == first
    assert (bundle / "manifest.json").stat().st_mtime_ns == written


def test_kept_answers_are_of_that_bundle_and_task(sample_bundle: Path, tmp_path: Path) -> None:
    kept = KeptAnswers(tmp_path)
    with load(sample_bundle) as model, load(sample_bundle, prefill_chunk_tokens=16) as other:
        passage = PlacedPassage([1, 2, 3], [PlacedItem(3, [[4], [5]], [1, 1], 0)])
        answers = answer(model, passage)
        kept.keep(model, "task", answers)
        found = kept.find(model, "task", 1)
        assert found is not None
        assert found.acc.tolist() == answers.acc.tolist()
        assert kept.find(model, "other task", 1) is None
        assert kept.find(model, "task", 2) is None
        assert kept.find(other, "task", 1) is None
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:100])
        assert kept.find(model, "task", 1) is None


@pytest.mark.parametrize("inside", ["", "below"])
def test_what_cannot_be_kept_is_refused_before_anything_runs(
    lesonnx: Call, sample_bundle: Path, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(command, "opened_reference", never)
    monkeypatch.setattr(command, "open_evaluator", never)
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    keep = tmp_path / "file" / inside
    arguments = ("--tasks", material / "verses.jsonl", "--reference", SAMPLE, "--keep", keep)
    outcome = lesonnx("eval", sample_bundle, *arguments)
    assert outcome.code == 2
    assert f"--keep {keep}: expected a directory to write into" in outcome.error
    assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"


def test_without_a_reference(lesonnx: Call, sample_bundle: Path, material: Path) -> None:
    found = json.loads(lesonnx("eval", sample_bundle, "--text", material / "genesis.txt", "--json").out)
    assert found["perplexity"] > 1
    assert (found["kl"], found["reference"], found["accuracy"]) == (None, None, None)
    outcome = lesonnx("eval", sample_bundle, "--tasks", material / "verses.jsonl", "--metric", "acc_norm")
    assert outcome.code == 0
    assert "accuracy (acc_norm)" in outcome.out


def test_overlaps_and_left_out_items_are_told(lesonnx: Call, sample_bundle: Path, tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    help_text = topics["if"]
    items = [{"at": at, "choices": [" the", " God"], "answer": 0} for at in (help_text.index(" statement"), 0)]
    (tmp_path / "topic.jsonl").write_text(json.dumps({"text": help_text, "items": items}) + "\n", encoding="utf-8")
    (tmp_path / "topic.txt").write_text(help_text, encoding="utf-8")
    arguments = ("--text", tmp_path / "topic.txt", "--tasks", tmp_path / "topic.jsonl")
    notes = json.loads(lesonnx("eval", sample_bundle, *arguments, "--json").out)["notes"]
    assert any("topic.txt: 100.00% of it is in the calibration text" in note for note in notes)
    assert any("topic: 1 of 1 passages overlap with the calibration text" in note for note in notes)
    assert any("topic: items left out: " in note and "1 without a token before" in note for note in notes)


def test_what_eval_refuses(
    lesonnx: Call, sample_bundle: Path, bundle_of: BundleFactory, material: Path, tmp_path: Path
) -> None:
    text, tasks = material / "genesis.txt", material / "verses.jsonl"
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "bad.jsonl").write_text('{"context": 1}\n', encoding="utf-8")
    (tmp_path / "start.jsonl").write_text('{"context": "", "choices": ["In", "On"], "answer": 0}\n', encoding="utf-8")
    shutil.copy(text, tmp_path / "genesis.txt")
    for arguments, told in (
        ((), "nothing to evaluate on: give --text or --tasks"),
        (("--text", tmp_path / "bytes.txt"), "bytes.txt: not readable as UTF-8 text"),
        (("--text", tmp_path / "empty.txt"), "empty.txt: holds no tokens"),
        (("--text", text, "--text", tmp_path / "genesis.txt"), "have the same name, 'genesis.txt'"),
        (("--tasks", tmp_path / "bad.jsonl"), "bad.jsonl:1: choices: Field required"),
        (
            ("--tasks", tmp_path / "start.jsonl", "--text", text),
            "start: no item can be asked: 1 without a token before",
        ),
        (("--tasks", tasks, "--reference", tmp_path / "none"), "none: no such reference"),
        (("--tasks", tasks, "--reference", tmp_path), "neither a bundle (manifest.json) nor a checkpoint"),
        (("--tasks", tasks, "--reference", bundle_of("qwen3_moe")), "has a vocabulary of 320"),
    ):
        outcome = lesonnx("eval", sample_bundle, *arguments)
        assert outcome.code == 2, arguments
        assert told in outcome.error
    outcome = lesonnx("eval", bundle_of("qwen3_moe"), "--tasks", tasks)
    assert "has no tokenizer" in outcome.error
    assert lesonnx("eval", fixture("qwen3_moe"), "--tasks", tasks).code == 2


def test_another_tokenizer_of_the_same_size_is_refused(sample_bundle: Path, quick_path: Path) -> None:
    changed = quick_path / "changed"
    shutil.copytree(sample_bundle, changed)
    path = changed / "tokenizer/tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError, match=r"token \d+ is '[ab]' there, '[ab]' in .*only models of one vocabulary"):
        open_evaluator(Bundle(sample_bundle), Bundle(changed))


def test_twins_are_the_bundles_alone(bundle_of: BundleFactory, tmp_path: Path) -> None:
    """Also their answers are kept apart."""
    twins = bundle_of("sample", accelerate="dense", twin_capacity_tokens=48, prefill_chunk_tokens=4)
    evaluator = open_evaluator(Bundle(twins), Bundle(twins), LoadOptions(accelerate="cpu"), KeptAnswers(tmp_path))
    try:
        assert evaluator.reference is not None
        assert set(evaluator.bundle.runner.twins.widths) == {1, 4}
        assert not evaluator.reference.runner.twins.widths
        answers = answer(evaluator.bundle, PlacedPassage([1, 2, 3], [PlacedItem(3, [[4], [5]], [1, 1], 0)]))
        evaluator.kept.keep(evaluator.bundle, "task", answers)
        assert evaluator.kept.find(evaluator.bundle, "task", 1) is not None
        assert evaluator.kept.find(evaluator.reference, "task", 1) is None
    finally:
        evaluator.close()


def test_budgets_hold_for_each(sample_bundle: Path, bundle_of: BundleFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Bundle(sample_bundle), Bundle(bundle_of("sample"))
    evaluator = open_evaluator(small, large, LoadOptions(expert_budget_bytes=small.least_budget_bytes))
    budgets = [model.runner.loader.expert_budget_bytes for model in (evaluator.bundle, evaluator.reference) if model]
    evaluator.close()
    assert budgets == [small.least_budget_bytes, large.least_budget_bytes]
    monkeypatch.setattr(evaluation, "auto_budget_bytes", lambda: 10_000_000)
    evaluator = open_evaluator(small, large)
    budgets = [model.runner.loader.expert_budget_bytes for model in (evaluator.bundle, evaluator.reference) if model]
    evaluator.close()
    assert sum(budgets) <= 10_000_000
    assert budgets[1] > budgets[0] >= small.least_budget_bytes
