"""Makes the Swift tokenizer's test vectors: small tokenizers of each kind that it knows, and the ids that the
`tokenizers` library gives for awkward texts.

    python tools/make_tokenizer_vectors.py      writes ios/Lesonnx/Tests/LesonnxTests/Vectors/tokenizers.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from small_tokenizers import byte_level, sentencepiece_bpe  # noqa: E402

from export.tokenizer_probes import PROBES  # noqa: E402

TARGET = REPO / "ios" / "Lesonnx" / "Tests" / "LesonnxTests" / "Vectors" / "tokenizers.json"
# As Qwen2/3 and Llama 3 cut texts: their own tokenizer.json's expressions.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
NAMED = ("<|im_start|>user\nHi<|im_end|>\n", "a<think>b", "<|im_start|><|im_start|>", "  <pad>  x", "a <mask> b")


def split(pattern: str) -> Tokenizer:
    tokenizer = byte_level(normalizers.NFC())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def llama3() -> Tokenizer:
    tokenizer = split(LLAMA3)
    tokenizer.normalizer = None
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]),
        ]
    )
    document = json.loads(tokenizer.to_str())
    document["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(document))


def stripping() -> Tokenizer:
    tokenizer = byte_level(add_prefix_space=True)
    tokenizer.add_special_tokens([AddedToken("<pad>", normalized=False, rstrip=True)])
    tokenizer.add_tokens([AddedToken("<mask>", normalized=True, lstrip=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = sentencepiece_bpe()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer


def main() -> None:
    tokenizers = {
        "byte-level": byte_level(),
        "qwen": split(QWEN),
        "llama3": llama3(),
        "stripping": stripping(),
        "sentencepiece": sentencepiece_bpe(),
        "metaspace": metaspace(),
    }
    vectors = [
        {
            "name": name,
            "tokenizer": json.loads(tokenizer.to_str()),
            "cases": [{"text": text, "ids": tokenizer.encode(text).ids} for text in (*PROBES, *NAMED)],
        }
        for name, tokenizer in tokenizers.items()
    ]
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(vectors, ensure_ascii=True, separators=(",", ":")) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
