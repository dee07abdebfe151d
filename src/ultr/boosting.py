"""A run of trees: what is fitted first, rounds with early stopping, and the library's own file at the end."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ultr.checkpoint import append_metrics, newest_checkpoint, rewind_metrics, write_checkpoint
from ultr.errors import DataError, OptionError
from ultr.feeding import Feed
from ultr.lists import ListBatches
from ultr.methods import make_tree_method
from ultr.methods.boosted_bias import fit_boosted
from ultr.methods.pairwise_em import PairwiseEM
from ultr.methods.trees import TreeMethod, TreePairwiseEM, TreeTask
from ultr.models import save_trees
from ultr.outcomes import write_outcome
from ultr.preparing import Prepared, RunConfig
from ultr.processes import size
from ultr.rankers.boosters import BOOSTERS, Booster, Boosting, check_parameters
from ultr.rankers.trees import kernels
from ultr.seals import checksum
from ultr.stages import (
    BIAS,
    evaluator,
    fit_before,
    judge_of,
    less_is_better,
    load_bias,
    method_inputs,
    save_bias,
    write_bias,
)
from ultr.training import Progress, choose_device, held_out_requests

BIAS_ROUNDS = 300  # at most, of a bias model of trees


@dataclass
class Rounds:
    """How far a run of trees has come."""

    done: int = 0
    best: float = -math.inf
    best_round: int = 0
    waited: int = 0


class TreeRun:
    """Trees that are learned into a run directory."""

    def __init__(self, config: RunConfig, prepared: Prepared) -> None:
        if size() > 1:
            raise OptionError("trees are grown by one process", mend="leave torchrun out; all cores are used")
        if prepared.stream is not None:
            raise OptionError("trees hold the whole log in memory", mend="pass --stream no, or a smaller log")
        width = prepared.train.features.shape[1]
        check_parameters(config.ranker, config.ranker_options, features=width)
        self.config, self.prepared = config, prepared
        self.method: TreeMethod = make_tree_method(
            config.method, method_inputs(config, prepared), **config.method_options
        )
        self.library = BOOSTERS[config.ranker]
        self.boosted = isinstance(self.method, TreePairwiseEM) and self.method.em == "trees"
        if self.boosted:
            check_parameters("lightgbm", {})
        if self.method.weigher() is not None:
            kernels()  # or say that they are not there, before anything is learned
        on_cpu = self.boosted or self.method.weigher() is None
        self.device = torch.device("cpu") if on_cpu else choose_device(config.training.device)

    def learn(
        self,
        out: Path,
        shared: Path | None,
        checkpoint_seconds: float,
        on_first: Callable[[Progress], None],
        on_progress: Callable[[Progress], None],
    ) -> None:
        """Learn all there is to learn, and write it."""
        config, prepared = self.config, self.prepared
        self._fit_first(out, shared, on_first)
        task = self.method.task(prepared.train)
        state, start = self._begun(out, task)
        rewind_metrics(out, state.done)
        judge = judge_of(config, prepared, out, shared)
        evaluate = evaluator(config, prepared, judge)
        options, select = config.training, config.selection
        validation = prepared.validation.features
        scores, grown = np.zeros(len(validation)), None
        if start is not None:
            grown = self.library.load(start, task.rows.categorical)
            scores += grown.predict(validation)
        saved = time.monotonic()

        def after_round(booster: Booster, rounds: int) -> bool:
            nonlocal scores, saved, grown
            grown = booster
            if rounds % options.evaluate_every and rounds < options.steps:
                return False
            scores += booster.predict(validation, state.done, rounds)
            state.done = rounds
            figures = evaluate(scores.astype(np.float32))
            value = -figures[select] if less_is_better(select) else figures[select]
            improved = value > state.best
            if improved:
                state.best, state.best_round, state.waited = value, rounds, 0
            else:
                state.waited += 1
            loss = math.nan if task.objective is None else task.objective.last_loss()
            append_metrics(out, {"step": rounds, "loss": None if math.isnan(loss) else loss, **figures})
            on_progress(Progress(rounds, loss, figures, improved))
            if task.objective is not None and time.monotonic() - saved >= checkpoint_seconds:
                self._save(out, booster, state)
                saved = time.monotonic()
            return bool(options.patience and state.waited >= options.patience)

        how = Boosting(
            options.steps, options.lr, options.seed, config.ranker_options, task.objective, dict(task.own or {})
        )
        if state.done < options.steps and not (options.patience and state.waited >= options.patience):
            self.library.grow(task.rows, how, after_round, start=start)
        if grown is not None:
            write_outcome(config, prepared, grown.predict(validation, 0, state.best_round), judge, out)
            self._finish(out, grown, state.best_round)

    # --- What comes first -----------------------------------------------------------------------------------------

    def _fit_first(self, out: Path, shared: Path | None, on_first: Callable[[Progress], None]) -> None:
        weigher = self.method.weigher()
        if weigher is None or (model := weigher.first()) is None:
            return
        weigher.to(self.device)
        if (out / BIAS).is_dir():
            load_bias(out / BIAS, model)
            return
        fit = (lambda: self._fit_boosted(weigher, on_first)) if self.boosted else None
        fit_before(self.config, self.prepared, weigher, shared, on_first, fit=fit)
        save_bias(out / BIAS, model)

    def _fit_boosted(self, weigher: PairwiseEM, on_first: Callable[[Progress], None]) -> None:
        """A bias model of trees: θ from the log, then rounds until held-out requests gain no more."""
        log, options = self.prepared.train, self.config.training
        weigher.prepare(log, user=None, sessions=0, seed=options.seed)
        learned, held = held_out_requests(log, options.seed)
        judged = Feed(ListBatches(log), batch=256, seed=options.seed, requests=held)
        lists = [judged(step) for step in range(max(1, min(8, len(held) // 128)))]
        rows = log if learned is None else log.select(learned)
        fit_boosted(
            weigher.bias_model,
            rows,
            self.method.labels(rows),
            judged=lists,
            categorical=tuple(sorted(self.method.inputs.categories)),
            rounds=min(options.bias_steps, BIAS_ROUNDS),
            seed=options.seed,
            on_progress=lambda number, figures: on_first(Progress(number, math.nan, figures, True)),
        )

    # --- Files ----------------------------------------------------------------------------------------------------

    def _begun(self, out: Path, task: TreeTask) -> tuple[Rounds, Path | None]:
        """How far the run had come, and its trees; a library's own objective keeps to itself what it had learned of
        positions, so that one starts again.
        """
        if task.objective is None:
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
            return Rounds(), None

        def read(folder: Path, meta: dict[str, Any]) -> tuple[Rounds, Path]:
            trees, best = folder / self.library.FILE, meta["best"]
            if not trees.is_file() or checksum(trees) != meta["sum"]:
                mend = "begin again with --overwrite"
                raise DataError("the trees are not those that were written", where=trees, mend=mend)
            best = -math.inf if best is None else best
            return Rounds(meta["step"], best, meta["best_round"], meta["waited"]), trees

        return newest_checkpoint(out, read) or (Rounds(), None)

    def _save(self, out: Path, booster: Booster, state: Rounds) -> None:
        def write(folder: Path) -> dict[str, Any]:
            booster.save(folder / self.library.FILE, rounds=state.done)
            best = state.best if math.isfinite(state.best) else None
            return {**asdict(state), "best": best, "sum": checksum(folder / self.library.FILE)}

        write_checkpoint(out, state.done, write)

    def _finish(self, out: Path, booster: Booster, rounds: int) -> None:
        """Write what was learned: the trees of the best so many rounds."""
        config, prepared = self.config, self.prepared
        feed = Feed(
            ListBatches(prepared.train, device=self.device), batch=config.training.batch, seed=config.training.seed
        )
        write_bias(config, prepared, self.method.bias, feed, out)
        inputs, data = self.method.inputs, prepared.fingerprint
        save_trees(out / "model", booster, rounds, inputs, prepared.train, data=data, held_out=prepared.validation)
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
