"""A bundle on disk: its manifest, its files, and whether they are whole. It knows no arithmetic and no session."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lesonnx.errors import BundleError
from lesonnx.external import external_files
from lesonnx.manifest import ExpertKind, ExpertLayer, Manifest, Part, check_path, parse_manifest

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert of a bundle. ``number`` counts all, layer by layer, a layer's shared one after its routed ones.

    ``expert_idx`` is None for a shared expert; ``offset_bytes`` is where it starts in its layer's pack.
    """

    number: int
    layer_idx: int
    expert_idx: int | None
    kind: ExpertKind
    kind_idx: int
    offset_bytes: int

    @property
    def cost_bytes(self) -> int:
        return self.kind.cost_bytes

    def __str__(self) -> str:
        name = "shared expert" if self.expert_idx is None else f"expert {self.expert_idx}"
        return f"layer {self.layer_idx} {name}"


class Bundle:
    """An opened bundle directory. Immutable after construction, safe to share between threads."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        path = self.directory / "manifest.json"
        if not self.directory.is_dir():
            raise BundleError(f"{self.directory}: no such bundle directory")
        if not path.exists():
            raise BundleError(f"{self.directory}: not a bundle, it holds no manifest.json")
        try:
            text = self.file(path.name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{path}: not readable: {error}") from None
        self.manifest: Manifest = parse_manifest(text, str(path))
        self._layers = {layer.layer_idx: layer for layer in self.manifest.expert_layers}
        self._check_files()

    def _check_files(self) -> None:
        drafter, vision = self.manifest.drafter, self.manifest.vision
        for part in (*self.manifest.parts, *(drafter.parts if drafter else ()), *(vision.parts if vision else ())):
            self.file(part.path)
        if vision:
            self._check_data(self.file(vision.part("vision_tower").path), self.file(vision.data))
        if twins := self.manifest.twins:
            self.file(twins.data)
            for relative in {model.path for model in (*twins.helpers, *twins.parts)}:
                self.file(relative)
        for kind in self.manifest.expert_kinds:
            if kind.stage is not None:
                self.file(kind.stage)
        for layer in self.manifest.expert_layers:
            pack = self.file(layer.pack)
            expected = self.pack_bytes(layer)
            if pack.stat().st_size != expected:
                raise BundleError(f"{pack}: has {pack.stat().st_size:,} bytes, expected {expected:,}; export again")
        # Thousands of small files: one listing a layer instead of a look at each.
        plain = {
            layer_idx: {entry.name for entry in os.scandir(self.pack_file(layer_idx).parent) if not entry.is_symlink()}
            for layer_idx in self._layers
        }
        for expert in self.experts:
            path = self.model_file(expert)
            if path.name not in plain[expert.layer_idx]:
                self.file(path.relative_to(self.directory).as_posix())

    def _check_data(self, model: Path, data: Path) -> None:
        """BundleError unless a model's weights are in a file, and in no other: budgets count its size."""
        try:
            found = external_files(model)
        except OSError as error:
            raise BundleError(f"{model}: not readable: {error.strerror or error}") from None
        if {os.path.normpath(model.parent / name) for name in found} != {os.path.normpath(data)}:
            names = ", ".join(sorted(found)) or "no file"
            raise BundleError(
                f"{model}: its weights are in {names}, expected {data.relative_to(self.directory)} as in the manifest"
            )

    def file(self, relative: str) -> Path:
        """A file of the bundle; BundleError where it is missing or a link leads out of the bundle."""
        path = self.directory / relative
        try:
            inside = path.resolve().is_relative_to(self.directory.resolve())
        except (OSError, RuntimeError):
            raise BundleError(f"{path}: a link that leads nowhere") from None
        if not inside:
            raise BundleError(f"{path}: leads out of the bundle")
        if not path.is_file():
            raise BundleError(f"{path}: missing from the bundle")
        return path

    def part_file(self, part: Part) -> Path:
        return self.file(part.path)

    # -- experts -----------------------------------------------------------------------------------------------------

    @cached_property
    def experts(self) -> list[Expert]:
        """Every expert by its number."""
        experts: list[Expert] = []
        kinds = self.manifest.expert_kinds
        for layer in self.manifest.expert_layers:
            stride = kinds[layer.kind].cost_bytes
            for expert_idx in range(layer.num_experts):
                kind = kinds[layer.kind]
                offset = expert_idx * stride
                experts.append(Expert(len(experts), layer.layer_idx, expert_idx, kind, layer.kind, offset))
            if layer.shared_kind is not None:
                kind = kinds[layer.shared_kind]
                offset = layer.num_experts * stride
                experts.append(Expert(len(experts), layer.layer_idx, None, kind, layer.shared_kind, offset))
        return experts

    def layer(self, layer_idx: int) -> ExpertLayer:
        return self._layers[layer_idx]

    def pack_file(self, layer_idx: int) -> Path:
        return self.directory / self._layers[layer_idx].pack

    def model_file(self, expert: Expert) -> Path:
        """An expert's own .onnx."""
        name = "shared.onnx" if expert.expert_idx is None else f"expert_{expert.expert_idx:03d}.onnx"
        return self.pack_file(expert.layer_idx).parent / name

    def pack_bytes(self, layer: ExpertLayer) -> int:
        kinds = self.manifest.expert_kinds
        shared = 0 if layer.shared_kind is None else kinds[layer.shared_kind].cost_bytes
        return layer.num_experts * kinds[layer.kind].cost_bytes + shared

    @property
    def expert_bytes(self) -> int:
        """All experts together."""
        return sum(self.pack_bytes(layer) for layer in self.manifest.expert_layers)

    def layer_demand_bytes(self, layer: ExpertLayer) -> int:
        """What one token needs of a layer: k experts and the shared one."""
        kinds = self.manifest.expert_kinds
        shared = 0 if layer.shared_kind is None else kinds[layer.shared_kind].cost_bytes
        return layer.num_experts_per_tok * kinds[layer.kind].cost_bytes + shared

    @property
    def least_budget_bytes(self) -> int:
        """The least expert budget: the largest layer's demand."""
        return max(self.layer_demand_bytes(layer) for layer in self.manifest.expert_layers)

    @property
    def token_demand_bytes(self) -> int:
        """What one token needs of all layers; under this a cache cannot hold from one token to the next."""
        return sum(self.layer_demand_bytes(layer) for layer in self.manifest.expert_layers)

    # -- integrity ---------------------------------------------------------------------------------------------------

    def verify(self, progress: Callable[[int], None] = lambda num_bytes: None) -> int:
        """Compare every file with ``checksums.json``; gives their number. BundleError names the first that differs."""
        path = self.file("checksums.json")
        entries = read_checksums(path)
        # A link to a directory is not walked into: it counts as a file, one that nobody named.
        found = (p for p in self.directory.rglob("*") if p.is_symlink() or not p.is_dir())
        present = {p.relative_to(self.directory).as_posix() for p in found}
        for name in sorted(present - set(entries) - {"checksums.json"}):
            raise BundleError(f"{self.directory / name}: is not named in checksums.json")
        for name, (size, digest) in entries.items():
            file_path = self.file(name)
            if file_path.stat().st_size != size:
                raise BundleError(f"{file_path}: has {file_path.stat().st_size:,} bytes, checksums.json says {size:,}")
            sha = hashlib.sha256()
            with file_path.open("rb") as file:
                while block := file.read(READ_BYTES):
                    sha.update(block)
                    progress(len(block))
            if sha.hexdigest() != digest:
                raise BundleError(f"{file_path}: SHA-256 differs from checksums.json; the file is corrupt")
        return len(entries)


def read_checksums(path: Path) -> dict[str, tuple[int, str]]:
    """``checksums.json``: name -> size and SHA-256. BundleError for anything in it that is not as the format says."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(document, dict) or set(document) != {"algorithm", "files"} or document["algorithm"] != "sha256":
        raise BundleError(f"{path}: expected an object of algorithm, which is sha256, and files")
    if not text.endswith("}\n"):
        raise BundleError(f"{path}: does not end in a line's end; the file is cut off")
    entries: dict[str, tuple[int, str]] = {}
    if not isinstance(document["files"], dict):
        raise BundleError(f"{path}: files: expected an object")
    for name, entry in document["files"].items():
        if not isinstance(entry, dict) or set(entry) != {"size_bytes", "sha256"}:
            raise BundleError(f"{path}: {name}: expected size_bytes and sha256")
        try:
            check_path(name)
        except ValueError as error:
            raise BundleError(f"{path}: {error}") from None
        entries[name] = (entry["size_bytes"], entry["sha256"])
    return entries
