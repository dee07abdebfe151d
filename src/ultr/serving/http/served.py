"""The served model: loaded from a run or an exported folder, and replaced when a newer one is there."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ultr.errors import DataError, MissingExtraError, NetworkError, OptionError, UltrError
from ultr.serving.exported import ABOUT, Exported, is_exported, load_exported, onnx_scores
from ultr.serving.http import Say, silent
from ultr.serving.http.wire import RequestError
from ultr.utils.calibration import Calibration, of_model
from ultr.utils.files import fingerprint
from ultr.utils.stores import as_path, as_url, copy_here, named, stored_files

# --- Export in a process of its own -----------------------------------------------------------------------------------
# Export of a run in a separate process, so that a server does not load torch.
#
# Torch and its exporter would treble the server's memory, and delay requests while a newer model is exported.

LOW_PRIORITY = 5  # the niceness of an export while another model is served
CHECK_SECONDS = 0.2  # between checks whether to stop


def export_in_process(run: Path, out: Path, *, stopped: threading.Event | None = None) -> Path:
    """Export a finished run to the folder `out` in a separate process, as `export_run` does; return the folder.

    With `stopped`, the process has a low priority, and ends when the event is set.
    """
    error_file = out.with_name(f"{out.name}-error.txt")
    arguments = (str(run.resolve()), str(out), str(error_file), stopped is not None)
    process = multiprocessing.get_context("spawn").Process(target=_export, args=arguments, daemon=True)
    process.start()
    while process.is_alive():
        if stopped is not None and stopped.is_set():
            process.terminate()
        process.join(CHECK_SECONDS)
    if error_file.is_file():
        raise UltrError(error_file.read_text("utf-8"))
    if process.exitcode or not out.is_dir():
        raise UltrError(f"the export failed with exit code {process.exitcode}", where=run, hint="try again")
    return out


def _export(run: str, out: str, error_file: str, low_priority: bool) -> None:
    if low_priority:
        os.nice(LOW_PRIORITY)
    try:
        try:
            import torch

            from ultr.serving.export import export_run
        except ModuleNotFoundError as error:
            need = "serving a run that is not exported"
            raise MissingExtraError(need, package=error.name or "torch", extra="export") from error
        torch.set_num_threads(1)
        export_run(run, out)
    except UltrError as error:
        Path(error_file).write_text(str(error), "utf-8", "replace")


# --- The served model -------------------------------------------------------------------------------------------------

VERSION_DIGITS = 12
COPY = "copy"  # in a stage: the copy of a model that is not checked yet
WARM_UP_ROWS, WARM_UPS = 64, 10

Score = Callable[[np.ndarray], np.ndarray]  # [rows, features] -> [rows]


@dataclass(frozen=True, eq=False)
class Scorer:
    """A model that is ready to score."""

    version: str  # the beginning of a digest of its files
    feature_names: tuple[str, ...]
    vocabularies: Mapping[str, tuple[str, ...]]  # categorical feature -> its values; the code of a value is index + 1
    keeps_missing: bool  # True if NaN is a missing value, as for trees; False if it is an error
    score: Score
    seconds_per_row: float
    calibration: Calibration | None = None

    def expected(self, scores: np.ndarray, position: str) -> np.ndarray:
        """Return the expected feedback at a position, the first one if it is empty."""
        try:
            return of_model(self.calibration, "the served model").expected(scores, position or None)
        except OptionError as error:
            raise RequestError(error.what, got=error.got, hint=error.hint) from error

    @cached_property
    def largest_codes(self) -> dict[int, int]:
        """The largest code of each categorical column."""
        return {self.feature_names.index(name): len(values) for name, values in self.vocabularies.items()}

    def misreads(self, older: Scorer) -> str | None:
        """Return how this model would misread features that clients send for an older one, or None if it does not.

        A categorical feature may get more values, because the codes of the others stay the same.
        """
        if self.feature_names != older.feature_names:
            pairs = zip_longest(older.feature_names, self.feature_names)
            column, (old, new) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            return f"feature {column + 1} is {_or_absent(new)} in place of {_or_absent(old)}"
        for name in self.feature_names:
            old_values, values = older.vocabularies.get(name), self.vocabularies.get(name)
            if (old_values is None) != (values is None):
                return f"'{name}' is {'a number' if values is None else 'a category'} now"
            if old_values is not None and values is not None and values[: len(old_values)] != old_values:
                return f"the values of '{name}' have other codes"
        return None

    def check(self, features: np.ndarray) -> None:
        """Raise RequestError if the model cannot score these features."""
        invalid = np.isinf(features) if self.keeps_missing else ~np.isfinite(features)
        if invalid.any():
            row, column = (int(i) for i in np.argwhere(invalid)[0])
            what = f"'{self.feature_names[column]}' in row {row} is not finite as a 32-bit number"
            hint = "send NaN for a missing value" if self.keeps_missing else "send a finite number for every feature"
            raise RequestError(what, got=features[row, column], hint=hint)
        for column, largest in self.largest_codes.items():
            codes = features[:, column]
            invalid = ~((codes >= 0) & (codes <= largest) & (codes == np.floor(codes)) | np.isnan(codes))
            if invalid.any():
                row = int(np.argmax(invalid))
                what = f"'{self.feature_names[column]}' in row {row} is not a code of a category"
                hint = f"send a whole number from 1 to {largest}, the codes in {ABOUT}, or 0 for any other value"
                raise RequestError(what, got=codes[row], hint=hint)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return the scores of rows that `check` has accepted."""
        scores = self.score(features) if len(features) else np.zeros(0, np.float32)
        if not np.isfinite(scores).all():
            row = int(np.argmin(np.isfinite(scores)))
            hint = "send features like those in training"
            raise RequestError(f"the score of row {row} is not finite", got=scores[row], hint=hint)
        return scores


def _target(folder: str | Path) -> Path:
    """Return the folder that a link leads to, or the folder itself."""
    try:
        return as_path(folder).resolve()
    except RuntimeError as error:
        raise DataError("symlink loop", where=folder, hint="point it to a run") from error


def load_scorer(folder: Path, *, stopped: threading.Event | None = None, stage: Path | None = None) -> Scorer:
    """Load the model of a finished run or of an exported folder, and score a few rows with it.

    A run is exported to a temporary folder first, by another process: `stopped` is passed to `export_in_process`. With
    `stage`, a copy of the exported model goes to the folder `stage`/VERSION.
    """
    source = _model_folder(folder)
    if source is None:
        hint = "pass a finished run, or a folder that ultr export wrote"
        raise DataError("there is no model here", where=folder, hint=hint)
    digest = fingerprint(source)
    with TemporaryDirectory(prefix="ultr-serve-") as temporary:
        if source == folder:
            exported = load_exported(folder)
        else:
            exported = load_exported(export_in_process(folder, Path(temporary) / "model", stopped=stopped))
        score = _scores_of(exported, folder)
        if stage is not None:
            shutil.rmtree(stage / COPY, ignore_errors=True)
            shutil.copytree(exported.folder, stage / COPY)
    if fingerprint(source) != digest:
        raise DataError("the model changed while it was loaded", where=folder, hint="try again")
    version = digest[:VERSION_DIGITS]
    if stage is not None and not (stage / version).exists():
        (stage / COPY).rename(stage / version)
    names = exported.feature_names
    seconds = min(_warm_up(score, len(names)) for _ in range(WARM_UPS)) / WARM_UP_ROWS
    return Scorer(version, names, exported.vocabularies, exported.keeps_missing, score, seconds, exported.calibration)


def _or_absent(name: str | None) -> str:
    return "absent" if name is None else f"'{name}'"


def _scores_of(exported: Exported, folder: Path) -> Score:
    if not exported.has_onnx and "no_onnx" in exported.about:
        reason = exported.about["no_onnx"]
        what = f"these {exported.ranker} trees have no ONNX ({reason}), so they cannot be served"
        raise DataError(what, where=folder, hint="train with other options of the ranker, or use ultr score")
    session = exported.session(threads=1)
    return lambda features: onnx_scores(session, features[None])[0]


def _warm_up(score: Score, features: int) -> float:
    """Return the seconds that a first few rows take."""
    start = time.perf_counter()
    scores = score(np.zeros((WARM_UP_ROWS, features), np.float32))
    if scores.shape != (WARM_UP_ROWS,) or not np.isfinite(scores).all():
        raise DataError("the model does not return a finite score for each row", hint="train again")
    return time.perf_counter() - start


class Served:
    """The model that answers requests; `reload` replaces it by a newer one that can be loaded.

    A newer model with other features is loaded only if `any_schema` is true, because clients send features by place.
    With `stage`, each model is copied there as it is loaded (`load_scorer`).
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        any_schema: bool = False,
        stage: Path | None = None,
        say: Say = silent,
    ) -> None:
        self.folder, self.any_schema, self.say, self._stage = folder, any_schema, say, stage
        self.announce = say  # says that a newer model was loaded
        self._identity = identity(folder)
        self._deleted = False
        self.stopped = threading.Event()  # set when the server stops, to end a reload
        self.scorer = self._load()
        self.on_reload: Callable[[bool], None] = lambda _: None  # called for each newer model: True if it was loaded

    def reload(self) -> None:
        """Load the model that is in the folder now, if it is another; requests that have started keep the old one."""
        try:
            current, problem = identity(self.folder), f"{self.folder} has no model now"
        except UltrError as error:  # of a store
            current, problem = None, str(error)
        if current is None:
            if not self._deleted:
                self.say(f"{problem}; still serving version {self.scorer.version}", "warning")
            self._deleted = True
            return
        self._deleted = False
        if current == self._identity:
            return
        try:
            newer, failure = self._newer(), None
        except Exception as error:  # whatever is wrong with the newer model, the old one still works
            newer, failure = None, error
        if self.stopped.is_set() or isinstance(failure, NetworkError) or self._changed(current):
            return  # a model that changed again, or could not be fetched, is loaded by the next call
        self._identity = current
        if newer is None:
            text = str(failure) if isinstance(failure, UltrError) else f"{type(failure).__name__}: {failure}"
            still = f"still serving version {self.scorer.version}"
            self.say(f"the newer model cannot be loaded ({text}); {still}", "warning")
        elif newer.version == self.scorer.version:
            return
        else:
            old, self.scorer = self.scorer, newer
            change = "" if newer.misreads(old) is None else ", with other features"
            self.announce(f"now serving version {newer.version} in place of {old.version}{change}")
        self.on_reload(newer is not None)

    def _changed(self, current: tuple[object, ...]) -> bool:
        with suppress(NetworkError):
            return identity(self.folder) != current
        return True

    def _load(self, stopped: threading.Event | None = None) -> Scorer:
        if (url := as_url(self.folder)) is None:
            return load_scorer(_target(self.folder), stopped=stopped, stage=self._stage)
        with TemporaryDirectory(prefix="ultr-serve-") as temporary:
            folder = copy_here(url.rstrip("/"), Path(temporary))
            with named(folder, url):
                return load_scorer(folder, stopped=stopped, stage=self._stage)

    def _newer(self) -> Scorer:
        newer = self._load(self.stopped)
        change = newer.misreads(self.scorer)
        if change is not None and not self.any_schema:
            hint = "change the clients and start the server again, or pass --allow-schema-change"
            raise DataError(f"its features differ from the served model: {change}", hint=hint)
        return newer


def _model_folder(folder: Path) -> Path | None:
    """Return the folder that has model.json: an exported folder itself, or the one in a run; None if there is none."""
    files = folder if is_exported(folder) else folder / "model"
    return files if (files / ABOUT).is_file() else None


def identity(folder: str | Path) -> tuple[object, ...] | None:
    """Return values that change when the model's files change, without reading them; None if there is no model."""
    if (url := as_url(folder)) is not None:
        return stored_files(url)
    try:
        files = _model_folder(_target(folder))
        if files is None:
            return None
        entries = sorted((entry.name, entry.stat()) for entry in os.scandir(files))
        return (str(files), *((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in entries))
    except (OSError, DataError):
        return None


class Watch:
    """A thread that reloads a served model at regular intervals."""

    def __init__(self, served: Served, seconds: float) -> None:
        self._served, self._seconds = served, seconds
        self._thread = threading.Thread(target=self._run, name="ultr-watch")

    def _run(self) -> None:
        while not self._served.stopped.wait(self._seconds):
            self._served.reload()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._served.stopped.set()
        self._thread.join()
