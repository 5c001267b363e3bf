"""Awkward texts on which two tokenizers are compared, chosen for where tokenizers are known to differ."""

from __future__ import annotations

from typing import Any

_SPACES = ("\t", "\n", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\xa0", "\u1680", "\u2003", "\u200b", "\u2028", "\u3000")

PROBES: tuple[str, ...] = (
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "  a  b   c    d  ",
    "hello world",
    "Hello, World! It's 2024; we'll see you're ok.",
    "IT'S DON'T I'LL",
    "\u2019s don\u2019t",
    "'''",
    "'s 't 're",
    "foo_bar __init__ x->y",
    "a.b.c",
    "!!!???...",
    "naïve Straße ŁÓDŹ",
    "\n\n\n",
    "a\nb\n\n\nc",
    "a \n b",
    "a \r\n b\r\n",
    "word\n\n\n",
    "  \n  \n",
    "\n  x",
    "\n\n  x\n",
    " \t x",
    "\t\tx\n",
    "def f(x):\n    if x:\n        return x + 1  # hi\n",
    "if(a&&b||!c)",
    '{"k": [1, 2.5e-3, null]}',
    "<p class='x'>y</p>",
    '#include <stdio.h>\nint main(){printf("%d\\n", 42);}',
    "https://example.com/a?b=c&d=%20",
    "SELECT * FROM t;",
    "1234567890",
    "3.14159 1,000,000",
    "ab12cd34",
    "123 45\n67",
    "  12",
    "½ ² Ⅷ ٣",
    "x²+y²",
    "१२३ \uff14\uff15\uff16",
    "日本語のテキスト",
    "中文字符\uff0c标点。",
    "mixed 中文 and English 123",
    "한국어 텍스트",
    "\uff21\uff42\uff43 fullwidth",
    "ｶﾞ",
    "العربية نص",
    "م\u064eد\u0652ر\u064eس\u064eة",
    "עבר\u05d9ת",
    "abc \u200fעבר\u05d9ת\u200e def",
    "ह\u093fन\u094dद\u0940 द\u0947वन\u093eगर\u0940",
    "ไทย ภาษา",
    "தம\u0bbfழ\u0bcd",
    "ქართული",
    "é",
    "e\u0301 cafe\u0301 café",
    "Z\u0351\u036b\u0343a\u0300",
    "\u0301",
    "ﬁ ligature ①",
    "Å Å",
    "\U0001d518\U0001d52b\U0001d526\U0001d520\U0001d52c\U0001d521\U0001d522 𒀀",
    "👍",
    "👍🏽",
    "👩\u200d👩\u200d👧\u200d👦 family",
    "🇩🇪🇫🇷",
    "1\ufe0f\u20e3 2\ufe0f\u20e3",
    "☺\ufe0f",
    "👨\u200d💻 code",
    "\ufeffBOM",
    "a" * 300,
    " " * 300,
    "=" * 200,
    "ab" * 250,
    "\n" * 100,
    "9" * 120,
    "🙂" * 40,
    "the " * 100,
    *(f"a{space}b{space}{space}c{space}" for space in _SPACES),
)


def added_token_probes(document: dict[str, Any]) -> tuple[str, ...]:
    """Texts around the added tokens of a parsed ``tokenizer.json``: whole, beside words and spaces, doubled, cut."""
    tokens = document.get("added_tokens") or []
    special = [token for token in tokens if token.get("special")]
    plain = [token for token in tokens if not token.get("special")]
    odd = [token for token in tokens if token.get("lstrip") or token.get("rstrip") or token.get("single_word")]
    names = dict.fromkeys(str(token["content"]) for token in special[:3] + plain[:2] + plain[-1:] + odd[:3])
    return tuple(
        text
        for name in names
        for text in (name, f"a{name}b", f"a {name} b", f"  {name}\n\n", name + name, f"a<{name}", f"a {name[:-1]}")
    )
