"""Task files of `lesonnx eval`: reading, making them of texts, and where their items stand among tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import SAMPLE
from conftest import Outcome
from small_tokenizers import CORPUS, byte_level, sentencepiece_bpe, unigram
from tokenizers import processors

from lesonnx.errors import InputError
from lesonnx.tokenizer import Tokenizer
from lesonnx_export.evaluate.builder import TaskOptions, build_task
from lesonnx_export.evaluate.overlap import RUN_WORDS, Calibration
from lesonnx_export.evaluate.places import AT_BEGINNING, BEYOND_CONTEXT, INSIDE_TOKEN, place
from lesonnx_export.evaluate.tasks import Item, Passage, read_task, spread

Call = Callable[..., Outcome]
WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "file",
    "table",
    "server",
    "system",
    "network",
    "kernel",
    "user",
    "quagmire",
    "is",
]


def made_text(num_words: int, seed: int = 0) -> str:
    """Sentences of words of unlike frequency."""
    rng = random.Random(seed)
    drawn = rng.choices(WORDS, weights=range(len(WORDS), 0, -1), k=num_words)
    lines = [" ".join(drawn[start : start + 12]) + "." for start in range(0, num_words, 12)]
    return "\n".join(lines)


# -- files -------------------------------------------------------------------------------------------------------------


def test_both_forms_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "quiz.jsonl"
    path.write_text(
        '{"id": "q1", "context": "Two and two is", "choices": [" four", " five"], "answer": 0}\n\n'
        '{"text": "to be or not", "items": [{"at": 2, "choices": [" be", " do"], "answer": 0},'
        ' {"at": 5, "choices": [" or", " and"], "answer": 0}]}\n',
        encoding="utf-8",
    )
    task = read_task(path)
    assert (task.name, task.num_items) == ("quiz", 3)
    assert task.passages[0] == Passage(
        id="q1", text="Two and two is", items=[Item(at=14, choices=[" four", " five"], answer=0)]
    )
    assert [item.at for item in task.passages[1].items] == [2, 5]
    first = read_task(path, most_passages=1)
    assert [passage.id for passage in first.passages] == ["q1"]
    assert first.digest != task.digest


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[1]", 'expected an object with "context", "choices" and "answer", or "text" and "items"'),
        ('{"choices": [" a", " b"], "answer": 0}', 'expected an object with "context"'),
        ('{"context": "x", "choices": [" a", " b"]}', "answer: Field required"),
        ('{"context": "x", "choices": [" a", " b"], "answer": 2}', "answer is 2, expected 0 to 1"),
        ('{"context": "x", "choices": [" a", " b"], "answer": -1}', "answer: Input should be greater"),
        ('{"context": "x", "choices": [" a", " b"], "answer": "0"}', "answer: Input should be a valid integer"),
        ('{"context": "x", "choices": [" a"], "answer": 0}', "choices: List should have at least 2 items"),
        ('{"context": "x", "choices": [" a", ""], "answer": 0}', "choices.1: String should have at least 1"),
        ('{"context": "x", "choices": [" a", " a"], "answer": 0}', "choices hold ' a' twice"),
        ('{"context": "x", "choices": [" a", " b"], "answer": 0, "anser": 1}', "anser: Extra inputs"),
        ('{"text": "abc", "items": []}', "items: List should have at least 1 item"),
        ('{"text": "abc", "items": [{"at": 4, "choices": ["a", "b"], "answer": 0}]}', "the text has 3 characters"),
        ('{"text": "abc", "items": [{"at": 1, "choices": ["a", "b"], "answer": 7}]}', "items.0: answer is 7"),
        ('{"context": "\\ud800", "choices": ["a", "b"], "answer": 0}', "half of a surrogate pair"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "quiz.jsonl"
    path.write_text('{"context": "x", "choices": [" a", " b"], "answer": 0}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError) as error:
        read_task(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_task(tmp_path: Path) -> None:
    path = tmp_path / "quiz.jsonl"
    path.write_bytes(b"\n\xff\n")
    with pytest.raises(InputError, match=r"quiz.jsonl:2: not UTF-8 text"):
        read_task(path)
    path.write_bytes(b" \n\n")
    with pytest.raises(InputError, match="holds no items"):
        read_task(path)
    with pytest.raises(InputError, match="not readable"):
        read_task(tmp_path)


def test_spread_takes_from_all_over() -> None:
    assert spread(list(range(10)), 20) == list(range(10))
    assert spread(list(range(10)), 5) == [0, 2, 4, 6, 8]


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [byte_level, sentencepiece_bpe, unigram])
def test_places_are_those_of_the_whole_text(make: Callable[[], tokenizers.Tokenizer]) -> None:
    """Context and choice have the tokens that the tokenizer gives for both as one text; what is left out could not."""
    inner = make()
    tokenizer = Tokenizer(inner)
    rng = random.Random(1)
    placed_items = left_out = 0
    for text in CORPUS[:3]:
        for at in range(1, len(text)):
            choices = [rng.choice(["", " "]) + word for word in ("experts", "load", "zé", "文字 pack", "👍")]
            passage = place(Passage(text=text, items=[Item(at=at, choices=choices, answer=0)]), tokenizer, 10_000)
            whole = tokenizer.encode_with_ends(text)[0]
            start = len(text[:at].rstrip())
            context = tokenizer.encode_with_ends(text[:start])[0]
            behind = [tokenizer.encode_with_ends(text[:at] + choice)[0] for choice in choices]
            fits = whole[: len(context)] == context and all(ids[: len(context)] == context for ids in behind)
            if passage.items:
                item = passage.items[0]
                assert passage.token_ids == context, (at, text)
                assert [context + choice for choice in item.choices] == behind, (at, text)
                assert item.choice_bytes[4] == len("👍".encode())
                placed_items += 1
            else:
                assert sum(passage.skipped.values()) == 1
                left_out += 1
                # Where all agree an item is left out only where the tail's cut beginning is in the way.
                assert not fits or start < 20 or make is not byte_level, (at, text)
    assert placed_items > 30
    assert left_out > 0


def test_what_a_tokenizer_puts_behind_a_text_is_no_context() -> None:
    inner = byte_level()
    inner.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(name, inner.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")],
    )
    tokenizer = Tokenizer(inner)
    begin, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    ids, ends = tokenizer.encode_with_ends("The experts")
    assert ids[0] == begin
    assert end not in ids
    assert (ends[0], ends[-1]) == (0, len("The experts"))
    placed = place(Passage(text="The experts", items=[Item(at=11, choices=[" of", "!"], answer=0)]), tokenizer, 99)
    assert placed.token_ids == ids
    assert placed.items[0].choices[0] == tokenizer.encode_all([" of"])[0]


def test_reasons_to_leave_an_item_out() -> None:
    tokenizer = Tokenizer.from_file(SAMPLE / "tokenizer.json")
    text = "In the beginning God created the heaven"

    def reasons(at: int, max_tokens: int = 512) -> dict[str, int]:
        return dict(
            place(
                Passage(text=text, items=[Item(at=at, choices=[" a", " b"], answer=0)]), tokenizer, max_tokens
            ).skipped
        )

    assert reasons(0) == {AT_BEGINNING: 1}
    assert reasons(text.index("eginning")) == {INSIDE_TOKEN: 1}
    assert reasons(text.index(" the heaven")) == {}
    assert reasons(text.index("the heaven")) == {}, "a space before an item belongs to its choices"
    needed = len(tokenizer.encode(text[: text.index(" the heaven")], False)) + 1
    assert reasons(text.index(" the heaven"), needed) == {}
    assert reasons(text.index(" the heaven"), needed - 1) == {BEYOND_CONTEXT: 1}


def test_a_passage_ends_with_its_last_item() -> None:
    tokenizer = Tokenizer.from_file(SAMPLE / "tokenizer.json")
    text = "In the beginning God created the heaven and the earth"
    items = [Item(at=text.index(word), choices=[word, " of"], answer=0) for word in (" created", " God")]
    placed = place(Passage(text=text, items=items), tokenizer, 512)
    assert placed.token_ids == tokenizer.encode(text[: text.index(" created")], False)
    assert [item.num_context for item in placed.items] == [
        len(tokenizer.encode(text[: text.index(word)], False)) for word in (" created", " God")
    ]


# -- making ------------------------------------------------------------------------------------------------------------

SMALL = TaskOptions(items=60, items_per_passage=10, passage_chars=500, choices=4)
NOTHING = Calibration([])


def test_tasks_are_the_same_each_time_and_all_of_the_text() -> None:
    text = made_text(1500)
    built = build_task("made", text, SMALL, NOTHING)
    assert built == build_task("made", text, SMALL, NOTHING)
    assert built != build_task("made", text, TaskOptions(60, 10, 4, 500, seed=1), NOTHING)
    items = [(passage, item) for passage in built.passages for item in passage.items]
    assert len(items) == 60
    assert all(len(passage.items) <= 10 for passage in built.passages)
    assert all(len(passage.text) <= 500 and passage.text in text for passage in built.passages)
    for passage, item in items:
        assert passage.text.startswith(item.choices[item.answer], item.at)
        assert {choice[1:] for choice in item.choices} <= set(WORDS)
        assert len(set(item.choices)) == 4
    assert len({item.answer for _, item in items}) == 4


def test_other_choices_are_about_as_frequent() -> None:
    """Of many words, each as frequent as its number says, none is far from the true one; capitals apart."""
    names = [f"{letter}{end}" for letter in "abcdefgh" for end in "abcdefghijklmnop"]
    ranks = {name: rank for rank, name in enumerate(names)}
    bag = [name for name, rank in ranks.items() for _ in range(3 + len(names) - rank)]
    bag += [name.capitalize() for name in names[:20] for _ in range(200)]
    random.Random(0).shuffle(bag)
    built = build_task("made", " ".join(bag), TaskOptions(items=400, items_per_passage=20, passage_chars=600), NOTHING)
    for passage in built.passages:
        for item in passage.items:
            words = [choice[1:] for choice in item.choices]
            assert len({word[0].isupper() for word in words}) == 1
            true = ranks[words[item.answer].lower()]
            if words[0].islower():
                assert all(abs(ranks[word] - true) <= 30 for word in words)


def test_only_words_of_one_token() -> None:
    tokenizer = Tokenizer.from_file(SAMPLE / "tokenizer.json")
    text = made_text(1500)
    built = build_task("made", text, SMALL, NOTHING, tokenizer)
    choices = {choice for passage in built.passages for item in passage.items for choice in item.choices}
    assert all(len(tokenizer.encode(choice, add_special_tokens=False)) == 1 for choice in choices)
    longer = {f" {word}" for word in WORDS if len(tokenizer.encode(f" {word}", add_special_tokens=False)) > 1}
    assert longer, "the text has words that are left out"
    assert not choices & longer


def test_a_short_text_is_refused() -> None:
    with pytest.raises(InputError, match=r"made: too short a text: it gives \d+ items, 60 are asked for"):
        build_task("made", made_text(150), SMALL, NOTHING)


def test_passages_of_the_calibration_text_are_left_out() -> None:
    text = made_text(3000)
    shared = text[4000:6000]
    calibration = Calibration([shared.upper().replace(" ", "\n")])
    built = build_task("made", text, SMALL, calibration)
    assert built.overlapping > 0
    assert not any(calibration.overlaps(passage.text) for passage in built.passages)
    assert calibration.overlaps(shared[200:600])
    assert 0.9 < calibration.share(shared) <= 1
    assert calibration.share(text[:2000]) == 0
    assert not calibration.overlaps(" ".join(shared.split()[: RUN_WORDS - 1]))


def test_the_command_writes_a_file_a_text(lesonnx: Call, tmp_path: Path, sample_bundle: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        (tmp_path / f"{name}.txt").write_text(made_text(2000, seed), encoding="utf-8")
    out = tmp_path / "tasks"
    small = ("--items", 50, "--items-per-passage", 8, "--tokenizer", sample_bundle)
    outcome = lesonnx("tasks", tmp_path / "one.txt", tmp_path / "two.txt", out, *small)
    assert outcome.code == 0, outcome.err
    assert [read_task(out / f"{name}.jsonl").num_items for name in ("one", "two")] == [50, 50]
    assert "one.jsonl: 50 items in 7 passages" in outcome.out
    again = lesonnx("tasks", tmp_path / "one.txt", out, *small)
    assert again.code == 2
    assert "already exists" in again.error


def test_what_the_command_refuses(lesonnx: Call, tmp_path: Path, bundle_of: Any) -> None:
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "one.txt", tmp_path / "other/one.txt"):
        path.write_text(made_text(300), encoding="utf-8")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    out = tmp_path / "tasks"
    for arguments, told in (
        (["one.txt"], "one.txt: too short a text: it gives"),
        (["bytes.txt"], "not readable as UTF-8 text"),
        (["none.txt"], "not readable as UTF-8 text"),
        (["one.txt", "other/one.txt"], "another text has the same name, 'one'"),
    ):
        outcome = lesonnx("tasks", *(tmp_path / name for name in arguments), out)
        assert outcome.code == 2
        assert told in outcome.error
        assert not out.exists()
    outcome = lesonnx("tasks", tmp_path / "one.txt", out, "--tokenizer", bundle_of("qwen3_moe"), "--items", 5)
    assert "has no tokenizer" in outcome.error


def test_lines_are_plain_json(tmp_path: Path) -> None:
    built = build_task("made", made_text(1500), SMALL, NOTHING)
    line = json.loads(built.passages[0].model_dump_json(exclude_none=True))
    assert set(line) == {"id", "text", "items"}
    assert set(line["items"][0]) == {"at", "choices", "answer"}
