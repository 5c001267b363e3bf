"""Answers of a model that are kept in files: what evaluations share is run once.

A file's name says by a digest what it holds the answers of: bundle, task, tokens, engine, chunk, twins or not.
It is never stale.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from lesonnx import __version__
from lesonnx.errors import InputError
from lesonnx.model import Model
from lesonnx_export.evaluate.scoring import Answers


class KeptAnswers:
    """A directory of answers, or none: then nothing is kept. One writer a file; readers find it whole."""

    def __init__(self, directory: Path | None) -> None:
        """The directory is made by `check`, or when there is something to keep."""
        self._directory = directory

    def check(self) -> None:
        """Make the directory; InputError where it cannot be made, or no file in it."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory):
                pass
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"--keep {self._directory}: expected a directory to write into: {reason}") from None

    def find(self, model: Model, digest: str, num_items: int) -> Answers | None:
        """A model's answers to a task as certain tokens, told by their digest; None where they are not kept."""
        path = self._path(model, digest)
        if path is None or not zipfile.is_zipfile(path):
            return None
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = Answers(arrays["acc"].astype(np.bool_), arrays["acc_norm"].astype(np.bool_))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        return found if found.acc.shape == found.acc_norm.shape == (num_items,) else None

    def keep(self, model: Model, digest: str, answers: Answers) -> None:
        """Write answers, whole or not at all."""
        path = self._path(model, digest)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, acc=answers.acc, acc_norm=answers.acc_norm)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _path(self, model: Model, digest: str) -> Path | None:
        if self._directory is None:
            return None
        what = {
            "version": __version__,
            "bundle": hashlib.sha256(model.bundle.file("checksums.json").read_bytes()).hexdigest(),
            "task": digest,
            "engine": model.engine_name,
            "chunk": model.runner.prefill_chunk_tokens,
            "twins": bool(model.runner.twins.widths),
        }
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
        return self._directory / f"answers-{name}.npz"
