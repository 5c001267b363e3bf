"""Messages: parted from their pictures, and refused in one line where something in them would get lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lesonnx.errors import InputError
from lesonnx.messages import split_messages


def user(*items: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(items)}]


TEXT = {"type": "text", "text": "t"}


def test_messages_are_parted_from_their_pictures() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    images = [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "b.png"},
        {"type": "image_url", "image_url": {"url": "c d.png"}},
        {"type": "image", "image": pixels},
    ]
    system = {"role": "system", "content": "s"}
    plain, sources = split_messages([system, *user(*images, TEXT)])
    assert plain == [system, {"role": "user", "content": [{"type": "image"}] * 4 + [TEXT]}]
    assert sources[:3] == ["a.png", "b.png", "c d.png"]
    assert sources[3] is pixels
    assert images[0] == {"type": "image", "image": "a.png"}


def test_a_message_that_calls_tools_needs_no_content() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert split_messages([called]) == ([called], [])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("x", 'messages are a list of {"role": …, "content": …}, found the text \'x\''),
        ({"role": "user", "content": "x"}, "found of type dict"),
        (None, "found missing or None"),
        ([], "messages are an empty list, expected at least one message"),
        (["x"], "message 0 is the text 'x', expected {"),
        ([{"content": "x"}], "message 0: role is missing or None"),
        ([{"role": "user", "content": None}], "message 0: content is missing or None, expected text or a list"),
        ([{"role": "user"}], "message 0: content is missing or None"),
        ([{"role": "user", "content": 3}], "message 0: content is of type int"),
        (user(TEXT, "what?"), "message 0, item 1 is the text 'what?', expected {"),
        (user({"type": "video", "video": "a.mp4"}), "item 0: type is 'video', expected one of text, image"),
        (user({"type": "imgae", "image": "a.png"}), "type is 'imgae'"),
        (user({"text": "t"}), "type is None"),
        (user({"type": "text"}), "item 0: text is missing or None, expected text"),
        (user({"type": "image", "url": "http://x"}), "is an image with url; expected image: a path, bytes or pixels"),
        (user({"type": "image"}), "is an image with nothing"),
        (user({"type": "image", "image": "https://x/a.png"}), "'https://x/a.png' is an address; expected the path"),
        (user({"type": "image_url", "image_url": {"url": "http://x/a.png"}}), "'http://x/a.png' is an address"),
        (user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}), "is an address"),
        (user({"type": "image_url", "image_url": {}}), 'image_url is of type dict, expected {"url": path}'),
    ],
)
def test_what_would_get_lost_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        split_messages(messages)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
