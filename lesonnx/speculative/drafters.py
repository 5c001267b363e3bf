"""The drafters by the names that ``--draft`` knows. It makes them and knows nothing of how they draft."""

from __future__ import annotations

from pathlib import Path

from lesonnx.bundle import Bundle
from lesonnx.errors import InputError
from lesonnx.speculative.draft_model import DraftModelDrafter
from lesonnx.speculative.drafter import Drafter
from lesonnx.speculative.dspark import DSparkDrafter
from lesonnx.speculative.ngram import NgramDrafter

NO_DRAFTER = "none"
DRAFTERS = ("ngram", "draft-model", "dspark", "mtp")


def check_drafter(name: str, draft_model: Path | str | None) -> None:
    """InputError for a name that is none, and where a draft model is missing or given in vain."""
    if name not in (NO_DRAFTER, *DRAFTERS):
        raise InputError(f"drafter {name!r} is not one of {', '.join((NO_DRAFTER, *DRAFTERS))}")
    if name == "draft-model" and draft_model is None:
        raise InputError("drafter draft-model needs the bundle that drafts: give --draft-model BUNDLE")
    if name != "draft-model" and draft_model is not None:
        raise InputError(f"a draft model was given, but the drafter is {name}: expected draft-model")


def make_drafter(
    name: str,
    bundle: Bundle,
    draft_model: Path | str | None = None,
    engine: str = "auto",
    num_threads: int | None = None,
) -> Drafter | None:
    """The drafter of that name for a bundle; None for ``none``. InputError where the bundle has no such drafter."""
    check_drafter(name, draft_model)
    if name == "ngram":
        return NgramDrafter()
    if name == "draft-model" and draft_model is not None:
        return DraftModelDrafter(bundle, Bundle(draft_model), engine, num_threads)
    if name == "dspark":
        return DSparkDrafter(bundle, num_threads)
    if name in DRAFTERS:
        raise InputError(f"{bundle.directory}: this bundle has no {name} drafter")
    return None
