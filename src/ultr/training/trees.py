"""Fit boosted trees (LightGBM, XGBoost): train a bias model if needed, then grow trees. A part of the stage `fit`."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ultr.errors import DataError, OptionError
from ultr.evaluation.scores import LIKELIHOOD, less_is_better
from ultr.lists import ListBatches
from ultr.methods import make_tree_method
from ultr.methods.base import Relevance
from ultr.methods.trees import TreeMethod, TreeTask
from ultr.rankers import LinearRanker, score_rows
from ultr.rankers.boosters import BOOSTERS, Booster, Boosting, TreeRanker, check_parameters
from ultr.rankers.combined import Blend, Part
from ultr.rankers.tree_objective import kernels
from ultr.training.biases import fit_bias
from ultr.training.checking import check_pairs
from ultr.training.examining import evaluator
from ultr.training.feed import Feed
from ultr.training.fitting import FitInputs, FitPlace, Fitted, first_batches, load_fitted, scores_of, start_trees
from ultr.training.folder import CHECKPOINTS, append_metrics, newest_checkpoint, rewind_metrics, write_checkpoint
from ultr.training.loop import Progress, RunState, as_numbers, check_has_features
from ultr.utils.display import begin_stage
from ultr.utils.distributed import choose_device, size
from ultr.utils.jsonfiles import file_checksum
from ultr.utils.optimisation import EarlyStopping

MOST_GROWTH = 3  # an update drops the trees of earlier updates if they made the trees of a run this many times as many
Evaluate = Callable[[Tensor], dict[str, Tensor]]


class TreeFit:
    """The fit of boosted trees; the constructor checks all options."""

    def __init__(self, inputs: FitInputs) -> None:
        config, data = inputs.config, inputs.data
        if size() > 1:
            raise OptionError("only one process can train trees", hint="run without torchrun; all cores are used")
        if data.stream is not None:
            raise OptionError("trees need the whole log in memory", hint="pass --set stream=no, or a smaller log")
        check_has_features(data.train)
        features = data.train.features
        check_parameters(inputs.kind, inputs.ranker_options, features=features.shape[1])
        if (features.min(axis=0) == features.max(axis=0)).all():  # a column with missing values is not equal
            raise DataError("there is no feature to split rows by", hint="check that features vary; all are constant")
        check_pairs(config, inputs.kind, data.train)
        torch.manual_seed(config.seed)
        self.inputs, self.options = inputs, inputs.options
        self.method: TreeMethod = make_tree_method(config.method.name, inputs.of_method(), **config.method.options)
        self.library = BOOSTERS[inputs.kind]
        self._anchor, self._starts = self._trees_to_extend()
        self._has_positions = False
        with_pairs = self.method.pairs is not None
        if with_pairs:
            kernels()  # raise MissingExtraError now, not after the bias stage
        self.device = choose_device(config.machine.device) if with_pairs else torch.device("cpu")

    def fit(self, place: FitPlace) -> Fitted:
        """Grow the trees in the folder of their fit, or load them if they are there already."""
        config, data, kind = self.inputs.config, self.inputs.data, self.inputs.kind
        self.place, self.folder = place, place.folder(kind)
        if (before := load_fitted(self.folder, self.inputs)) is not None:
            return before
        self._run_bias_stage()
        if config.training.warm_start is None:
            self._anchor = self.method.anchor(data.train, seed=config.seed)
        anchor = None if self._anchor is None else score_rows(self._anchor, data.train.features)
        tasks = self.method.tasks(data.train, extends=bool(self._starts), anchor=anchor)
        if len(self._starts) > len(tasks):
            hint = "start from a run that has the same method, label and ranker"
            raise OptionError("the trees of this run have different parts", got=len(self._starts), hint=hint)
        evaluate = evaluator(config, data, place.examined.values)
        begin_stage("training")
        rankers: list[TreeRanker] = []
        scores, steps = np.zeros(data.validation.rows), 0
        if self._anchor is not None:
            scores = score_rows(self._anchor, data.validation.features).astype(np.float64)
        for number, task in enumerate(tasks):
            start = self._starts[number] if number < len(self._starts) else None
            growth = _Growth(self, task, start, scores, steps, number)
            rankers.append(growth.grow(evaluate))
            scores, steps = growth.best_scores, steps + growth.state.step
        # Trees of which no round was better than none have weight 0: a file of a library needs a round.
        parts = [
            Part(each, kind) if each.rounds else Part(TreeRanker(each.booster, 1), kind, weight=0.0) for each in rankers
        ]
        while len(parts) > 1 and not parts[-1].weight:
            parts.pop()
        parts += [] if self._anchor is None else [Part(self._anchor, "linear")]
        ranker: nn.Module = parts[0].ranker if len(parts) == 1 else Blend(parts)
        feed = Feed(ListBatches(data.train, device=self.device), batch=self.options.batch, seed=self.options.seed)
        report = self.method.bias(first_batches(feed))
        scores = scores_of(ranker, data.validation.features)
        fitted = Fitted(self.inputs, ranker, self.inputs.ranker_options, scores, report)
        fitted.save(self.folder)
        return fitted

    def relevance(self, fitted: Fitted) -> Relevance | None:
        """Return the relevance of the training rows by the trees, for a network of the run; None if it has no model."""
        self._estimate_positions()  # which a fit that was loaded has not done
        return self.method.relevance(fitted.ranker, self.inputs.data.train)

    def _trees_to_extend(self) -> tuple[LinearRanker | None, Sequence[Booster | None]]:
        """Return the anchor and the trees of the run that this one starts from; the number of trees is bounded."""
        if (run := self.inputs.config.start_run) is None:
            return None, ()
        anchor, trees = start_trees(self.inputs.kind, run, self.inputs.data.train)
        return anchor, [each and each.to_extend(max(MOST_GROWTH * each.first, self.options.steps)) for each in trees]

    @property
    def anchored(self) -> bool:
        return self._anchor is not None

    def _estimate_positions(self) -> None:
        if (positions := self.method.positions) is not None and not self._has_positions:
            log, seed = self.inputs.data.train, self.options.seed
            positions.estimate(log, user=None, sessions=0, seed=seed, examination=self.place.examined.examination)
            self._has_positions = True

    def _run_bias_stage(self) -> None:
        self._estimate_positions()
        pair_model = self.method.pairs
        if pair_model is not None and pair_model.bias_learner() is not None:
            pair_model.to(self.device)
            fit_bias(pair_model, self.inputs, self.place)


class _Growth:
    """The growth of the trees of a task: `scores` of the validation rows and `steps` are those of the tasks before."""

    def __init__(
        self, fit: TreeFit, task: TreeTask, start: Booster | None, scores: np.ndarray, steps: int, number: int
    ) -> None:
        self.fit, self.task, self.start, self.steps, self.number = fit, task, start, steps, number
        self.before, self.best_scores = scores, scores
        self.first = 0 if start is None else start.rounds  # rounds before the first one of this run
        self.validation = fit.inputs.data.validation.features

    def grow(self, evaluate: Evaluate) -> TreeRanker:
        """Grow trees until the value of the validation requests no longer improves; return those of the best round."""
        options, fit, task = self.fit.options, self.fit, self.task
        self.state, trees = self._load_checkpoint()
        if not self.number:
            rewind_metrics(fit.place.run, fit.inputs.kind, self.state.step or -1)
        scores = self.before + (0 if trees is None else trees.predict(self.validation))
        saved = time.monotonic()

        def after_round(booster: Booster, rounds: int) -> bool:
            nonlocal scores, saved, trees
            trees, step = booster, rounds - self.first
            if step % options.evaluate_every and step < options.steps:
                return False
            scores = scores + booster.predict(self.validation, self.first + self.state.step, rounds)
            self.state.step = step
            self._record(evaluate, scores, math.nan if task.objective is None else task.objective.last_loss())
            if task.objective is not None and time.monotonic() - saved >= fit.place.listeners.checkpoint_seconds:
                self._save_checkpoint(booster)
                saved = time.monotonic()
            return self.state.is_done(options)

        boosting = Boosting(
            self.first + options.steps,
            options.lr,
            options.seed,
            {**task.parameters, **fit.inputs.ranker_options},
            task.objective,
            dict(task.library_options),
        )
        if (self.start is not None or self.number or fit.anchored) and not self.state.step:
            self._record(evaluate, scores, math.nan)  # before the first round, as this may be the best
        if not self.state.is_done(options):
            fit.library.grow(task.rows, boosting, after_round, start=self.start if self.state.step == 0 else trees)
        assert trees is not None  # noqa: S101 - there is at least one round
        rounds = self.first + self.state.stopping.best_step
        trees.first = rounds if self.start is None else self.start.first
        self.best_scores = self.before + trees.predict(self.validation, 0, rounds)
        return TreeRanker(trees, rounds)

    def _record(self, evaluate: Evaluate, scores: np.ndarray, loss: float) -> None:
        kind, select, own = self.fit.inputs.kind, self.fit.inputs.config.selection, self.task.loss
        (metrics,) = as_numbers([evaluate(torch.from_numpy(scores.astype(np.float32)))], select)
        value = -metrics[select] if less_is_better(select) else metrics[select]
        if own is not None and select == LIKELIHOOD:
            value = -own(self.fit.inputs.data.validation, scores, self.before)
        improved = self.state.stopping.update(value, self.state.step)
        step, known_loss = self.steps + self.state.step, None if math.isnan(loss) else loss
        if self.state.step or not self.number:
            append_metrics(self.fit.place.run, {"ranker": kind, "step": step, "loss": known_loss, **metrics})
        self.fit.place.listeners.on_progress(Progress(step, loss, metrics, improved, kind))

    def _load_checkpoint(self) -> tuple[RunState, Booster | None]:
        """Return the progress and the trees so far, which are None if there are none.

        The objectives of LightGBM and XGBoost do not save their estimates by position, so trees of them start again.
        """
        task, library, folder = self.task, self.fit.library, self.fit.folder
        if task.objective is None:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
            return RunState(), self.start

        def read(folder: Path, meta: dict[str, Any]) -> tuple[RunState, Booster]:
            trees = folder / library.FILE
            if not trees.is_file() or file_checksum(trees) != meta["sum"]:
                hint = "train again with --overwrite"
                raise DataError("the file has changed since it was written", where=trees, hint=hint)
            grown = library.load(trees, task.rows.categorical)
            return RunState(meta["step"], EarlyStopping.from_json(meta)), grown

        return newest_checkpoint(folder, read) or (RunState(), self.start)

    def _save_checkpoint(self, booster: Booster) -> None:
        def write(folder: Path) -> dict[str, Any]:
            booster.save(folder / self.fit.library.FILE, rounds=self.first + self.state.step)
            return {**self.state.stopping.to_json(), "sum": file_checksum(folder / self.fit.library.FILE)}

        write_checkpoint(self.fit.folder, self.state.step, write)
