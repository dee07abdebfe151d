"""Fit boosted trees (LightGBM, XGBoost): train the bias model, then grow trees. A part of the stage `fit`."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ultr.errors import DataError, OptionError
from ultr.evaluation.scores import less_is_better
from ultr.lists import ListBatches
from ultr.methods import make_tree_method
from ultr.methods.boosted_bias import fit_boosted
from ultr.methods.pair_weights import PairWeights
from ultr.methods.trees import TreeMethod, TreePairwiseEM, TreeTask
from ultr.rankers import score_rows
from ultr.rankers.boosters import BOOSTERS, Booster, Boosting, LightGBM, TreeRanker, TreeRows, binned, check_parameters
from ultr.rankers.tree_objective import kernels
from ultr.training.biases import Beginning, BiasStage, held_out_requests, some_batches
from ultr.training.checking import check_pairs
from ultr.training.examining import Examined, evaluator
from ultr.training.feed import Feed
from ultr.training.fitting import FitInputs, Fitted, first_batches, load_fitted, start_trees
from ultr.training.folder import CHECKPOINTS, append_metrics, newest_checkpoint, rewind_metrics, write_checkpoint
from ultr.training.loop import Listeners, Progress, RunState, as_numbers, check_has_features
from ultr.utils.display import begin_stage
from ultr.utils.distributed import choose_device, size
from ultr.utils.jsonfiles import file_checksum
from ultr.utils.optimisation import EarlyStopping

LEAST_SHARE = 0.1  # of the rounds of a bias model, in an update with few new requests
MOST_GROWTH = 3  # an update drops the trees of earlier updates if they made the trees of a run this many times as many


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
        self._start = self._trees_to_extend()
        self.boosted = isinstance(self.method, TreePairwiseEM) and self.method.em == "trees"
        if self.boosted:
            check_parameters("lightgbm", {})
        if self.method.pair_model() is not None:
            kernels()  # raise MissingExtraError now, not after the bias stage
        on_cpu = self.boosted or self.method.pair_model() is None
        self.device = torch.device("cpu") if on_cpu else choose_device(config.machine.device)

    def fit(self, folder: Path, run: Path, examined: Examined, shared: Path | None, listeners: Listeners) -> Fitted:
        """Grow the trees in the folder of their fit, or load them if they are there already."""
        if (before := load_fitted(folder, self.inputs)) is not None:
            return before
        self.folder, self.run, self.listeners = folder, run, listeners
        data = self.inputs.data
        rows = self._binned()
        self._run_bias_stage(examined, shared, rows)
        task = self.method.task(data.train, extends=self._start is not None)
        task = task if rows is None else replace(task, rows=rows)
        state, start = self._load_checkpoint(task)
        rewind_metrics(run, self.inputs.kind, state.step or -1)
        begin_stage("training")
        evaluate = evaluator(self.inputs.config, data, examined.values)
        booster = self._grow(task, state, start, evaluate)
        rounds = self._first + state.stopping.best_step
        booster.first = rounds if self._start is None else self._start.first
        ranker, scores, chosen = self._final(TreeRanker(booster, rounds), evaluate)
        feed = Feed(ListBatches(data.train, device=self.device), batch=self.options.batch, seed=self.options.seed)
        report = self.method.bias(first_batches(feed))
        report = report if report is None else {**report, **chosen}
        fitted = Fitted(self.inputs, ranker, self.inputs.ranker_options, scores, report)
        fitted.save(folder)
        return fitted

    def _trees_to_extend(self) -> Booster | None:
        """Return the trees of the run that this one starts from; not too many, so that their number is bounded."""
        if (run := self.inputs.config.training.warm_start) is None:
            return None
        trees = start_trees(self.inputs.kind, Path(run))
        return None if trees is None else trees.to_extend(max(MOST_GROWTH * trees.first, self.options.steps))

    @property
    def _first(self) -> int:
        """The number of rounds before the first one of this run."""
        return 0 if self._start is None else self._start.rounds

    def _final(
        self, grown: TreeRanker, evaluate: Callable[[Tensor], dict[str, Tensor]]
    ) -> tuple[nn.Module, np.ndarray, dict[str, Any]]:
        """Return the final ranker, its scores of the validation rows, and how it was chosen, for the report."""
        data, select, seed = self.inputs.data, self.inputs.config.selection, self.options.seed
        rankers = self.method.finals(grown, data.train, data.validation, seed=seed)
        scores = {name: score_rows(ranker, data.validation.features) for name, ranker in rankers.items()}
        values = {name: float(evaluate(torch.from_numpy(rows))[select]) for name, rows in scores.items()}
        best = (min if less_is_better(select) else max)(values, key=values.__getitem__)
        chosen = {"final": {"ranker": best, "metric": select, "values": values}} if len(values) > 1 else {}
        return rankers[best], scores[best], chosen

    def _grow(
        self,
        task: TreeTask,
        state: RunState,
        start: Booster | None,
        evaluate: Callable[[Tensor], dict[str, Tensor]],
    ) -> Booster:
        """Grow the remaining trees of the run; `start` has the trees so far, None if there are none."""
        options, kind, select, first = self.options, self.inputs.kind, self.inputs.config.selection, self._first
        validation = self.inputs.data.validation.features
        scores, grown = np.zeros(len(validation)), start
        if start is not None:
            scores += start.predict(validation)
        saved = time.monotonic()

        def record(loss: float) -> None:
            (metrics,) = as_numbers([evaluate(torch.from_numpy(scores.astype(np.float32)))], select)
            value = -metrics[select] if less_is_better(select) else metrics[select]
            improved = state.stopping.update(value, state.step)
            known_loss = None if math.isnan(loss) else loss
            append_metrics(self.run, {"ranker": kind, "step": state.step, "loss": known_loss, **metrics})
            self.listeners.on_progress(Progress(state.step, loss, metrics, improved, kind))

        def after_round(booster: Booster, rounds: int) -> bool:
            nonlocal scores, saved, grown
            grown, step = booster, rounds - first
            if step % options.evaluate_every and step < options.steps:
                return False
            scores += booster.predict(validation, first + state.step, rounds)
            state.step = step
            record(math.nan if task.objective is None else task.objective.last_loss())
            if task.objective is not None and time.monotonic() - saved >= self.listeners.checkpoint_seconds:
                self._save_checkpoint(booster, state)
                saved = time.monotonic()
            return state.is_done(options)

        boosting = Boosting(
            first + options.steps,
            options.lr,
            options.seed,
            self.inputs.ranker_options,
            task.objective,
            dict(task.library_options or {}),
        )
        if self._start is not None and not state.step:
            record(math.nan)  # before the first round, as this may be the best
        if not state.is_done(options):
            self.library.grow(task.rows, boosting, after_round, start=start)
        assert grown is not None  # noqa: S101 - a run has at least one round
        return grown

    # --- The bias stage -------------------------------------------------------------------------------------------

    def _binned(self) -> TreeRows | None:
        """Return the training rows in LightGBM's bins, if both the bias model and the ranker are trees of LightGBM."""
        if not (self.boosted and self.library is LightGBM):
            return None
        parameters = {**self.inputs.ranker_options, "seed": self.options.seed}
        return binned(self.method.rows(self.inputs.data.train), parameters)

    def _run_bias_stage(self, examined: Examined, shared: Path | None, rows: TreeRows | None) -> None:
        log, seed = self.inputs.data.train, self.options.seed
        if (positions := self.method.position_model()) is not None:
            positions.estimate(log, user=None, sessions=0, seed=seed, examination=examined.examination)
        pair_model = self.method.pair_model()
        if pair_model is None or pair_model.bias_learner() is None:
            return
        pair_model.to(self.device)
        fit = partial(self._fit_boosted, pair_model, examined, rows) if self.boosted else None
        BiasStage(
            self.inputs.config,
            self.inputs.data,
            self.inputs.kind,
            self.folder,
            examined.examination,
            shared,
            self.listeners.on_bias_progress,
            self.listeners.checkpoint_seconds,
        ).run(pair_model, fit)

    def _fit_boosted(
        self, pair_model: PairWeights, examined: Examined, all_rows: TreeRows | None, begin: Beginning | None
    ) -> None:
        """Fit a bias model of trees: first θ (examination), then trees until held-out metrics no longer improve."""
        log, options, kind = self.inputs.data.train, self.options, self.inputs.kind
        pair_model.estimate_bias(log, user=None, sessions=0, seed=options.seed, examination=examined.examination)
        if begin is not None:
            begin.give(pair_model.bias_model)
        new = None if begin is None else begin.new_requests(log)
        learned, held_out = held_out_requests(log, options.seed, new=new)
        held_out_feed = Feed(ListBatches(log), batch=256, seed=options.seed, requests=held_out)
        rows = log if learned is None else log.select(learned)
        places = np.flatnonzero(np.isin(log.request_of_row, np.arange(len(log)) if learned is None else learned))
        share = 1.0 if new is None else max(LEAST_SHARE, len(new) / len(log))  # what is new decides the most rounds
        on_progress = self.listeners.on_bias_progress
        fit_boosted(
            pair_model.bias_model,
            rows,
            self.method.labels(rows),
            held_out=some_batches(held_out_feed, len(held_out)),
            categorical=tuple(sorted(self.method.inputs.categories)),
            rounds=math.ceil(share * self.inputs.config.trees.bias_rounds),
            growth=MOST_GROWTH,
            seed=options.seed,
            binned=None if all_rows is None else partial(all_rows.binned.subset, places),
            on_progress=lambda number, metrics: on_progress(Progress(number, math.nan, metrics, True, kind)),
        )

    # --- Checkpoints ----------------------------------------------------------------------------------------------

    def _load_checkpoint(self, task: TreeTask) -> tuple[RunState, Booster | None]:
        """Return the progress of the run and its trees so far, which are None if a new run starts with none.

        The objectives of LightGBM and XGBoost do not save their estimates by position, so runs with them start again.
        """
        if task.objective is None:
            shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
            return RunState(), self._start

        def read(folder: Path, meta: dict[str, Any]) -> tuple[RunState, Booster]:
            trees = folder / self.library.FILE
            if not trees.is_file() or file_checksum(trees) != meta["sum"]:
                hint = "train again with --overwrite"
                raise DataError("the file has changed since it was written", where=trees, hint=hint)
            grown = self.library.load(trees, task.rows.categorical)
            return RunState(meta["step"], EarlyStopping.from_json(meta)), grown

        return newest_checkpoint(self.folder, read) or (RunState(), self._start)

    def _save_checkpoint(self, booster: Booster, state: RunState) -> None:
        def write(folder: Path) -> dict[str, Any]:
            booster.save(folder / self.library.FILE, rounds=self._first + state.step)
            return {**state.stopping.to_json(), "sum": file_checksum(folder / self.library.FILE)}

        write_checkpoint(self.folder, state.step, write)
