"""Text to token ids and back, by the bundle's ``tokenizer.json``; text that grows token by token, and stop strings.

It knows nothing of models, sampling or chat templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from lesonnx.errors import BundleError, InputError

REPLACEMENT = "\ufffd"  # what decoding puts in place of bytes that are no character, or not yet
_MAX_BYTES_MISSING = 3  # a character has at most 4 bytes, so the beginning of one at most 3 tokens
_LONG_WINDOW_TOKENS = 16  # from here on a window without whole characters is shortened
_MAX_WINDOW_TOKENS = 64


class Tokenizer:
    """A Hugging Face fast tokenizer. Immutable, so threads may share it."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Take over ``inner``: its truncation and padding are turned off."""
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._silent = frozenset(token for token, added in inner.get_added_tokens_decoder().items() if added.special)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a ``tokenizer.json``; BundleError where it is missing or broken."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise BundleError(f"{path}: not found; the bundle has no tokenizer") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{path}: cannot be read: {one_line(error)}") from None
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  (the library raises plain Exception, and its panics are none)
            raise BundleError(f"{path}: not a tokenizer.json: {one_line(error)}") from None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's vocabulary may be padded beyond it."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Names of special tokens in it become those tokens.

        ``add_special_tokens`` adds what the tokenizer puts around a text (a BOS token, say); False for text that a chat
        template rendered. InputError where the text holds half of a surrogate pair.
        """
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise InputError("the text holds an unpaired surrogate, expected valid Unicode") from None
        return ids

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text with what the tokenizer puts before one, and where each token's text ends, in characters.

        White space at the end of a token may lie behind its end: tokenizers may trim what they state.
        """
        try:
            encoding = self._inner.encode(text, add_special_tokens=True)
        except (TypeError, UnicodeEncodeError):
            raise InputError("the text holds an unpaired surrogate, expected valid Unicode") from None
        mask, count = encoding.special_tokens_mask, len(encoding.ids)
        while count and mask[count - 1]:
            count -= 1
        return encoding.ids[:count], [end for _, end in encoding.offsets[:count]]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, nothing added to them; by several threads."""
        try:
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            raise InputError("a text holds an unpaired surrogate, expected valid Unicode") from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no character become U+FFFD, ids beyond the vocabulary nothing.

        InputError for a negative id.
        """
        try:
            return str(self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except OverflowError:
            raise InputError(f"token ids go from {min(ids)} to {max(ids)}, expected 0 to 2**32 - 1") from None

    def vocabulary(self) -> dict[str, int]:
        """Every token's id by its name, added ones included."""
        found: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        return found

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, such as ``<|im_end|>``; None where there is none."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def token_name(self, token: int) -> str | None:
        """The name of a token, as the vocabulary writes it; None beyond the vocabulary."""
        found: str | None = self._inner.id_to_token(token)
        return found

    def is_silent(self, token: int) -> bool:
        """Whether decoding skips this token: special, or beyond the vocabulary."""
        return token in self._silent or self.token_name(token) is None


class StreamDecoder:
    """Turns tokens into text as they come; belongs to one sequence, not thread-safe.

    The pieces together are what decoding all tokens at once gives, and no piece ends inside a character. Each step
    decodes a short window: the tokens of the last piece, which tell whether a leading space belongs to the text, and
    those since. (Prefix and read offsets, as text-generation-inference, vLLM and mlx-lm have them.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        """Start an empty text."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._context_tokens = 0  # tokens of the window whose text is out
        self._emitted_chars = 0  # of the window's text

    def push(self, token: int) -> str:
        """Add a token; the text that is certain by now, perhaps none."""
        if self._skip_special_tokens and self._tokenizer.is_silent(token):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        # With byte fallback a whole run of bytes is U+FFFD until its last character is complete, so none of it is sure.
        certain = len(text.rstrip(REPLACEMENT))
        piece = text[self._emitted_chars : certain]
        self._emitted_chars += len(piece)
        if piece and certain == len(text):
            del self._window[: self._context_tokens]
            self._context_tokens = len(self._window)
            self._emitted_chars = len(self._decode(self._window))
        elif len(self._window) - self._context_tokens >= _LONG_WINDOW_TOKENS:
            piece += self._shorten(text)
        return piece

    def flush(self) -> str:
        """The rest, at the end of the text: bytes that never became a character are U+FFFD. Then it is empty again."""
        piece = self._decode(self._window)[self._emitted_chars :]
        self._window, self._context_tokens, self._emitted_chars = [], 0, 0
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)

    def _shorten(self, text: str) -> str:
        """Take the beginning off a long window of broken bytes where its text falls apart, by force when very long."""
        for keep in range(_MAX_BYTES_MISSING + 1, _LONG_WINDOW_TOKENS):
            head = self._decode(self._window[:-keep])
            if head + self._decode(self._window[-keep:]) == text:
                break
        else:
            if len(self._window) < _MAX_WINDOW_TOKENS:
                return ""
            keep = _MAX_BYTES_MISSING
            head = text[: len(text) - keep]
        piece = head[self._emitted_chars :]
        self._emitted_chars = max(0, self._emitted_chars - len(head))
        self._context_tokens = 0
        del self._window[:-keep]
        return piece


class StopChecker:
    """Ends a streamed text before the first stop string, wherever the pieces' borders lie; belongs to one sequence.

    The stop string that is complete first counts (of several, the longest). Text that may become one is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """InputError where a stop string is empty."""
        if any(not stop for stop in stops):
            raise InputError("a stop string is empty, expected at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, text: str) -> str:
        """Add a piece; what may be shown of the text. After a stop (``stopped_by``) nothing more comes."""
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            _, start, self.stopped_by = min(ends)
            self._held = ""
            return text[:start]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def one_line(error: object) -> str:
    """An error of a library as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


def _overlap(text: str, stop: str) -> int:
    """The longest proper beginning of ``stop`` that ``text`` ends with, in characters."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
