"""The drafter ``draft-model``: a second, smaller bundle with the same tokenizer, all of its experts in memory.

It runs one token after another on its own sequence, which follows the target's. It knows nothing of the target but its
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lesonnx.bundle import Bundle
from lesonnx.engines import make_engine
from lesonnx.errors import InputError
from lesonnx.limits import DEFAULT_LOADERS
from lesonnx.loader import ExpertLoader
from lesonnx.runner import Runner
from lesonnx.schedule import SchedulerConfig
from lesonnx.speculative.drafter import MAX_DRAFT_TOKENS, NO_DRAFT, Distribution, Draft, DraftSampler


class DraftModelDrafter:
    """Drafts with another bundle, whose sequence is rewound to what it has in common with the target's.

    Owns that bundle's runner. InputError where the bundle's tokens are not the target's.
    """

    name = "draft-model"
    max_tokens = MAX_DRAFT_TOKENS
    is_free = False
    layer_idxs: tuple[int, ...] = ()

    def __init__(self, target: Bundle, bundle: Bundle, engine: str = "auto", num_threads: int | None = None) -> None:
        check_same_tokens(target, bundle)
        config = SchedulerConfig(resident=True, lookahead=False)
        made = make_engine(engine, bundle, num_threads)
        loader = ExpertLoader(bundle, made, config, bundle.expert_bytes, DEFAULT_LOADERS)
        try:
            self._runner = Runner(bundle, loader, num_threads=num_threads)
        except BaseException:
            loader.close()
            raise
        # So that what it maps is counted as this process's before a memory budget is shared out.
        self._runner.warm_up()

    @property
    def late_bytes(self) -> int:
        """What it will take beside that: its experts, which are read when it runs first, and its steps' arrays."""
        return self._runner.bundle.expert_bytes + self._runner.chunk_bytes()

    def bytes_at(self, num_tokens: int) -> int:
        """What its attention caches take for a sequence of that many tokens."""
        states = self._runner.states
        return states.bytes_at(states.capacity_for(min(num_tokens, states.max_tokens)))

    def propose(self, token_ids: Sequence[int], max_tokens: int, sampler: DraftSampler) -> Draft:
        """As `Drafter.propose`. Runs what the target's sequence has become since, then a token a step."""
        runner = self._runner
        most = min(max_tokens, self.max_tokens, runner.states.max_tokens - len(token_ids))
        if most < 1:
            return NO_DRAFT
        runner.rewind(runner.common_tokens(token_ids))
        logits = runner.prefill(token_ids[runner.num_tokens :])
        tokens: list[int] = []
        distributions: list[Distribution] = []
        with sampler:
            while True:
                token, distribution = sampler.choose(logits)
                tokens.append(token)
                if distribution is not None:
                    distributions.append(distribution)
                if len(tokens) == most:
                    break
                logits = runner.step([token], [0])[0]
        return Draft(tokens, distributions if sampler.draws else None)

    def observe(self, position: int, layer_outputs: NDArray[np.float32]) -> None:
        """Never called: it reads no layers."""

    def rewind(self, num_tokens: int) -> None:
        """Nothing to do before the next proposal, which compares sequences."""

    def close(self) -> None:
        """Free the draft model."""
        self._runner.close()


def check_same_tokens(target: Bundle, bundle: Bundle) -> None:
    """InputError where two vocabularies differ: in size, or in the tokenizer's file where both have one."""
    ours, theirs = target.manifest.model.vocab_size, bundle.manifest.model.vocab_size
    if ours != theirs:
        raise InputError(f"{bundle.directory}: cannot draft: its vocabulary has {theirs} tokens, the target's {ours}")
    files = [_tokenizer_file(target), _tokenizer_file(bundle)]
    if None not in files and len({_digest(path) for path in files if path is not None}) > 1:
        raise InputError(
            f"{bundle.directory}: cannot draft: its tokenizer is not the same as that of {target.directory}"
        )


def _tokenizer_file(bundle: Bundle) -> Path | None:
    files = bundle.manifest.tokenizer
    return bundle.file(files.json_path) if files and files.json_path else None


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
