"""Prompts with pictures through the Python runner: recorded cases, files, chat, drafts, what is kept, and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import fixture, read_reference
from conftest import BundleFactory, Outcome
from numpy.typing import NDArray

import lesonnx
from lesonnx.commands import chat
from lesonnx.errors import ContextError, InputError
from lesonnx.generate import GenerationOptions
from lesonnx.history import History
from lesonnx.model import Model
from lesonnx.positions import Positions
from lesonnx.prompt import ImageRow, Prompt
from lesonnx.vision import album
from lesonnx.vision.eyes import Eyes
from lesonnx.vision.prompts import expand_ids, with_placeholders

NAME = "minicpmv4_7_moe"
IMAGES = fixture(NAME) / "images"
CASES = ("case0", "case1", "case2")
ALL = GenerationOptions(max_new_tokens=24, ignore_eos=True)
FEW = GenerationOptions(max_new_tokens=4, ignore_eos=True)
Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return read_reference(NAME)


@pytest.fixture(scope="module")
def bundle(bundle_of: BundleFactory) -> Path:
    return bundle_of(NAME)


@pytest.fixture(scope="module")
def blind(bundle_of: BundleFactory) -> Path:
    return bundle_of(NAME, vision=False)


@pytest.fixture
def model(bundle: Path) -> Iterator[Model]:
    with lesonnx.load(bundle) as model:
        yield model


def files(arrays: Arrays, case: str) -> list[Path]:
    return [IMAGES / name for name in arrays[f"{case}_images"]]


def recorded(arrays: Arrays, case: str) -> Prompt:
    """A case with the reference's own positions and features."""
    places = np.flatnonzero(arrays[f"{case}_mm_token_type_ids"]).tolist()
    rows = {place: ImageRow(case, row) for row, place in enumerate(places)}
    features = {case: arrays[f"{case}_image_features"]}
    return Prompt(arrays[f"{case}_input_ids"].tolist(), arrays[f"{case}_position_ids"], rows, features)


def greedy(model: Model, row: NDArray[np.float32], count: int) -> list[int]:
    tokens = [int(row.argmax())]
    while len(tokens) < count:
        tokens.append(int(model.runner.step(tokens[-1:], [0])[0].argmax()))
    return tokens


# -- the runner ------------------------------------------------------------------------------------------------------


def test_recorded_cases_in_every_schedule_and_chunk(blind: Path, arrays: Arrays) -> None:
    """Logits and greedy tokens are the reference's; for a chunk and an engine, schedules give the same bits."""
    bits: dict[tuple[str, int, str], bytes] = {}
    for schedule, engine, chunk in [
        ("les", "kernel", 1),
        ("les", "kernel", 7),
        ("on-demand", "kernel", 7),
        ("resident", "kernel", 7),
        ("les", "session", 24),
        ("cache", "session", 24),
        ("resident", "kernel", 96),
    ]:
        with lesonnx.load(blind, schedule=schedule, engine=engine, prefill_chunk_tokens=chunk) as model:
            for case in CASES:
                model.runner.rewind(0)
                logits = model.runner.prefill(recorded(arrays, case), all_logits=True)
                np.testing.assert_allclose(logits, arrays[f"{case}_logits"], rtol=0, atol=1e-3)
                assert bits.setdefault((engine, chunk, case), logits.tobytes()) == logits.tobytes()
                assert greedy(model, logits[-1], 24) == arrays[f"{case}_greedy_ids"].tolist()


def test_a_rewind_past_generated_tokens_goes_on_from_the_picture(blind: Path, arrays: Arrays) -> None:
    """Drafts that are rejected leave neither positions nor states behind."""
    expected = arrays["case1_greedy_ids"].tolist()
    with lesonnx.load(blind) as model:
        runner = model.runner
        row = runner.prefill(recorded(arrays, "case1"))
        tokens = [int(row.argmax())]
        while len(tokens) < 24:
            # One right draft, then wrong ones.
            drafts = [expected[min(len(tokens), 23)], 5, 6, 7]
            logits = runner.step([tokens[-1], *drafts], range(5), 4)
            tokens += [int(logits[0].argmax()), int(logits[1].argmax())]
            runner.keep(2)
        assert tokens[:24] == expected


def test_a_drafter_reads_features_where_the_embedding_is_replaced(blind: Path, arrays: Arrays) -> None:
    class Reader:
        layer_idxs = (-1,)

        def __init__(self) -> None:
            self.rows: list[NDArray[np.float32]] = []

        def observe(self, position: int, layer_outputs: NDArray[np.float32]) -> None:
            assert position == sum(map(len, self.rows))
            self.rows.append(layer_outputs.copy())

        def bytes_at(self, num_tokens: int) -> int:
            return 0

    prompt, reader = recorded(arrays, "case1"), Reader()
    with lesonnx.load(blind, prefill_chunk_tokens=10) as model:
        model.runner.layer_reader = reader
        model.runner.prefill(prompt)
    given = np.concatenate(reader.rows)
    np.testing.assert_array_equal(given[sorted(prompt.image_rows)], arrays["case1_image_features"])


def test_features_must_be_there(blind: Path, arrays: Arrays) -> None:
    with lesonnx.load(blind) as model, pytest.raises(KeyError):
        model.runner.prefill(recorded(arrays, "case0").with_features({}))


# -- what has run ------------------------------------------------------------------------------------------------------


def test_positions_count_on_from_the_greatest_and_go_back() -> None:
    positions = Positions(3)
    positions.append(positions.next(2))
    positions.append(np.array([[2, 2, 2], [1, 9, 2], [1, 2, 7]]))
    assert positions.next(2).tolist() == [[10, 11]]
    positions.append(positions.next(600))
    assert positions.next(1).tolist() == [[610]]
    positions.append(np.array([[610], [600], [600]]))
    assert positions.next(1).tolist() == [[611]]
    # A picture whose places are behind what came before it.
    positions.append(np.array([[5], [5], [5]]))
    assert positions.next(1).tolist() == [[611]]
    positions.rewind(3)
    assert positions.next(1).tolist() == [[3]]
    positions.rewind(0)
    assert positions.next(1).tolist() == [[0]]


def test_a_prompt_goes_on_only_as_far_as_its_pictures_are_the_same() -> None:
    ids = [1, 9, 9, 9, 2, 3]
    where = np.arange(6) + np.array([[0], [1], [2]])

    def shown(key: str, first: int = 0) -> Prompt:
        return Prompt(ids, where, {place: ImageRow(key, first + place) for place in (1, 2, 3)})

    history = History(3)
    history.append(shown("a"), where)
    assert history.common(shown("a")) == 5
    assert history.common(shown("b")) == 1
    assert history.common(shown("a", first=1)) == 1
    # Image tokens without a picture are others than those of one, and positions count.
    assert history.common(Prompt(ids, where)) == 1
    moved = where.copy()
    moved[2, 4] += 1
    assert history.common(Prompt(ids, moved, shown("a").image_rows)) == 4
    assert history.common(Prompt(ids)) == 0
    history.rewind(2)
    assert history.common(shown("a")) == 2
    history.append(Prompt([9]), history.positions(Prompt([9])))
    assert history.common(shown("a")) == 2


def test_a_part_of_a_prompt_has_its_own_rows(arrays: Arrays) -> None:
    whole = recorded(arrays, "case1")
    cut = [whole.part(start, start + 7) for start in range(0, len(whole), 7)]
    assert [token for part in cut for token in part.token_ids] == list(whole.token_ids)
    hidden = np.zeros((len(whole), 64), np.float32)
    for number, part in enumerate(cut):
        part.write_features(hidden[7 * number : 7 * number + 7])
    places = sorted(whole.image_rows)
    np.testing.assert_array_equal(hidden[places], arrays["case1_image_features"])
    assert not np.delete(hidden, places, axis=0).any()
    assert whole.keys_from(places[-1]) == ["case1"]
    assert whole.keys_from(places[-1] + 1) == []


# -- pictures in prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_files_give_the_references_tokens(model: Model, arrays: Arrays, case: str) -> None:
    """Cut, prepared, read, expanded and placed by the bundle."""
    generation = model.generate(str(arrays[f"{case}_text"]), ALL, files(arrays, case))
    generation.text()
    report = generation.report
    expected = arrays[f"{case}_input_ids"].tolist()
    assert model.runner.token_ids[: len(expected)] == expected
    assert report.token_ids == arrays[f"{case}_greedy_ids"].tolist()
    assert (report.pictures, report.image_tokens) == (len(files(arrays, case)), len(arrays[f"{case}_image_features"]))
    assert report.vision_ms > 0


def test_drafts_change_nothing(bundle: Path, arrays: Arrays) -> None:
    for values in ({"draft": "ngram"}, {"draft": "draft-model", "draft_model": bundle}):
        with lesonnx.load(bundle, **values) as model:
            for case in ("case2", "case0"):
                generation = model.generate(str(arrays[f"{case}_text"]), ALL, files(arrays, case))
                generation.text()
                assert generation.report.token_ids == arrays[f"{case}_greedy_ids"].tolist()


def test_text_on_a_bundle_with_eyes_is_text(bundle: Path, blind: Path, arrays: Arrays) -> None:
    """Also where its ids hold image tokens, as those of the reference do."""
    ids = [*arrays["input_ids"].tolist()[:20], 373, 375, 373]
    found = []
    for path in (bundle, blind):
        with lesonnx.load(path) as model:
            found += [model.generate("Hello", FEW).text(), model.generate(ids, FEW).text()]
    assert found[:2] == found[2:]


def test_pictures_stand_in_front_of_a_prompt_that_has_no_place_for_them(model: Model) -> None:
    vision = model.bundle.manifest.vision
    assert vision is not None
    assert with_placeholders("a", 2, vision) == "<|image_pad|>\n<|image_pad|>\na"
    assert with_placeholders("a <|image_pad|>", 2, vision) == "a <|image_pad|>"
    apart = vision.model_copy(update={"texts": vision.texts.model_copy(update={"separator": None})})
    assert with_placeholders("a", 1, apart) == "<|image_pad|>\na"
    front = model.generate("a", FEW, [IMAGES / "small.png"])
    placed = model.generate("<|image_pad|>\na", FEW, [IMAGES / "small.png"])
    assert front.text() == placed.text()


def test_ids_have_an_image_token_a_picture(model: Model, arrays: Arrays) -> None:
    text, pictures = str(arrays["case2_text"]), files(arrays, "case2")
    ids = model.encode(text)
    assert ids.count(373) == 2
    generation = model.generate(ids, ALL, pictures)
    generation.text()
    assert generation.report.token_ids == arrays["case2_greedy_ids"].tolist()
    vision = model.bundle.manifest.vision
    assert vision is not None
    with pytest.raises(InputError, match="^1 picture, but the prompt's token ids have 2 places for pictures: put"):
        model.generate(ids, ALL, pictures[:1])
    with pytest.raises(InputError, match=r"have no places for pictures: put token 373 \(<\|image_pad\|>\) where"):
        expand_ids([1, 2], [()], vision, lambda text: [])


def test_no_images_are_none_too(model: Model) -> None:
    assert model.generate("a", FEW, None).text() == model.generate("a", FEW).text()


def test_a_picture_that_cannot_be_cut_is_named(model: Model, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "thin.png"
    image.new("RGB", (6000, 2)).save(path)
    for source in (path, str(path)):
        with pytest.raises(InputError, match=rf"^{path}: a picture of 6000 x 2 pixels is too narrow"):
            model.open_picture(source)
    with pytest.raises(InputError, match="^a picture of 6000 x 2 pixels is too narrow"):
        model.open_picture(path.read_bytes())


def test_sources_of_all_kinds(model: Model) -> None:
    image = pytest.importorskip("PIL.Image")
    path = IMAGES / "small.png"
    pillow = image.open(path).convert("RGB")
    sources = [path, str(path), path.read_bytes(), pillow, np.asarray(pillow), model.open_picture(path)]
    assert len({model.open_picture(source).key for source in sources}) == 1
    assert len({model.generate("a", FEW, [source]).text() for source in sources}) == 1


# -- conversations -----------------------------------------------------------------------------------------------------


class Counted(Eyes):
    """Counts how often eyes open, and what they see."""

    opened = 0
    seen = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Counted.opened += 1

    def see(self, crop: Any) -> NDArray[np.float32]:
        Counted.seen += 1
        return super().see(crop)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(album, "Eyes", Counted)
    Counted.opened = Counted.seen = 0
    return Counted


def user(*names: str, text: str = "What?") -> dict[str, Any]:
    images = [{"type": "image", "image": IMAGES / name} for name in names]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def test_a_conversation_reads_each_picture_once(
    model: Model, arrays: Arrays, counted: type[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {
        "role": "user",
        "content": [
            {"type": "image", "image": IMAGES / "small.png"},
            {"type": "text", "text": "What is shown here?"},
        ],
    }
    generation = model.chat([question], ALL)
    answer = generation.text()
    assert generation.report.token_ids == arrays["case0_greedy_ids"].tolist()
    assert (counted.opened, counted.seen) == (1, 1)
    more = [question, {"role": "assistant", "content": answer}, user("tall.png", "small.png")]
    second = model.chat(more, FEW)
    second.text()
    assert (second.report.pictures, counted.opened, counted.seen) == (3, 2, 5)
    assert (second.report.pictures_read, second.report.image_tokens_read) == (1, 16)
    third = model.chat(more, FEW)
    third.text()
    assert counted.opened == 2
    assert (third.report.pictures, third.report.pictures_read, third.report.image_tokens_read) == (3, 0, 0)
    # What is kept is bounded: the picture that was used least lately goes.
    monkeypatch.setattr(album, "KEPT_BYTES", 8000)
    model.chat([user("wide.png")], FEW).text()
    model.chat([user("wide.png")], FEW).text()
    assert counted.opened == 3
    model.chat([user("small.png")], FEW).text()
    assert counted.opened == 4


def test_the_same_beginning_is_not_run_again_but_another_picture_is(model: Model) -> None:
    first = model.chat([user("small.png")], FEW)
    first.text()
    again = model.chat([user("small.png")], FEW)
    again.text()
    other = model.chat([user("tall.png")], FEW)
    other.text()
    fresh = model.generate(
        "<|im_start|>user\n<|image_pad|>\nWhat?<|im_end|>\n<|im_start|>assistant\n", FEW, [IMAGES / "tall.png"]
    )
    assert again.report.token_ids == first.report.token_ids
    fresh.text()
    assert fresh.report.token_ids == other.report.token_ids


def test_whoever_stops_between_crops_loses_nothing(model: Model, counted: type[Counted]) -> None:
    before = model.generate("Hello", FEW).text()
    ran = list(model.runner.token_ids)
    generation = model.chat([user("wide.png")], FEW)
    tokens = iter(generation)
    token = next(tokens)
    assert (token.id, token.text, counted.seen) == (None, "", 0)
    next(tokens)
    assert counted.seen == 1
    tokens.close()  # type: ignore[attr-defined]
    assert model.runner.token_ids == ran
    assert model.generate("Hello", FEW).text() == before
    assert model.chat([user("wide.png")], FEW).text()
    assert (counted.opened, counted.seen) == (2, 6)


def test_a_generation_that_another_one_overtook_while_pictures_were_read_is_over(model: Model) -> None:
    tokens = iter(model.chat([user("wide.png")], FEW))
    next(tokens)
    assert model.generate("Hello", FEW).text()
    with pytest.raises(InputError, match="this generation is over"):
        next(tokens)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "pictures", "message"),
    [
        ("a", ["none.png"], r"none\.png"),
        ("<|image_pad|>", [], "1 placeholder"),
        ("<|image_pad|>", ["small.png", "small.png"], "1 placeholder"),
        ("<|image_pad|> <|image_pad|>", ["small.png"], "2 placeholders"),
    ],
)
def test_prompts_that_do_not_fit_their_pictures(
    model: Model, prompt: str, pictures: Sequence[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        model.generate(prompt, FEW, [IMAGES / name for name in pictures])


def test_a_prompt_that_its_pictures_make_too_long(model: Model, counted: type[Counted]) -> None:
    with pytest.raises(ContextError):
        model.generate("a", FEW, [IMAGES / "wide.png"] * 40)
    assert not counted.opened


def test_a_picture_that_changed_since_it_was_opened(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes((IMAGES / "small.png").read_bytes())
    shown = model.open_picture(path)
    path.write_bytes((IMAGES / "tall.png").read_bytes())
    with pytest.raises(InputError, match=r"picture\.png: has changed"):
        model.generate("a", FEW, [shown]).text()
    path.unlink()
    with pytest.raises(InputError, match=r"picture\.png"):
        model.generate("a", FEW, [shown]).text()
    assert model.generate("a", FEW).text()


def test_a_bundle_without_eyes_says_so(
    blind: Path, lesonnx: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"error: {blind}: this bundle has no eyes: it takes no pictures"
    outcome = lesonnx("run", blind, "--prompt", "a", "--image", IMAGES / "small.png")
    assert (outcome.code, outcome.out, outcome.error) == (2, "", message)
    said = iter([f"/image {IMAGES / 'small.png'}", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    outcome = lesonnx("chat", blind)
    assert (outcome.code, outcome.error) == (0, message)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_run_reports_pictures(bundle: Path, arrays: Arrays, lesonnx: Callable[..., Outcome]) -> None:
    text, (picture,) = str(arrays["case1_text"]), files(arrays, "case1")
    command = ("run", bundle, "--prompt", text, "--image", picture, "--max-tokens", 24, "--ignore-eos")
    document = json.loads(lesonnx(*command, "--json").out)
    assert document["tokens"] == arrays["case1_greedy_ids"].tolist()
    assert (document["pictures"], document["image_tokens"]) == (1, 30)
    assert document["vision_ms"] > 0
    assert "[1 picture of 30 tokens read in " in lesonnx(*command).err


def test_chat_shows_pictures_and_survives_bad_ones(
    bundle: Path, arrays: Arrays, lesonnx: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    lines = [
        f"/image {IMAGES / 'small.png'}",
        f"/image {tmp_path / 'broken.png'}",
        "/image",
        "/image ~nosuchuser/a.png",
        f"/image '{tmp_path}/not there.png'",
        "What is shown here?",
        f'/image "{IMAGES / "tall.png"}"',
        f"/image {IMAGES / 'small.png'}",
        "And here?",
        "And now?",
        f"/image {IMAGES / 'small.png'}",
        "/reset",
        "/exit",
    ]
    said = iter(lines)
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    outcome = lesonnx("chat", bundle, "--max-tokens", 24)
    assert outcome.code == 0
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    for error, part in zip(errors, ("broken.png", "needs the name", "no such user", "not there.png"), strict=True):
        assert part in error
    first, second, third = [line for line in outcome.err.splitlines() if line.startswith("[")]
    assert re.match(r"\[1 picture of 4 tokens read in \d+\.\d\d s; \d+ prompt tokens in \S+ s, \d+ generated", first)
    assert re.match(r"\[1 picture of 16 tokens read in \S+ s, 2 known; \d+ prompt tokens", second)
    assert re.match(r"\[no picture read, 3 known; \d+ prompt tokens", third)
    shown = [line for line in outcome.err.splitlines() if line.startswith("note: ")]
    assert shown[0].startswith("note: small.png: ")
    assert [line.rpartition("; ")[2] for line in shown] == [
        "1 picture waits for the next question",
        "1 picture waits for the next question",
        "2 pictures wait for the next question",
        "1 picture waits for the next question",
        "note: put away unread: 1 picture",
    ]


def test_more_pictures_than_the_context_holds_are_refused_before_a_text_is_built(bundle: Path) -> None:
    with lesonnx.load(bundle) as model, pytest.raises(ContextError, match="the pictures take 1050 tokens"):
        model.generate("Many.", images=[IMAGES / "wide.png"] * 35)


def test_an_interrupt_while_a_picture_is_opened_ends_no_chat(
    bundle: Path, lesonnx: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    said = iter([f"/image {IMAGES / 'small.png'}", "And now?", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    monkeypatch.setattr("lesonnx.vision.album.open_picture", interrupted)
    outcome = lesonnx("chat", bundle, "--max-tokens", 4)
    assert outcome.code == 0
    assert "small.png: stopped" in outcome.err
    assert "4 generated" in outcome.err


def test_chat_keeps_pictures_whose_question_was_stopped_while_they_were_read(
    bundle: Path, lesonnx: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = iter([[1], [], []])
    monkeypatch.setattr(chat, "stop_on_interrupt", lambda: nullcontext(next(interrupts)))
    said = iter([f"/image {IMAGES / 'wide.png'}", "What?", "What now?", "/reset", "And?"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said, "/exit"))
    outcome = lesonnx("chat", bundle, "--max-tokens", 2)
    assert outcome.code == 0
    _, note, *summaries = outcome.err.splitlines()
    assert note == "note: stopped while pictures were read; they wait for the next question"
    assert ["1 picture of 30 tokens" in line for line in summaries] == [True, False]


def test_chat_puts_pictures_away_that_cannot_be_read_any_more(
    bundle: Path, lesonnx: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes((IMAGES / "small.png").read_bytes())

    def said() -> Iterator[str]:
        yield f"/image {path}"
        path.unlink()
        yield from ("What?", "And without?", "/exit")

    lines = said()
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    outcome = lesonnx("chat", bundle, "--max-tokens", 2)
    _, error, *rest = [line for line in outcome.err.splitlines() if line]
    assert error == f"error: {path}: no such file; the pictures shown for it are put away"
    assert [line.startswith("[") for line in rest] == [True]
