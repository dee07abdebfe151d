"""What is served: the model of a run or an exported folder, checked, warm, and replaced when a newer one is there."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultr.errors import DataError, UltrError
from ultr.exported import ABOUT, LIBRARY_FILES, is_exported, load_exported, onnx_scores, onnx_session
from ultr.files import fingerprint
from ultr.serving.convert import network_to_onnx
from ultr.serving.wire import RequestError

VERSION_DIGITS = 12
WARM_UP_ROWS, WARM_UPS = 64, 3

Score = Callable[[np.ndarray], np.ndarray]  # [rows, features] -> [rows]


@dataclass(frozen=True, eq=False)
class Scorer:
    """A model that is ready to score."""

    version: str  # of its files' content
    platform: str
    feature_names: tuple[str, ...]
    sizes: dict[int, int]  # column of codes -> the largest code
    missing: bool  # whether NaN is a value like others
    score: Score
    seconds_per_row: float

    def check(self, features: np.ndarray) -> None:
        """Refuse features that are no numbers the model knows what to do with."""
        odd = np.isinf(features) if self.missing else ~np.isfinite(features)
        if odd.any():
            row, column = (int(i) for i in np.argwhere(odd)[0])
            what = f"'{self.feature_names[column]}' of row {row} is not finite as a 32-bit number"
            mend = (
                "send NaN for what is missing" if self.missing else "send finite numbers; this model needs all of them"
            )
            raise RequestError(what, got=features[row, column], mend=mend)
        for column, largest in self.sizes.items():
            codes = features[:, column]
            odd = ~((codes >= 0) & (codes <= largest) & (codes == np.floor(codes)) | np.isnan(codes))
            if odd.any():
                row = int(np.argmax(odd))
                what = f"'{self.feature_names[column]}' of row {row} is no code of a category"
                raise RequestError(what, got=codes[row], mend=f"send 0 (not known) to {largest}, as in {ABOUT}")

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Scores of rows that have been checked."""
        scores = self.score(features) if len(features) else np.zeros(0, np.float32)
        if not np.isfinite(scores).all():
            row = int(np.argmin(np.isfinite(scores)))
            mend = "send features like those it was trained on"
            raise RequestError(f"the model has no finite score for row {row}", got=scores[row], mend=mend)
        return scores


def load_scorer(folder: Path, *, gently: bool = False) -> Scorer:
    """The model of a finished run or an exported folder, after a first few scores; its files must not change meanwhile.

    Only trees of a run bring torch with them. What is done `gently` leaves the processor to those who ask.
    """
    files = folder if is_exported(folder) else folder / "model"
    if not (files / ABOUT).is_file():
        mend = "name a finished run, or a folder that ultr export wrote"
        raise DataError("there is no model here", where=folder, mend=mend)
    before = fingerprint(files)
    platform, names, vocabularies, missing, score = _exported(folder) if files == folder else _run(folder, gently)
    if fingerprint(files) != before:
        raise DataError("the model changed while it was read", where=folder, mend="try again")
    sizes = {names.index(name): size for name, size in vocabularies.items()}
    best = min(_seconds(score, len(names)) for _ in range(WARM_UPS)) / WARM_UP_ROWS
    return Scorer(before[:VERSION_DIGITS], platform, names, sizes, missing, score, best)


def _seconds(score: Score, features: int) -> float:
    start = time.perf_counter()
    scores = score(np.zeros((WARM_UP_ROWS, features), np.float32))
    if scores.shape != (WARM_UP_ROWS,) or not np.isfinite(scores).all():
        raise DataError("the model does not give a finite score for each row", mend="train again")
    return time.perf_counter() - start


Parts = tuple[str, tuple[str, ...], dict[str, int], bool, Score]


def _exported(folder: Path) -> Parts:
    found = load_exported(folder)
    if not found.has_onnx:
        mend = "serve the run that it was exported from"
        raise DataError("these trees have no ONNX, so they are not served from here", where=folder, mend=mend)
    sizes = {name: len(values) for name, values in found.vocabularies.items()}
    return "onnxruntime", found.feature_names, sizes, found.keeps_missing, _onnx(found.onnx(), folder)


def _onnx(content: bytes, where: Path) -> Score:
    session = onnx_session(content, threads=1, where=where)
    return lambda features: onnx_scores(session, features[None])[0]


def _run(folder: Path, gently: bool) -> Parts:
    if any((folder / "model" / name).is_file() for name in LIBRARY_FILES):
        return _trees(folder)
    content = network_to_onnx(folder, gently=gently)  # which has read all of the model, and so knows it to be whole
    about = json.loads((folder / "model" / ABOUT).read_text())
    sizes = {name: len(values) for name, values in about["vocabularies"].items()}
    return "onnxruntime", tuple(about["feature_names"]), sizes, False, _onnx(content, folder)


def _trees(folder: Path) -> Parts:
    """A run's trees, scored by the library that grew them."""
    import torch

    from ultr.models import load_model
    from ultr.rankers.boosters import TreeRanker

    torch.set_num_threads(1)  # requests are what is done side by side
    model = load_model(folder)
    if not isinstance(model.ranker, TreeRanker):
        raise DataError("its files are of another ranker", where=folder, mend="train again")
    sizes = {name: len(values) for name, values in model.vocabularies.items()}
    lock = threading.Lock()  # the libraries set their number of threads at each call

    def score(features: np.ndarray) -> np.ndarray:
        with lock:
            return model.score_features(features)

    return model.ranker.booster.LIBRARY, model.feature_names, sizes, True, score


class Served:
    """The model that answers now; `look` takes a newer one, and keeps this one where there is none that can be used."""

    def __init__(self, folder: Path, *, say: Callable[[str], None] = lambda _: None) -> None:
        self.folder, self.say = folder, say
        self._seen = identity(folder)
        self._gone = False
        self.scorer = load_scorer(folder.resolve())
        self.heard: Callable[[bool], None] = lambda _: None  # told of each newer model whether it was taken

    def look(self) -> None:
        """Take the model that is there now, if it is another; whoever holds the old one finishes with it."""
        there = identity(self.folder)
        if there is None:
            if not self._gone:
                self.say(f"{self.folder} has no model now; version {self.scorer.version} serves on")
            self._gone = True
            return
        self._gone = False
        if there == self._seen:
            return
        try:
            newer, wrong = load_scorer(self.folder.resolve(), gently=True), None
        except Exception as error:  # whatever is wrong with it, the old one is still right
            newer, wrong = None, error
        if identity(self.folder) != there:
            return  # it changed meanwhile: the next look takes it
        self._seen = there
        if newer is None:
            text = str(wrong) if isinstance(wrong, UltrError) else f"{type(wrong).__name__}: {wrong}"
            self.say(f"the newer model is not taken ({text}); version {self.scorer.version} serves on")
        elif newer.version == self.scorer.version:
            return
        else:
            old, self.scorer = self.scorer, newer
            change = (
                "" if newer.feature_names == old.feature_names else f", of {len(newer.feature_names)} other features"
            )
            self.say(f"version {newer.version} serves now{change}; it was {old.version}")
        self.heard(newer is not None)


def identity(folder: Path) -> tuple[object, ...] | None:
    """What tells one model's files from another's without reading them, or None where there is no model."""
    try:
        resolved = folder.resolve()
        files = resolved if is_exported(resolved) else resolved / "model"
        if not (files / ABOUT).is_file():
            return None
        entries = sorted((entry.name, entry.stat()) for entry in os.scandir(files))
        return (str(files), *((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in entries))
    except OSError:
        return None


class Watch:
    """A thread that looks for a newer model every so many seconds."""

    def __init__(self, served: Served, seconds: float) -> None:
        self._served, self._seconds, self._stopped = served, seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, name="ultr-watch")

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self._served.look()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
