"""Small tokenizers of every kind that checkpoints have, trained here in milliseconds; shared by the tests."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The experts of a layer lie side by side, so that a load is one sequential read of the pack.",
    "def load(expert):\n    return pack[expert.offset : expert.offset + expert.length]\n",
    "日本語のテキストと中文字符。 café naïve Straße 👍👩\u200d👧 1234 5678",
] * 4
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def document(tokenizer: Tokenizer) -> dict[str, Any]:
    """The parsed ``tokenizer.json`` of a tokenizer."""
    parsed: dict[str, Any] = json.loads(tokenizer.to_str())
    return parsed


def byte_level(normalizer: normalizers.Normalizer | None = None, add_prefix_space: bool = False) -> Tokenizer:
    """Byte-level BPE with special tokens and one plain added token, as GPT-2, Qwen and OLMoE have it."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """BPE over ``▁`` with byte fallback and a BOS token, as Llama and Mixtral have it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False)
    ascii_words = [
        word for text in CORPUS if text.isascii() for word in text.split(" ")
    ]  # the rest falls back to bytes
    tokenizer.train_from_iterator(ascii_words, trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    parsed = document(tokenizer)
    parsed["added_tokens"] = parsed["added_tokens"][:3]  # the bytes are ordinary tokens
    return Tokenizer.from_str(json.dumps(parsed))


def unigram() -> Tokenizer:
    """Unigram with Metaspace, as T5 has it; its scores are made up, since training is not repeatable."""
    words = dict.fromkeys("▁" + word for text in CORPUS for word in text.split())
    letters = dict.fromkeys("▁" + "".join(CORPUS).replace(" ", ""))
    pieces = [(word, -4.0 - 0.01 * rank) for rank, word in enumerate(words)]
    pieces += [(letter, -8.0 - 0.01 * rank) for rank, letter in enumerate(letters) if letter not in words]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer
