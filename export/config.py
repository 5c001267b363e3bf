"""A checkpoint's config.json under one spelling: transformers 4 and 5, nested ``text_config``, and defaults.

Every key that a family reads is recorded, so that what it left unread can be told to the user.
"""

from __future__ import annotations

import difflib
from typing import Any

from lesonnx.errors import CheckpointError

# One name for one thing, in the order in which spellings are tried.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "moe_num_primary_experts",
    ),
    "num_experts_per_tok": (
        *("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "moe_num_active_primary_experts"),
    ),
    "n_shared_experts": ("n_shared_experts", "moe_num_shared_experts"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps"),
}
# Families whose configs have no model_type: by their architecture.
UNNAMED = {"SmallThinkerForCausalLM": "smallthinker"}
# Models that are more than a text model, by their outer model_type: the model_type that their text_config must have.
WHOLES = {"minicpmv4_7": "qwen3_5_moe_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}
# Keys that say nothing about the forward pass of inference.
IGNORED = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "transformers_version", "model_type", "tokenizer_class"),
        *("dtype", "torch_dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("attention_dropout", "hidden_dropout", "initializer_range", "router_jitter_noise", "pretraining_tp"),
        *("output_router_logits", "router_aux_loss_coef", "is_decoder", "is_encoder_decoder"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "text_config", "vision_config"),
        *("head_dim", "max_window_layers", "layer_types", "attn_implementation", "chunk_size_feed_forward"),
        *("id2label", "label2id", "problem_type"),
    }
)
# No model's are larger; what is, would only exhaust the memory of whoever believes it.
LARGEST = 1 << 18
LARGEST_OF = {
    "num_hidden_layers": 1 << 8,
    "num_nextn_predict_layers": 1 << 8,
    "num_experts": 1 << 11,
    "vocab_size": 1 << 26,
    "patch_size": 1 << 10,
    # Lengths cost nothing by themselves, and some configs mean "no end" by the largest.
    "max_position_embeddings": (1 << 31) - 1,
    "sliding_window": (1 << 31) - 1,
    "sliding_window_size": (1 << 31) - 1,
}
FLOAT32_MOST = 3.4028234663852886e38
_MISSING = object()


class Config:
    """Typed access to the text model's configuration; CheckpointError names a key that is missing or malformed."""

    def __init__(self, raw: dict[str, Any]) -> None:
        nested = raw.get("text_config")
        if nested is not None and not isinstance(nested, dict):
            raise CheckpointError("config.json: text_config must be an object")
        # Keys of the outer level that the nested one leaves out still hold (tie_word_embeddings, token ids).
        self.values: dict[str, Any] = {**raw, **nested} if nested else dict(raw)
        self.values.pop("text_config", None)
        # What is outside the text model, for whoever reads the rest of the model.
        self.outer: dict[str, Any] = raw
        whole = raw.get("model_type")
        if isinstance(whole, str) and whole in WHOLES:
            self.values["model_type"] = whole
        self.read: set[str] = set()
        # The family's defaults, as transformers has them for that model_type, and those that were taken.
        self.defaults: dict[str, Any] = {}
        self.defaulted: set[str] = set()

    @property
    def model_type(self) -> str:
        value = self.values.get("model_type")
        architectures = self.values.get("architectures")
        if value is None and isinstance(architectures, list):
            value = next((UNNAMED[name] for name in architectures if isinstance(name, str) and name in UNNAMED), None)
        if not isinstance(value, str):
            raise CheckpointError(f"config.json: model_type must be a name, found {value!r:.100}")
        return value

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        """The value of a key in any of its spellings; where it is left out (but not where it is null), the default."""
        spellings = ALIASES.get(key, (key,))
        self.read |= set(spellings)
        for spelling in spellings:
            if self.values.get(spelling) is not None:
                return self.values[spelling]
        if key in self.defaults and not any(spelling in self.values for spelling in spellings):
            self.defaulted.add(key)
            return self.defaults[key]
        if default is _MISSING:
            raise CheckpointError(f"config.json: {key} is missing")
        return default

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """A whole number of at least 1 (0 only where the default is 0), of a size that a model can have."""
        value = self.raw(key, default)
        least = 0 if default == 0 else 1
        most = LARGEST_OF.get(key, LARGEST)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CheckpointError(
                f"config.json: {key} must be a whole number of at least {least}, found {value!r:.100}"
            )
        if value > most:
            raise CheckpointError(f"config.json: {key} is {value}, expected at most {most}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_float32(value):
            raise CheckpointError(f"config.json: {key} must be a number that float32 holds, found {value!r:.100}")
        return float(value)

    def positive(self, key: str, default: Any = _MISSING) -> float:
        """A number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise CheckpointError(f"config.json: {key} must be a positive number, found {value!r}")
        return value

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be true or false, found {value!r:.100}")
        return value

    def require(self, key: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Refuse a setting that this exporter does not compute."""
        value = self.raw(key, default)
        if value not in allowed:
            shown = " or ".join(repr(item) for item in allowed)
            raise CheckpointError(
                f"config.json: {key} is {value!r:.100}, only {shown} is supported for {self.model_type}"
            )

    def layer_types(self, count: int, known: tuple[str, ...], default: list[str] | None = None) -> list[str]:
        """What mixes tokens in each of ``count`` layers."""
        values = self.raw("layer_types", default) if default else self.raw("layer_types")
        if not isinstance(values, list) or len(values) != count or not all(value in known for value in values):
            raise CheckpointError(
                f"config.json: layer_types must be {count} of {', '.join(known)}, found {values!r:.200}"
            )
        return values

    def token_ids(self, key: str) -> list[int]:
        """Token ids that may be written as one number, a list, or left out."""
        value = self.values.get(key, self.defaults.get(key))
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
            raise CheckpointError(f"config.json: {key} must be a token id or a list of them, found {value!r:.100}")
        return list(values)

    def unread(self) -> list[str]:
        """Keys with a value that neither the family nor the list of harmless ones accounts for."""
        return sorted(
            key
            for key, value in self.values.items()
            if value not in (None, False, [], {}) and key not in self.read and key not in IGNORED
        )


def check_text_config(config: Config) -> None:
    """CheckpointError for a text model inside a larger one that is not the one that is supported there."""
    expected = WHOLES.get(config.model_type)
    nested = config.outer.get("text_config") or {}
    if expected is None or nested.get("model_type") == expected:
        return
    found = nested.get("model_type")
    shown = "missing" if found is None else f"{found!r:.100}"
    raise CheckpointError(
        f"config.json: text_config.model_type is {shown}, only {expected!r} is supported for {config.model_type}:"
        " lesonnx exports Mixture-of-Experts models only"
    )


def _is_float32(value: float) -> bool:
    """Whether a number is finite, and stays so in float32."""
    return -FLOAT32_MOST <= value <= FLOAT32_MOST


def unknown_family(model_type: str, supported: list[str]) -> CheckpointError:
    """The error for a model_type that has no file under ``architectures/``."""
    nearest = difflib.get_close_matches(model_type, supported, n=1, cutoff=0.0)
    hint = f"; the nearest is {nearest[0]}" if nearest else ""
    return CheckpointError(
        f"config.json: model_type {model_type!r:.100} is not supported, expected one of {', '.join(supported)}{hint}"
    )
