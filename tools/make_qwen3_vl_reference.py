"""Makes the tiny checkpoint tests/data/checkpoints/qwen3_vl_moe, with pictures and what transformers computes for them.

    pip install "transformers==5.24.0" torch safetensors pillow     # in an environment of its own: 5 GB
    python tools/make_qwen3_vl_reference.py tests/data

Weights are random, seeded, rounded to bfloat16; ``reference.npz`` is computed in float32 with eager attention. It has
the text arrays that every family has, and for each case K of `CASES`, with L tokens, N patches, T image tokens, D
layers that features are added behind:

    caseK_text, caseK_images        the prompt, one <|image_pad|> a picture; file names under images/
    caseK_input_ids                 [L], after expansion
    caseK_pixel_values              [1, 3, P, N*P]: packed patches of every picture, row by row, as bundles take them
    caseK_target_sizes              [pictures, 2]: rows and columns of patches
    caseK_position_ids              [3, L]; caseK_rope_delta their maximum + 1 - L
    caseK_image_features            [T, H], and caseK_deepstack_features [D, T, H]
    caseK_logits, caseK_greedy_ids  [L, V]; [24], greedy, no stop token

and ``sizes`` [S, 2] of pictures, height and width, with the sizes that they are resized to: ``resized`` by this
checkpoint's settings, ``resized_30b`` by those of Qwen3-VL-30B-A3B; 0, 0 where the picture is refused.

Pictures are resized by Pillow, as transformers does where torchvision is not installed. Its patches come in blocks of
2 x 2, and twice, as of a film of two alike frames; here they are in rows, once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from make_family_references import randomize, reference
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

NAME, SEED, VOCAB, NEW = "qwen3_vl_moe", 47, 276, 24
MARKS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
PLAIN = 256 + 12  # bytes, and merges
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
WORDS = "What is in this picture? The first one is wide and the second is tall. Tell me more about the colours.\n"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.content is string -%}{{ m.content }}"
    "{%- else -%}{%- for c in m.content -%}{%- if c.type == 'image' -%}" + PICTURE + "{%- else -%}{{ c.text }}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
# Name, height, width: one of a size that stays, one that shrinks, one that grows.
PICTURES = {"plain.png": (48, 32), "wide.png": (70, 201), "tiny.png": (23, 9)}
CASES = (
    (("plain.png",), f"<|im_start|>user\n{PICTURE}What is it?<|im_end|>\n"),
    (("wide.png",), f"Tell me about {PICTURE} this."),
    (("tiny.png", "plain.png"), f"First {PICTURE}{PICTURE}"),
)
# Pixels of an image token, a side; the least and most pixels of a picture.
BOUNDS, BOUNDS_30B = (16, 1024, 5120), (32, 65536, 16777216)


def make_config() -> Qwen3VLMoeConfig:
    return Qwen3VLMoeConfig(
        text_config={
            "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 16,
            "num_experts": 6, "num_experts_per_tok": 2, "max_position_embeddings": 512,
            "eos_token_id": PLAIN + MARKS.index("<|im_end|>"), "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 4, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 8,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=PLAIN + MARKS.index("<|image_pad|>"), video_token_id=PLAIN + MARKS.index("<|video_pad|>"),
        vision_start_token_id=PLAIN + MARKS.index("<|vision_start|>"),
        vision_end_token_id=PLAIN + MARKS.index("<|vision_end|>"), tie_word_embeddings=False,
    )  # fmt: skip


def make_tokenizer(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=PLAIN, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return tokenizer


def make_picture(path: Path, height: int, width: int, generator: np.random.Generator) -> None:
    """Slopes of colour with a rectangle and specks on them."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([y * 255 // height, x * 255 // width, (x + y) * 255 // (height + width)], axis=-1)
    pixels[height // 4 : height // 2, width // 3 : 2 * width // 3] = (240, 40, 90)
    pixels[generator.integers(0, height, 20), generator.integers(0, width, 20)] = (20, 250, 200)
    Image.fromarray(pixels.astype(np.uint8)).save(path, optimize=True)


def pack(pixels: np.ndarray, grids: np.ndarray, patch: int = 8) -> np.ndarray:
    """transformers' patches [N, 3*2*P*P], in blocks of 2 x 2 and of two frames, as [1, 3, P, N*P], row by row."""
    packed, start = [], 0
    for _, rows, columns in grids:
        stop = start + rows * columns
        blocks = pixels[start:stop].reshape(rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)
        if not np.array_equal(blocks[..., 0, :, :], blocks[..., 1, :, :]):
            raise SystemExit("a picture's two frames differ")
        once = blocks[..., 0, :, :].transpose(4, 5, 0, 2, 1, 3, 6)
        packed.append(once.reshape(1, 3, patch, -1))
        start = stop
    return np.concatenate(packed, axis=-1)


@torch.no_grad()
def make_case(
    model: Qwen3VLMoeForConditionalGeneration, tokenizer: Tokenizer, pictures: list[Image.Image], text: str
) -> dict[str, np.ndarray]:
    processor = Qwen2VLImageProcessorPil.from_pretrained(model.name_or_path)
    seen = processor(images=pictures, return_tensors="pt")
    pixels, grids = seen["pixel_values"], seen["image_grid_thw"]
    first, *others = text.split("<|image_pad|>")
    for grid, after in zip(grids, others, strict=True):
        first += "<|image_pad|>" * (int(grid.prod()) // 4) + after
    ids = tokenizer.encode(first).ids

    def run(ids: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Image tokens that were generated are ordinary ones: transformers is given embeddings and positions."""
        tokens = torch.tensor([ids])
        types = torch.zeros_like(tokens)
        types[0, :length] = tokens[0, :length] == model.config.image_token_id
        positions, delta = model.model.get_rope_index(tokens, mm_token_type_ids=types, image_grid_thw=grids)
        embeds = model.get_input_embeddings()(tokens)
        embeds[types.bool()] = features
        found = model.model.language_model(
            inputs_embeds=embeds, position_ids=positions, visual_pos_masks=types.bool(), deepstack_visual_embeds=deep
        )
        return model.lm_head(found.last_hidden_state)[0], positions[:, 0], delta[0, 0]

    vision = model.model.visual(pixels, grid_thw=grids)
    features, deep = vision.pooler_output, vision.deepstack_features
    logits, positions, delta = run(ids, len(ids))
    whole = model(
        input_ids=torch.tensor([ids]), pixel_values=pixels, image_grid_thw=grids,
        mm_token_type_ids=(torch.tensor([ids]) == model.config.image_token_id).int(),
    ).logits[0]  # fmt: skip
    if not torch.allclose(logits, whole, atol=1e-5):
        raise SystemExit("the parts do not give what the whole model gives")
    greedy = list(ids)
    for _ in range(NEW):
        greedy.append(int(run(greedy, len(ids))[0][-1].argmax()))
    return {
        "input_ids": np.array(ids), "pixel_values": pack(pixels.numpy(), grids.numpy()),
        "target_sizes": grids[:, 1:].numpy(),
        "position_ids": positions.numpy(), "rope_delta": delta.numpy(), "image_features": features.numpy(),
        "deepstack_features": torch.stack(deep).numpy(), "logits": logits.numpy(),
        "greedy_ids": np.array(greedy[len(ids) :]),
    }  # fmt: skip


def resized(sizes: np.ndarray, bounds: tuple[int, int, int]) -> np.ndarray:
    found = []
    for height, width in sizes.tolist():
        try:
            found.append(smart_resize(height, width, *bounds))
        except ValueError:
            found.append((0, 0))
    return np.array(found, np.int32)


def main() -> None:
    directory = Path(sys.argv[1]) / "checkpoints" / NAME
    (directory / "images").mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(SEED)
    config = make_config()
    config._attn_implementation = "eager"
    model = Qwen3VLMoeForConditionalGeneration(config)
    randomize(model, SEED)
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    tokenizer = make_tokenizer(directory)
    # As Qwen publishes it: the number of pixels after resizing, least and most.
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": BOUNDS[1], "longest_edge": BOUNDS[2]}, patch_size=8, temporal_patch_size=2, merge_size=2,
        image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5],
    ).save_pretrained(directory)  # fmt: skip
    for name, (height, width) in PICTURES.items():
        make_picture(directory / "images" / name, height, width, generator)
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    arrays = reference(model, generator.integers(0, PLAIN, 96))
    for number, (names, text) in enumerate(CASES):
        pictures = [Image.open(directory / "images" / name) for name in names]
        case = make_case(model, tokenizer, pictures, text)
        arrays |= {f"case{number}_{key}": array for key, array in case.items()}
        arrays |= {f"case{number}_text": np.array(text), f"case{number}_images": np.array(names)}
        print(number, len(case["input_ids"]), case["target_sizes"].tolist(), case["rope_delta"])
    sizes = np.exp2(generator.uniform(0, 13, (120, 2))).astype(np.int32)
    arrays |= {"sizes": sizes, "resized": resized(sizes, BOUNDS), "resized_30b": resized(sizes, BOUNDS_30B)}
    np.savez_compressed(directory / "reference.npz", **arrays)
    print(sorted((path.name, path.stat().st_size) for path in directory.rglob("*") if path.is_file()))


if __name__ == "__main__":
    main()
