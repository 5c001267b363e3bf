"""The bundle's contract: what ``manifest.json`` says, as strict frozen models.

It knows nothing of files beyond their relative names, nor of ONNX Runtime. The JSON schema is checked in as
``manifest.schema.json`` beside this file; the Kotlin and Swift runtimes read the same document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from lesonnx.drafter_wiring import check_drafter
from lesonnx.errors import BundleError, InputError
from lesonnx.twin_wiring import check_twins
from lesonnx.vision_wiring import check_vision
from lesonnx.wiring import check_wiring

FORMAT_VERSION = 1
PAGE_BYTES = 4096
TENSOR_ALIGNMENT_BYTES = 64
MATRIX_NAMES = ("gate_proj", "up_proj", "down_proj")

Activation = Literal["swiglu", "geglu", "reglu", "swiglu_clamped"]
Bits = Literal[2, 4, 8, 32]
Dtype = Literal["float32", "float16", "int64", "int32", "bool", "uint8", "int8"]
Target = Literal["desktop", "android", "ios"]
Role = Literal["system", "user", "assistant"]
DrafterRole = Literal["drafter_context", "drafter_block", "drafter_markov"]
VisionRole = Literal["vision_prepare", "vision_tower"]
PartRole = Literal["embed", "segment", "mixer", "head", "lookahead", "replay"] | DrafterRole | VisionRole


def check_path(path: str) -> str:
    """A path as the bundle's files are named; ValueError where it could leave the bundle."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path or ":" in path:
        raise ValueError(f"path {path!r} must be relative and stay inside the bundle")
    return path


BundlePath = Annotated[str, AfterValidator(check_path)]
# No count of a model or a file is larger; what is, would only exhaust the memory of whoever believes it.
Count = Annotated[int, Field(ge=1, le=1 << 48)]
Size = Annotated[int, Field(ge=1, le=1 << 31)]
Offset = Annotated[int, Field(ge=0, le=1 << 48)]
# Of pictures: pixels a side of a patch, and all of a picture's. What is larger would only become text without end.
PatchSize = Annotated[int, Field(ge=1, le=1 << 10)]
Pixels = Annotated[int, Field(ge=1, le=1 << 28)]


class Strict(BaseModel):
    """Base of every record: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def page_ceil(length_bytes: int) -> int:
    """The length rounded up to whole pages of 4096 bytes."""
    return -(-length_bytes // PAGE_BYTES) * PAGE_BYTES


class ExpertMatrix(Strict):
    """One linear map of an expert, ``y = x W^T (+ bias)``, with W of shape [rows, columns] (out, in).

    Quantized (bits 2, 4, 8): the weight is uint8 [rows, ceil(columns / block_size), block_size * bits / 8], low bits
    first, zero point ``2 ** (bits - 1)``; scales float32 [rows, blocks]. That is ``MatMulNBits``'s own layout.
    Float (bits 32): row-major float32 [rows, columns], ``block_size`` 0, no scales. A bias is float32 [rows].
    Offsets count from the start of the expert.
    """

    rows: Count
    columns: Count
    bits: Bits
    block_size: Literal[0, 16, 32, 64, 128]
    weight_offset_bytes: Offset
    scales_offset_bytes: Offset | None = None
    bias_offset_bytes: Offset | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ExpertMatrix:
        if (self.bits == 32) != (self.block_size == 0) or (self.bits == 32) != (self.scales_offset_bytes is None):
            raise ValueError("block_size and scales belong to quantized matrices, and to every one of them")
        return self

    @property
    def num_blocks(self) -> int:
        """Quantization blocks along a row, the last one padded; 0 for a float matrix."""
        return -(-self.columns // self.block_size) if self.block_size else 0

    @property
    def weight_bytes(self) -> int:
        if self.bits == 32:
            return self.rows * self.columns * 4
        return self.rows * self.num_blocks * self.block_size * self.bits // 8

    @property
    def scales_bytes(self) -> int:
        return self.rows * self.num_blocks * 4


class ExpertKind(Strict):
    """Experts that share shape, bits and activation, so that one ``stage_n.onnx`` computes any of them.

    With g and u the gate and up projections of x, an expert gives ``down(act(g) * u)``: act is SiLU for ``swiglu``,
    GELU (tanh form) for ``geglu``, ReLU for ``reglu``. ``swiglu_clamped`` (gpt-oss) is
    ``(u' + 1) * g' * sigmoid(alpha * g')`` with g' = min(g, limit) and u' = clamp(u, -limit, limit).
    """

    name: str
    hidden_size: Count
    intermediate_size: Count
    activation: Activation
    alpha: float = 1.702
    limit: float = 7.0
    gate_proj: ExpertMatrix
    up_proj: ExpertMatrix
    down_proj: ExpertMatrix
    length_bytes: Count
    stage: BundlePath | None = None

    @model_validator(mode="after")
    def _shapes(self) -> ExpertKind:
        for name, matrix in self.matrices.items():
            hidden_first = name == "down_proj"
            rows = self.hidden_size if hidden_first else self.intermediate_size
            columns = self.intermediate_size if hidden_first else self.hidden_size
            if (matrix.rows, matrix.columns) != (rows, columns):
                raise ValueError(f"{name} is [{matrix.rows},{matrix.columns}], expected [{rows},{columns}]")
            ends = [matrix.weight_offset_bytes + matrix.weight_bytes]
            if matrix.scales_offset_bytes is not None:
                ends.append(matrix.scales_offset_bytes + matrix.scales_bytes)
            if matrix.bias_offset_bytes is not None:
                ends.append(matrix.bias_offset_bytes + matrix.rows * 4)
            if max(ends) > self.length_bytes:
                raise ValueError(f"{name} ends at byte {max(ends)}, beyond the expert's {self.length_bytes}")
        return self

    @property
    def matrices(self) -> dict[str, ExpertMatrix]:
        return {name: getattr(self, name) for name in MATRIX_NAMES}

    @property
    def precision(self) -> str:
        """Bits and block size as people read them: ``4 (64)``, by matrix where these differ; ``32`` for float32."""
        shown = [f"{m.bits} ({m.block_size})" if m.block_size else str(m.bits) for m in self.matrices.values()]
        return shown[0] if len(set(shown)) == 1 else ", ".join(shown)

    @property
    def cost_bytes(self) -> int:
        """What one expert of this kind costs in the cache and on flash: its length in whole pages."""
        return page_ceil(self.length_bytes)


class ExpertLayer(Strict):
    """The experts of one MoE layer: expert e lies at ``e * stride`` of the pack, a shared expert after the last."""

    layer_idx: Offset
    pack: BundlePath
    num_experts: Count
    num_experts_per_tok: Count
    kind: Offset
    shared_kind: Offset | None = None


class Value(Strict):
    """A tensor that a part takes or gives.

    Symbolic dimensions: T tokens of the step, R logit rows, S capacity, P tokens in a drafter's caches,
    Y and X height and width of a picture, W columns of packed patches, I image tokens.
    """

    name: str
    dtype: Dtype
    shape: list[int | str]


class Provider(Strict):
    """An execution provider and its options, as ONNX Runtime names them."""

    name: str
    options: dict[str, str] = {}


class Part(Strict):
    """A dense ONNX model of the bundle. Roles that begin with ``drafter_`` and ``vision_`` are those of its parts."""

    name: str
    role: PartRole
    path: BundlePath
    layer_idx: Offset | None = None
    inputs: list[Value]
    outputs: list[Value]
    providers: dict[Target, list[Provider]] = {}


class Replay(Strict):
    """How a state of fixed shape goes back to a token inside the last step.

    ``part``, of role ``replay``, takes ``past`` (the state before the step) and some of the step's rows, and gives
    ``present``, the state after them. ``rows`` names, for each of its other inputs, the output [1, T, n] of the state's
    own part that holds a step's rows.
    """

    part: str
    rows: Annotated[dict[str, str], Field(min_length=1)]


class State(Strict):
    """A tensor that a part carries from step to step: ``input`` and ``output`` of ``part``, zero at the start.

    Attention states are [1, kv heads, S, head size]; past and present are one buffer of the host's, of any capacity S
    that holds the tokens so far and those of the step. Convolution and recurrent states have a fixed shape, past and
    present are two buffers, and ``replay`` says how to go back into a step.
    """

    name: str
    kind: Literal["attention_key", "attention_value", "convolution", "recurrent"]
    layer_idx: Offset
    part: str
    input: str
    output: str
    dtype: Dtype
    shape: list[int | str]
    replay: Replay | None = None

    @model_validator(mode="after")
    def _kinds_shape(self) -> State:
        sizes = [size for size in self.shape if isinstance(size, int)]
        bounded = all(0 < size < 1 << 20 for size in sizes)
        if self.is_attention:
            if len(self.shape) != 4 or self.shape[2] != "S" or len(sizes) != 3 or not bounded:
                raise ValueError(f"shape {self.shape} of state {self.name!r} is not [1, heads, 'S', size]")
        elif not sizes or len(sizes) != len(self.shape) or not bounded:
            raise ValueError(f"shape {self.shape} of state {self.name!r} is not fixed")
        if self.is_attention != (self.replay is None):
            raise ValueError(f"state {self.name!r} of kind {self.kind}: replay belongs to states of fixed shape")
        return self

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = handler(self)
        if self.replay is None:
            del document["replay"]
        return document

    @property
    def is_attention(self) -> bool:
        return self.kind.startswith("attention_")

    @property
    def row_names(self) -> list[str]:
        """The outputs of the state's part that a replay takes."""
        return [] if self.replay is None else list(self.replay.rows.values())


class Selection(Strict):
    """A segment's router after its logits, for the CPU provider: what its twins end at -> what the segment gives."""

    part: str
    path: BundlePath
    inputs: list[Value]
    outputs: list[Value]


class Positions(Strict):
    """What all twins of a step take beside activations and caches, for the CPU provider; run once a step."""

    path: BundlePath
    inputs: list[Value]
    outputs: list[Value]


class Twin(Strict):
    """A part once more, with fixed shapes, of operators that accelerators take; for steps of exactly ``rows`` tokens.

    All sizes of its inputs and outputs are numbers. ``providers`` in order of preference; no target, no use there.
    """

    part: str
    rows: Count
    path: BundlePath
    inputs: list[Value]
    outputs: list[Value]
    providers: dict[Target, list[Provider]] = {}


class Twins(Strict):
    """Twins of segments and head, and what they need; see docs/bundle.md.

    ``capacity_tokens`` is the capacity of attention caches that twins take. Twins round otherwise than their parts:
    results of a step depend on which of them it used, so bits are not the same over step widths.
    """

    capacity_tokens: Count
    float_bits: Literal[16, 32]
    exact_over_widths: Literal[False] = False
    data: BundlePath
    positions: Positions
    selections: list[Selection]
    parts: Annotated[list[Twin], Field(min_length=1)]

    @property
    def helpers(self) -> list[Positions | Selection]:
        """What runs on the CPU provider beside twins."""
        return [self.positions, *self.selections]

    def of(self, part: str, rows: int) -> Twin | None:
        """A part's twin for steps of that many tokens."""
        return next((twin for twin in self.parts if (twin.part, twin.rows) == (part, rows)), None)


class Drafter(Strict):
    """A block drafter trained for the model, and its parts; see docs/bundle.md.

    ``target_layer_ids``: the layers whose outputs it reads, in their order; -1 is the embedding's. A slot of the block
    is one drafted token. Its caches are the outputs of the context part, which the block part takes for all tokens.
    """

    kind: Literal["dspark"]
    block_size: Annotated[int, Field(ge=1, le=1 << 8)]
    mask_token_id: Offset
    target_layer_ids: Annotated[list[Annotated[int, Field(ge=-1, le=1 << 16)]], Field(min_length=1)]
    markov_rank: Size
    num_parameters: Count
    parts: list[Part]

    def part(self, role: DrafterRole) -> Part:
        """The part of a role."""
        return next(part for part in self.parts if part.role == role)

    @property
    def cache_sizes(self) -> dict[str, int]:
        """The float32 values that a token has in each cache."""
        return {value.name: int(value.shape[-1]) for value in self.part("drafter_context").outputs}

    @property
    def has_confidence(self) -> bool:
        """Whether the Markov part says how likely its slot is accepted."""
        return any(value.name == "confidence" for value in self.part("drafter_markov").outputs)


class VisionTokens(Strict):
    """Token ids by which positions are given: image tokens, and the marks around pictures, slices and their rows."""

    image: Offset
    image_start: Offset
    image_end: Offset
    slice_start: Offset
    slice_end: Offset
    newline: Offset


class VisionTexts(Strict):
    """The text that stands for pictures in a prompt.

    A prompt has one ``placeholder`` a picture; it becomes a mark, one placeholder a token of the overview, a mark, and
    so on, see docs/bundle.md. ``id_start`` and ``id_end`` stand around a picture's number, both None where it has none.
    ``separator`` comes between a picture and what follows it in a message of a chat; None where there is no chat.
    """

    placeholder: Annotated[str, Field(min_length=1)]
    image_start: str
    image_end: str
    slice_start: str
    slice_end: str
    row_end: str
    id_start: str | None = None
    id_end: str | None = None
    separator: str | None = None

    @property
    def picture(self) -> str:
        """What a prompt, or a message of a chat, has for a picture."""
        return self.placeholder


class Vision(Strict):
    """How pictures come in: what prepares and reads them, and how they are cut, marked and placed; docs/bundle.md.

    A picture is seen whole, as its overview, and in up to ``max_slice_nums`` slices of about ``scale_resolution``
    squared pixels (1: none). ``token_patches`` patches a side, each of ``patch_size`` pixels, give an image token.
    ``working_bytes`` is what the tower takes for the largest crop, beside the weights in ``data``.
    """

    kind: Literal["minicpmv"]
    parts: list[Part]
    data: BundlePath
    patch_size: PatchSize
    token_patches: Literal[2, 4]
    scale_resolution: Annotated[int, Field(ge=1, le=1 << 13)]
    max_slice_nums: Annotated[int, Field(ge=1, le=1 << 8)]
    tokens: VisionTokens
    texts: VisionTexts
    num_parameters: Count
    working_bytes: Count

    @property
    def deepstack_layers(self) -> int:
        """Features take the place of embeddings alone."""
        return 0

    def part(self, role: VisionRole) -> Part:
        """The part of a role."""
        return next(part for part in self.parts if part.role == role)


class Qwen3VLTokens(Strict):
    """Token ids by which positions are given: the marks around a picture count as text."""

    image: Offset


class Qwen3VLTexts(Strict):
    """The text that stands for pictures in a prompt: ``placeholder`` becomes one placeholder an image token.

    ``picture`` is what a message of a chat has for a picture, marks around a placeholder; ``separator`` as everywhere.
    """

    placeholder: Annotated[str, Field(min_length=1)]
    picture: Annotated[str, Field(min_length=1)]
    separator: str | None = None


class Qwen3VLVision(Strict):
    """As `Vision`, of Qwen3-VL: a picture is seen whole, in as many pixels as it has.

    Between ``min_pixels`` and ``max_pixels``, that is. Beside features that take the place of embeddings the tower
    gives some that are added behind each of the first ``deepstack_layers`` layers.
    """

    kind: Literal["qwen3_vl"]
    parts: list[Part]
    data: BundlePath
    patch_size: PatchSize
    token_patches: Literal[2]
    min_pixels: Pixels
    max_pixels: Pixels
    deepstack_layers: Count
    tokens: Qwen3VLTokens
    texts: Qwen3VLTexts
    num_parameters: Count
    working_bytes: Count

    def part(self, role: VisionRole) -> Part:
        """The part of a role."""
        return next(part for part in self.parts if part.role == role)


AnyVision = Annotated[Vision | Qwen3VLVision, Field(discriminator="kind")]


class ModelFacts(Strict):
    """What a host must know of the model; names as Hugging Face spells them."""

    model_type: str
    hidden_size: Size
    num_hidden_layers: Size
    vocab_size: Size
    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    max_position_embeddings: Size
    num_parameters: Count
    num_active_parameters: Count
    eos_token_ids: list[Offset] = []
    bos_token_id: Offset | None = None
    pad_token_id: Offset | None = None


class CalibratedLayer(Strict):
    """What rounding the experts of a MoE layer, its shared one included, is expected to cost: nats of KL a token."""

    layer_idx: Offset
    expected_loss: Annotated[float, Field(ge=0)]


class Calibration(Strict):
    """How experts were quantized for what they do on a text.

    ``text_sha256`` is that of the text in UTF-8, None where random tokens had to do; ``num_tokens`` of it were run.
    With a ``target_size`` bits and blocks were chosen layer by layer, so that all experts take at most that share of
    ``baseline_bytes``: uniform 4 bits at the bundle's block size, in whole pages an expert. Losses are by MoE layer.
    """

    text_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None
    num_tokens: Count
    target_size: Annotated[float, Field(gt=0)] | None = None
    baseline_bytes: Count
    layers: list[CalibratedLayer]


class Quantization(Strict):
    """How the weights are stored: bits and block sizes of experts and dense parts.

    Experts may differ from ``expert_bits`` and ``block_size``, layer by layer and matrix by matrix: their kinds say
    how. Both are what was asked for, or, with a target size, what it is counted from.
    """

    expert_bits: Bits
    dense_bits: Literal[4, 8, 32]
    kv_bits: Literal[8, 16, 32] = 32
    block_size: Literal[0, 16, 32, 64, 128]
    calibration: Calibration | None = None

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = handler(self)
        if self.calibration is None:
            del document["calibration"]
        return document


class ChatTurn(Strict):
    """What stands before and after the content of a message of one role."""

    prefix: str
    suffix: str


class ChatFormat(Strict):
    """The chat template as plain text, for hosts that run no Jinja; see `join`.

    It stands for conversations of an optional system message, then user and assistant messages in turns, a user's last.
    For these it is exact, whatever their contents. A role that is not in ``messages`` cannot be used: without
    ``assistant`` a conversation is one question.
    """

    start: str
    messages: dict[Role, ChatTurn]
    answer: str

    @model_validator(mode="after")
    def _has_user(self) -> ChatFormat:
        if "user" not in self.messages:
            raise ValueError(f"messages has the roles {sorted(self.messages)}, expected user among them")
        return self

    def join(self, messages: Iterable[Mapping[str, str]]) -> str:
        """The prompt of a conversation, to be tokenized without special tokens around it.

        Messages are ``{"role", "content"}``. InputError for a role that the format does not have.
        """
        pieces = [self.start]
        for message in messages:
            turn = next((turn for role, turn in self.messages.items() if role == message["role"]), None)
            if turn is None:
                raise InputError(
                    f"a message has the role {message['role']!r}, the bundle's chat format has {sorted(self.messages)}"
                )
            pieces += [turn.prefix, message["content"], turn.suffix]
        return "".join([*pieces, self.answer])


class TokenizerFiles(Strict):
    """Where the tokenizer lies; ``onnx`` is None where onnxruntime-extensions cannot express it.

    ``chat_format`` is None where there is no chat template, or one that plain text cannot stand for.
    """

    json_path: BundlePath | None = None
    onnx: BundlePath | None = None
    config: BundlePath | None = None
    chat_template: BundlePath | None = None
    chat_format: ChatFormat | None = None


class Manifest(Strict):
    """The whole of ``manifest.json``."""

    format_version: Literal[1] = 1
    producer: str
    onnxruntime_at_least: Annotated[str, Field(pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){0,2}$")]
    model: ModelFacts
    quantization: Quantization
    prefill_chunk_tokens: Count = 512
    parts: list[Part]
    states: list[State]
    expert_kinds: list[ExpertKind]
    expert_layers: Annotated[list[ExpertLayer], Field(min_length=1)]
    tokenizer: TokenizerFiles | None = None
    twins: Twins | None = None
    drafter: Drafter | None = None
    vision: AnyVision | None = None
    skipped_tensors: dict[str, str] = {}

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = handler(self)
        if self.twins is None:
            del document["twins"]
        if self.drafter is None:
            del document["drafter"]
        if self.vision is None:
            del document["vision"]
        return document

    @model_validator(mode="after")
    def _references(self) -> Manifest:
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise ValueError("two parts have one name")
        for role in ("embed", "head"):
            if [part.name for part in self.parts if part.role == role] != [role]:
                raise ValueError(f"a bundle has exactly one {role} part, of that name")
        model = self.model
        if model.num_experts_per_tok > model.num_experts:
            raise ValueError(f"model: {model.num_experts_per_tok} experts a token of {model.num_experts}")
        for place, layer in enumerate(self.expert_layers):
            for key in ("num_experts", "num_experts_per_tok"):
                if getattr(layer, key) != getattr(model, key):
                    found, expected = getattr(layer, key), getattr(model, key)
                    raise ValueError(f"expert_layers.{place}: {key} is {found}, the model's is {expected}")
            for kind in (layer.kind, layer.shared_kind):
                if kind is not None and kind >= len(self.expert_kinds):
                    raise ValueError(f"layer {layer.layer_idx} names expert kind {kind} of {len(self.expert_kinds)}")
        calibration = self.quantization.calibration
        if calibration and [c.layer_idx for c in calibration.layers] != [e.layer_idx for e in self.expert_layers]:
            raise ValueError("quantization.calibration.layers are not the layers of expert_layers")
        check_wiring(self)
        if self.twins is not None:
            check_twins(self, self.twins)
        if self.drafter is not None:
            check_drafter(self, self.drafter)
        if self.vision is not None:
            check_vision(self, self.vision)
        return self

    @property
    def expert_bits(self) -> list[int]:
        """The bits that matrices of experts have, ascending: one number where all are alike."""
        used = {place for layer in self.expert_layers for place in (layer.kind, layer.shared_kind) if place is not None}
        return sorted({matrix.bits for place in used for matrix in self.expert_kinds[place].matrices.values()})

    @property
    def position_rows(self) -> int:
        """How many positions a token has: 3 (time, height, width) where pictures lie on a canvas, else 1."""
        return 3 if any(v.name == "position_ids" and len(v.shape) == 3 for p in self.parts for v in p.inputs) else 1

    @property
    def deepstack_layers(self) -> int:
        """Behind how many of the first layers something is added to image tokens."""
        return self.vision.deepstack_layers if self.vision else 0

    @property
    def residual_size(self) -> int:
        """The values of a token in what segments hand on as ``residual``: the hidden size, in Gemma 4 twice that."""
        return next(int(v.shape[-1]) for part in self.parts for v in part.outputs if v.name == "residual_out")

    def part(self, role: str, layer_idx: int | None = None) -> Part:
        """The part of a role (and layer); KeyError where there is none."""
        for part in self.parts:
            if part.role == role and (layer_idx is None or part.layer_idx == layer_idx):
                return part
        raise KeyError((role, layer_idx))


def parse_manifest(text: str, source: str = "manifest.json") -> Manifest:
    """The manifest in a JSON text; raises BundleError in one line that names the field."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{source}: not JSON: {error}") from None
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise BundleError(f"{source}: format_version is {version}, this lesonnx reads {FORMAT_VERSION}; export again")
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        loc = first["loc"]
        # Behind a record of which there are several kinds comes the kind, which is no field.
        loc = loc[:1] + loc[2:] if loc[:1] == ("vision",) else loc
        where = ".".join(map(str, loc)) or "document"
        raise BundleError(f"{source}: {where}: {first['msg']}") from None


def json_schema() -> str:
    """The JSON schema of the manifest, as checked in."""
    return json.dumps(Manifest.model_json_schema(), indent=1, sort_keys=True) + "\n"
