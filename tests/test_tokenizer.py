"""Tokenizer, streamed decoding of every kind of tokenizer, and stop strings across any borders."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level, sentencepiece_bpe, unigram

from lesonnx.errors import BundleError, InputError
from lesonnx.tokenizer import REPLACEMENT, StopChecker, StreamDecoder, Tokenizer

SAMPLE = Path(__file__).resolve().parent.parent / "lesonnx" / "sample" / "tokenizer.json"
KINDS = ["byte_level", "sentencepiece_bpe", "unigram"]
TEXTS = [
    "The experts of a layer.",
    "  two leading spaces, trailing  ",
    "日本語 café 👍🏽 👩\u200d👩\u200d👧 \U0001f1e9\U0001f1ea",
    "a\n\n  b\tc",
    "",
]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer({"byte_level": byte_level, "sentencepiece_bpe": sentencepiece_bpe, "unigram": unigram}[kind]())


def streamed(decoder: StreamDecoder, ids: list[int]) -> list[str]:
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe"])
def test_round_trip(kind: str, text: str) -> None:
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    assert tokenizer(kind).decode(ids) == text
    assert all(0 <= token < tokenizer(kind).vocab_size for token in ids)


def test_special_tokens() -> None:
    spm, bpe = tokenizer("sentencepiece_bpe"), tokenizer("byte_level")
    assert spm.encode("a", add_special_tokens=True) == [1, *spm.encode("a", add_special_tokens=False)]
    ids = bpe.encode("a<|im_end|>", add_special_tokens=False)
    assert ids[-1] == bpe.token_id("<|im_end|>") == 2
    assert bpe.token_name(2) == "<|im_end|>"
    assert bpe.token_id("<none>") is None
    assert bpe.token_name(10**6) is None
    assert bpe.decode(ids) == "a"
    assert bpe.decode(ids, skip_special_tokens=False) == "a<|im_end|>"
    assert bpe.decode([10**6, *ids]) == "a"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "The experts of a layer"
    ids = Tokenizer.from_file(tmp_path / "tokenizer.json").encode(text, add_special_tokens=True)
    assert ids == tokenizer("byte_level").encode(text, add_special_tokens=True)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"model": {"type": "BPE"', b"\xff\xfe", b'{"model":{}}'])
def test_broken_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(BundleError) as caught:
        Tokenizer.from_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="not found"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_bad_text_and_ids() -> None:
    with pytest.raises(InputError, match="unpaired surrogate"):
        tokenizer("byte_level").encode("a\ud800", add_special_tokens=False)
    with pytest.raises(InputError, match="token ids go from -1 to 3"):
        tokenizer("byte_level").decode([3, -1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_stream_is_the_whole(kind: str, text: str) -> None:
    ids = tokenizer(kind).encode(text, add_special_tokens=True)
    pieces = streamed(StreamDecoder(tokenizer(kind)), ids)
    assert "".join(pieces) == tokenizer(kind).decode(ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_stream_comes_token_by_token() -> None:
    ids = tokenizer("byte_level").encode("The experts of a layer", add_special_tokens=False)
    pieces = streamed(StreamDecoder(tokenizer("byte_level")), ids)
    assert all(pieces[:-1])
    assert pieces[-1] == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe"])
def test_no_piece_ends_inside_a_character(kind: str) -> None:
    ids = tokenizer(kind).encode("𒀀", add_special_tokens=False)
    assert len(ids) >= 4  # one token a byte
    pieces = streamed(StreamDecoder(tokenizer(kind)), ids)
    assert [piece for piece in pieces if piece] == ["𒀀"]


def test_special_tokens_between_words_keep_the_space() -> None:
    spm = tokenizer("sentencepiece_bpe")
    ids = [1, *spm.encode("The", add_special_tokens=False), 2, 2, *spm.encode("experts", add_special_tokens=False)]
    assert "".join(streamed(StreamDecoder(spm), ids)) == spm.decode(ids) == "The experts"
    shown = StreamDecoder(spm, skip_special_tokens=False)
    assert "".join(streamed(shown, ids)) == spm.decode(ids, skip_special_tokens=False)


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=60), st.sampled_from(KINDS))
@example("é\u0301a", "byte_level")
@example("\ufffd\ufffda\ufffd", "byte_level")
@example("\x80𒀀", "sentencepiece_bpe")
@example("𒀀" * 20, "sentencepiece_bpe")
def test_any_text_streams(text: str, kind: str) -> None:
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    assert "".join(streamed(StreamDecoder(tokenizer(kind)), ids)) == tokenizer(kind).decode(ids)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 425), max_size=80))
@example([3 + 250] * 80)
def test_any_tokens_stream_in_byte_level(ids: list[int]) -> None:
    bpe = tokenizer("byte_level")
    assert "".join(streamed(StreamDecoder(bpe), ids)) == bpe.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_decodes_a_short_window(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tokenizer(kind)
    lengths: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    ids = shared.encode("The experts of a layer 👍 " * 40, add_special_tokens=False)
    broken = shared.token_id("<0xFF>") or shared.encode("\u0100", add_special_tokens=False)[0]
    monkeypatch.setattr(Tokenizer, "decode", counting)
    decoder = StreamDecoder(shared)
    for token in [*ids, *[broken] * 500, *ids]:
        decoder.push(token)
    assert max(lengths) <= 64
    assert sum(lengths) < 40 * (2 * len(ids) + 500)


def test_flush_shows_broken_bytes_and_starts_anew() -> None:
    bpe = tokenizer("byte_level")
    first = bpe.encode("𒀀", add_special_tokens=False)[0]
    decoder = StreamDecoder(bpe)
    assert decoder.push(first) == ""
    assert decoder.flush() == REPLACEMENT
    assert decoder.flush() == ""
    assert "".join(streamed(decoder, bpe.encode("The", add_special_tokens=False))) == "The"


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample is not there")
def test_sample_streams() -> None:
    sample = Tokenizer.from_file(SAMPLE)
    ids = sample.encode("In the beginning God created 日本 👍.", add_special_tokens=False)
    assert "".join(streamed(StreamDecoder(sample), ids)) == "In the beginning God created 日本 👍."


def stopped(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    checker = StopChecker(stops)
    return [*(checker.push(piece) for piece in pieces), checker.flush()], checker.stopped_by


def test_stop_across_borders() -> None:
    pieces, stop = stopped(["</end>"], ["Hello ", "wor", "ld<", "/e", "nd", ">more"])
    assert pieces == ["Hello ", "wor", "ld", "", "", "", ""]
    assert stop == "</end>"


def test_what_only_looked_like_a_stop_comes_later() -> None:
    assert stopped(["\n\nUser:"], ["a\n", "\nU", "se you", "\n"]) == (["a", "", "\n\nUse you", "", "\n"], None)
    assert stopped(["aab"], ["aa", "aa", "b!"]) == (["", "aa", "", ""], "aab")


def test_the_stop_that_is_complete_first_counts() -> None:
    for pieces in (["abcd"], ["a", "b", "c", "d"], ["abc", "d"]):
        shown, stop = stopped(["abcd", "bc"], pieces)
        assert ("".join(shown), stop) == ("a", "bc")
    assert stopped(["c", "bc"], ["abc"]) == (["a", ""], "bc")


def test_nothing_comes_after_a_stop() -> None:
    checker = StopChecker(["x"])
    assert [checker.push("ax"), checker.push("b"), checker.flush()] == ["a", "", ""]


def test_no_stops_hold_nothing_back() -> None:
    assert stopped([], ["a", "b"]) == (["a", "b", ""], None)


def test_empty_stop() -> None:
    with pytest.raises(InputError, match="a stop string is empty"):
        StopChecker(["a", ""])


@given(
    st.text("ab<", max_size=30),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_borders_do_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, stop = stopped(stops, [text[a:b] for a, b in pairwise(borders)])
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    expected = (text[: min(ends)[1]], min(ends)[2]) if ends else (text, None)
    assert ("".join(shown), stop) == expected
