"""Makes what the Kotlin and Swift tests compare with: bundles, and what the Python runner gives for them.

    python tools/make_mobile_fixtures.py build/mobile --onnxruntime 1.24.2 --onnxruntime 1.29.0

Bits depend on ONNX Runtime's version and on the processor, so they are made where the tests run. Besides the installed
version, references are made with each version named, which is put beside the installed one for that run alone.
Nothing is made twice: delete the folder to make it anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = "tests/data/checkpoints"
TWINS: dict[str, Any] = {"accelerate": "dense", "prefill_chunk_tokens": 8, "twin_capacity_tokens": 48}
# Bits and block size of gate, up and down, in each layer's routed experts and in its shared one: every number of bits,
# blocks of several sizes, matrices of one expert that differ, experts of one page and of more.
MIXED = [
    ([(2, 16), (4, 32), (8, 32)], [(4, 64), (4, 64), (2, 32)]),
    ([(2, 16), (2, 16), (2, 16)], [(8, 16), (8, 16), (8, 64)]),
    ([(8, 16), (8, 16), (8, 16)], [(2, 64), (2, 64), (4, 16)]),
]
# Name -> checkpoint and export options.
BUNDLES: dict[str, tuple[str, dict[str, Any]]] = {
    "sample-int4": ("lesonnx/sample", {"bits": 4}),
    "sample-int4-kv8": ("lesonnx/sample", {"bits": 4, "kv_bits": 8}),
    "qwen3_moe-float": (f"{CHECKPOINTS}/qwen3_moe", {"bits": 32}),
    "qwen2_moe-float": (f"{CHECKPOINTS}/qwen2_moe", {"bits": 32}),
    "qwen2_moe-int4": (f"{CHECKPOINTS}/qwen2_moe", {"bits": 4}),
    "qwen3_next-float": (f"{CHECKPOINTS}/qwen3_next", {"bits": 32}),
    "qwen3_next-portable-float": (f"{CHECKPOINTS}/qwen3_next", {"bits": 32, "operators": "portable"}),
    "lfm2_moe-float": (f"{CHECKPOINTS}/lfm2_moe", {"bits": 32}),
    "deepseek_v3-float": (f"{CHECKPOINTS}/deepseek_v3", {"bits": 32}),
    "gpt_oss-float": (f"{CHECKPOINTS}/gpt_oss", {"bits": 32}),
    "gemma4_text-float": (f"{CHECKPOINTS}/gemma4_text", {"bits": 32}),
    "smallthinker-float": (f"{CHECKPOINTS}/smallthinker", {"bits": 32}),
    # The prompt is two chunks that have twins and a rest; generation goes on beyond what twins' caches hold.
    "qwen3_moe-twins-ios-float": (f"{CHECKPOINTS}/qwen3_moe", {"bits": 32, "target": "ios"} | TWINS),
    "qwen2_moe-twins-android-int4": (
        f"{CHECKPOINTS}/qwen2_moe",
        {"bits": 4, "dense_bits": 8, "target": "android", "twin_bits": 32} | TWINS,
    ),
    "qwen2_moe-mixed": (f"{CHECKPOINTS}/qwen2_moe", {"precisions": MIXED, "calibration": "topics"}),
    "sample-dspark-float": ("lesonnx/sample", {"bits": 32, "drafter": ROOT / "lesonnx/sample/dspark"}),
    "sample-dspark-int4": ("lesonnx/sample", {"bits": 4, "drafter": ROOT / "lesonnx/sample/dspark"}),
    # Portable: the ONNX Runtime of the Swift package has no operators for recurrent layers.
    "minicpmv4_7-float": (f"{CHECKPOINTS}/minicpmv4_7_moe", {"bits": 32, "operators": "portable"}),
}
NUM_THREADS = 2
NUM_TOKENS = 40
# Drafts a pass where a drafter is used; never more than it is sure of would be another test.
DRAFT_TOKENS = 3
# Generated tokens of prompts with pictures, and the cases of the checkpoint's reference.npz that they are.
PICTURED_TOKENS, PICTURED_CASES = 24, ("case0", "case1", "case2")
# What is taken back: a step of so many tokens, of which so many stay.
STEP_TOKENS, KEPT_TOKENS = 5, 2
PROMPT = "In the beginning God created"
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 12345}
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces before, and after  ",
    "line one\nline two\r\n\ttabbed\n\n\nthree",
    "don't WON'T it's we'll I've",
    "1234567890 3.14159 0x1F 10,000",
    "naïve café Übergröße ﬁ ½ €",
    "日本語のテキスト 中文字符 한국어",
    "עברית العربية हिन्दी ไทย",
    "emoji 👩‍👩‍👧‍👦 🇪🇺 ✈️",
    "combining e\u0301 a\u0308\u0323",
    "def f(x):\n    return {'a': [x, x**2]}  # code",
    "\u0000 control \u0007 and \ufeff bom \u200b zero width",
    "<|endoftext|> <s> </s> [INST]",
    "a" * 300,
    PROMPT,
]


def export_bundles(out: Path) -> None:
    """The bundles that are not there yet."""
    from lesonnx_export.exporter import ExportOptions, export_bundle

    for name, (checkpoint, options) in BUNDLES.items():
        target = out / "bundles" / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            export_bundle(ROOT / checkpoint, target, ExportOptions(**options | precisions_of(options)))


def precisions_of(options: dict[str, Any]) -> dict[str, Any]:
    """The precisions that options state as numbers, as the exporter takes them."""
    from lesonnx_export.expert import ExpertPrecision, MatrixPrecision
    from lesonnx_export.plan import LayerPrecision

    layers = options.get("precisions")
    if layers is None:
        return {}

    def expert(matrices: list[tuple[Any, int]]) -> ExpertPrecision:
        return ExpertPrecision(*(MatrixPrecision(bits, block_size) for bits, block_size in matrices))

    return {"precisions": tuple(LayerPrecision(expert(routed), expert(shared)) for routed, shared in layers)}


def run_case(
    bundle: Path,
    engine: str,
    prompt: str | list[int],
    sampling: dict[str, Any] | None,
    rewinds: bool = False,
    accelerate: str = "off",
) -> dict[str, Any]:
    """Tokens and logits of one generation, step by step; with ``accelerate`` "cpu" by twins on the CPU provider.

    With ``rewinds`` a step of ``step_ids`` follows the prompt and is taken back but for its first ``kept_tokens``. The
    generation goes on from there: the first logits are the step's, of the last row that stays.
    """
    import numpy as np

    import lesonnx
    from lesonnx.sampling import Sampler, SamplingOptions

    with lesonnx.load(bundle, engine=engine, num_threads=NUM_THREADS, accelerate=accelerate) as model:
        prompt_ids = model.encode(prompt)
        sampler = Sampler(SamplingOptions(**(sampling or {})))
        sampler.accept_all(prompt_ids)
        logits = [model.runner.prefill(prompt_ids)]
        step: dict[str, Any] = {}
        if rewinds:
            step = {"step_ids": prompt_ids[:STEP_TOKENS], "kept_tokens": KEPT_TOKENS}
            logits = [model.runner.step(step["step_ids"], [KEPT_TOKENS - 1])[0]]
            model.runner.rewind(len(prompt_ids) + KEPT_TOKENS)
        token_ids: list[int] = []
        while True:
            token = sampler.sample(logits[-1])
            sampler.accept(token)
            token_ids.append(token)
            if len(token_ids) == NUM_TOKENS:
                break
            logits.append(model.runner.step([token], [0])[0])
        text = model.tokenizer.decode(token_ids) if model.tokenizer else None
    return {
        "engine": engine,
        "prompt": prompt if isinstance(prompt, str) else None,
        "prompt_ids": prompt_ids,
        **step,
        "token_ids": token_ids,
        "sampling": sampling,
        "text": text,
        "logits": np.stack(logits).astype("<f4"),
    }


def write_case(stem: Path, name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Writes a case's logits beside the reference; gives what stands in it."""
    logits = case.pop("logits")
    path = stem.with_name(f"{stem.name}.{name}.f32")
    path.write_bytes(logits.tobytes())
    return {"name": name} | case | {"logits": path.name, "logits_shape": list(logits.shape)}


def run_drafts(bundle: Path, prompt: str) -> dict[str, Any]:
    """A greedy generation by drafts of `DRAFT_TOKENS`, pass by pass, and what the drafter draws when it samples.

    A pass drafts, runs the last token and the drafts in one step, keeps the drafts that are the model's own choice and
    takes the others back. ``passes``: what was drafted, how sure the drafter was (of `ONE`) and how many stayed.
    ``token_ids``: the tokens so generated. ``sampled``: before each pass the drafter was also asked for a whole block
    by the sampling of the sampled cases, all by one sampler; its seen tokens are the prompt's and those generated.
    """
    import numpy as np

    import lesonnx
    from lesonnx.sampling import Sampler, SamplingOptions
    from lesonnx.speculative.drafter import DraftSampler
    from lesonnx.speculative.dspark import DSparkDrafter

    with lesonnx.load(bundle, num_threads=NUM_THREADS) as model:
        drafter = DSparkDrafter(model.bundle, NUM_THREADS)
        runner = model.runner
        runner.layer_reader = drafter
        prompt_ids = model.encode(prompt)
        greedy, target = Sampler(SamplingOptions()), Sampler(SamplingOptions(**SAMPLED))
        target.accept_all(prompt_ids)
        drawing = DraftSampler(target)
        token_ids = [greedy.sample(runner.prefill(prompt_ids))]
        target.accept(token_ids[0])
        passes, sampled = [], []
        while len(token_ids) < NUM_TOKENS:
            sequence = [*prompt_ids, *token_ids]
            sampled.append(list(drafter.propose(sequence, drafter.max_tokens, drawing).token_ids))
            draft = drafter.propose(sequence, DRAFT_TOKENS, DraftSampler(greedy))
            rows = runner.step([token_ids[-1], *draft.token_ids], list(range(DRAFT_TOKENS + 1)))
            chosen = [int(np.argmax(row)) for row in rows]
            accepted = 0
            while accepted < DRAFT_TOKENS and draft.token_ids[accepted] == chosen[accepted]:
                accepted += 1
            runner.rewind(len(sequence) + accepted)
            drafter.rewind(len(sequence) + accepted)
            token_ids += chosen[: accepted + 1]
            target.accept_all(chosen[: accepted + 1])
            passes.append(
                {"drafted": list(draft.token_ids), "confidence": list(draft.confidence or ()), "accepted": accepted}
            )
        drafter.close()
    return {
        "name": "dspark",
        "prompt_ids": prompt_ids,
        "draft_tokens": DRAFT_TOKENS,
        "passes": passes,
        "token_ids": token_ids,
        "sampling": SAMPLED,
        "sampled": sampled,
    }


def run_pictured(bundle: Path, checkpoint: Path, stem: Path) -> list[dict[str, Any]]:
    """The prompts with pictures that the checkpoint comes with, stage by stage; arrays go into files of their own.

    ``prompt`` has a placeholder a picture, ``images`` the pictures as PPM files and ``files`` as they came (relative to
    the checkpoint), ``views`` how each is cut: [height, width, rows, columns]. ``prompt_ids`` [L] and ``position_ids``
    [3,L] are the expanded prompt's. ``pixel_values`` (float32) are the prepared crops of all pictures, each [1,3,P,W],
    one crop after another; ``features`` [I,H] of all pictures. ``token_ids`` and ``logits`` are a greedy generation's,
    as in the other cases, by the kernel.
    """
    import numpy as np

    import lesonnx
    from lesonnx.sampling import Sampler, SamplingOptions
    from lesonnx.vision.eyes import Eyes
    from lesonnx.vision.pictures import open_picture
    from lesonnx.vision.placeholders import expand
    from lesonnx.vision.prompts import place

    recorded = np.load(checkpoint / "reference.npz")
    cases = []
    with lesonnx.load(bundle, engine="kernel", num_threads=NUM_THREADS, accelerate="off") as model:
        vision = model.bundle.manifest.vision
        for name in PICTURED_CASES:
            text = str(recorded[f"{name}_text"])
            files = [f"images/{file}" for file in recorded[f"{name}_images"]]
            shown = [model.open_picture(checkpoint / file) for file in files]
            views = [picture.views for picture in shown]
            pixels, features, images = [], {}, []
            with Eyes(model.bundle, NUM_THREADS) as eyes:
                for number, picture in enumerate(shown):
                    image = open_picture(picture.source).pixels
                    images.append(f"{stem.name}.{name}.{number}.ppm")
                    header = f"P6\n{picture.width} {picture.height}\n255\n".encode()
                    stem.with_name(images[-1]).write_bytes(header + image.tobytes())
                    crops = eyes.crops(image, picture.views)
                    pixels += [crop.pixel_values.astype("<f4").tobytes() for crop in crops]
                    features[picture.key] = np.concatenate([eyes.see(crop) for crop in crops])
            prompt_ids = model.encode(expand(text, views, vision))
            prompt = place(prompt_ids, views, [picture.key for picture in shown], vision)
            sampler = Sampler(SamplingOptions())
            model.runner.rewind(0)
            logits = [model.runner.prefill(prompt.with_features(features))]
            token_ids: list[int] = []
            while True:
                token_ids.append(sampler.sample(logits[-1]))
                if len(token_ids) == PICTURED_TOKENS:
                    break
                logits.append(model.runner.step([token_ids[-1]], [0])[0])
            rows = np.concatenate([features[picture.key] for picture in shown])
            arrays = {"pixel_values": b"".join(pixels), "features": rows.astype("<f4").tobytes()}
            for key, data in arrays.items():
                stem.with_name(f"{stem.name}.{name}.{key}.f32").write_bytes(data)
            case = {
                "prompt": text,
                "files": files,
                "images": images,
                "views": [[[*view.size, *view.grid] for view in picture.views] for picture in shown],
                "prompt_ids": prompt_ids,
                "position_ids": prompt.position_ids.tolist(),
                **{key: f"{stem.name}.{name}.{key}.f32" for key in arrays},
                "features_shape": list(rows.shape),
                "token_ids": token_ids,
                "logits": np.stack(logits).astype("<f4"),
            }
            cases.append(write_case(stem, name, case))
    return cases


def write_references(out: Path) -> None:
    """The references of the ONNX Runtime that this process imports."""
    import onnxruntime

    from lesonnx import ort
    from lesonnx.bundle import Bundle
    from lesonnx.errors import BundleError
    from lesonnx.tokenizer import Tokenizer

    version = onnxruntime.__version__
    folder = out / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name in BUNDLES:
        target = folder / f"{name}.{version}.json"
        if target.exists():
            continue
        bundle = Bundle(out / "bundles" / name)
        try:
            ort.check_version(bundle.manifest.onnxruntime_at_least)
        except BundleError as error:
            print(f"no reference of {name}: {error}")
            continue
        files = bundle.manifest.tokenizer
        tokenizer = Tokenizer.from_file(bundle.file(files.json_path)) if files and files.json_path else None
        prompt: str | list[int] = PROMPT if tokenizer else [(7 * i * i + 3) % 199 for i in range(23)]
        stem = folder / f"{name}.{version}"
        cases = [
            write_case(stem, f"{kind}-{engine}", run_case(bundle.directory, engine, prompt, sampling))
            for engine in ("kernel", "session")
            for kind, sampling in (("greedy", None), ("sampled", SAMPLED))
        ]
        if bundle.manifest.twins is not None:
            # The same generations by twins: their tokens and logits are others where twins ran.
            twins: dict[str, Any] = {"accelerate": "cpu"}
            by_twins = [
                write_case(stem, "twins-greedy", run_case(bundle.directory, "kernel", prompt, None, **twins)),
                write_case(stem, "twins-rewind", run_case(bundle.directory, "kernel", prompt, None, True, **twins)),
            ]
        else:
            by_twins = []
        rewind = write_case(stem, "rewind-kernel", run_case(bundle.directory, "kernel", prompt, None, rewinds=True))
        pictured = run_pictured(bundle.directory, ROOT / BUNDLES[name][0], stem) if bundle.manifest.vision else []
        document = {
            "onnxruntime": version,
            "bundle": name,
            "num_threads": NUM_THREADS,
            "prefill_chunk_tokens": bundle.manifest.prefill_chunk_tokens,
            "expert_budget_bytes": {
                "least": bundle.least_budget_bytes,
                "quarter": max(bundle.least_budget_bytes, bundle.expert_bytes // 4),
                "all": bundle.expert_bytes,
            },
            "cases": cases,
            "rewinds": [rewind],
            **({"twins": by_twins} if by_twins else {}),
            **({"drafter": run_drafts(bundle.directory, PROMPT)} if bundle.manifest.drafter else {}),
            **({"vision": pictured} if pictured else {}),
            "tokenizer": [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=True)} for text in TEXTS]
            if tokenizer
            else [],
        }
        target.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--onnxruntime", action="append", default=[], metavar="VERSION")
    parser.add_argument("--references-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    if not arguments.references_only:
        export_bundles(out)
    write_references(out)
    for version in arguments.onnxruntime:
        beside = out / "onnxruntime" / version
        if not (beside / "onnxruntime").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(beside)]
            subprocess.run([*pip, f"onnxruntime=={version}"], check=True)
        paths = [str(beside), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        again = [sys.executable, __file__, str(out), "--references-only"]
        subprocess.run(again, check=True, env=environment)


if __name__ == "__main__":
    main()
