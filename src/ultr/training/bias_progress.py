"""Checkpoints of the bias stage: a killed run does not repeat the parts of the stage that are finished.

run/bias-stage/estimate/      the method after θ was estimated from the log, and how θ was estimated
run/bias-stage/checkpoints/   the training of the bias model

A complete run has none of these files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ultr.errors import DataError
from ultr.rankers.matching import load_weights
from ultr.training.checkpoints import load_checkpoint, save_checkpoint
from ultr.training.loop import TrainingState
from ultr.utils.distributed import check_equal, is_main
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import read_json, write_json
from ultr.utils.tensors import load_tensors, save_tensors

STAGE = "bias-stage"  # the folder of a run with these files
WEIGHTS = "weights.safetensors"
EVIDENCE = "evidence.json"  # how θ was estimated, for the report


@dataclass
class BiasProgress:
    """The checkpoints of the bias stage of a run in the folder `run`, at most one every `seconds`."""

    run: Path
    seconds: float = 10.0
    _saved: float = field(default_factory=time.monotonic)

    @property
    def _estimate(self) -> Path:
        return self.run / STAGE / "estimate"

    def estimate(self, module: nn.Module, estimate: Callable[[], None]) -> None:
        """Load the saved estimate of a method, if there is one; else call `estimate`, which makes it, and save it."""
        try:
            weights = load_tensors(self._estimate / WEIGHTS) if self._estimate.is_dir() else None
            if weights is not None:
                load_weights(module, weights)
                self.load_evidence(module)
                return
        except (DataError, RuntimeError):
            pass  # a damaged estimate is made again
        estimate()
        with atomic_path(self._estimate, overwrite=True, folder=True) as folder:
            save_tensors(folder / WEIGHTS, module.state_dict())
            write_json(folder / EVIDENCE, {name: part.evidence for name, part in _with_evidence(module)})

    def load_evidence(self, module: nn.Module) -> None:
        """Set how θ was estimated, which weights do not say, from the saved estimate, if there is one."""
        if (self._estimate / EVIDENCE).is_file():
            saved = read_json(self._estimate / EVIDENCE)
            for name, part in _with_evidence(module):
                part.evidence = saved.get(name, part.evidence)

    def resume(self, state: TrainingState) -> None:
        """Load the newest checkpoint of the training of a bias model, if there is one."""
        resumed = load_checkpoint(self.run / STAGE, state)
        check_equal(state.step if resumed else -1, "the step of the bias model to resume from")

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint of the training of a bias model, if the last one is old enough."""
        if is_main() and time.monotonic() - self._saved >= self.seconds:
            save_checkpoint(self.run / STAGE, state)
            self._saved = time.monotonic()


def _with_evidence(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(getattr(part, "evidence", None), dict))
