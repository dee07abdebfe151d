"""Train boosted trees (LightGBM, XGBoost): fit the bias model, grow trees, and write the run directory."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ultr.errors import DataError, OptionError
from ultr.lists import ListBatches, Lists
from ultr.methods import make_tree_method
from ultr.methods.boosted_bias import fit_boosted
from ultr.methods.pairwise_em import PairwiseEM
from ultr.methods.trees import TreeMethod, TreePairwiseEM, TreeTask
from ultr.rankers import score_rows
from ultr.rankers.boosters import BOOSTERS, Booster, Boosting, LightGBM, TreeRanker, TreeRows, binned
from ultr.rankers.tree_objective import kernels
from ultr.rankers.tree_parameters import check_parameters
from ultr.training.bias_progress import BiasProgress
from ultr.training.bias_stage import Beginning, held_out_requests, run_bias_stage, some_batches
from ultr.training.checkpoints import append_metrics, newest_checkpoint, rewind_metrics, write_checkpoint
from ultr.training.config import RunConfig
from ultr.training.data import RunData
from ultr.training.feed import Feed
from ultr.training.finish import Listeners, finish_run
from ultr.training.inputs import method_inputs
from ultr.training.joined import join
from ultr.training.loop import Progress, RunState, as_numbers, check_has_features
from ultr.training.selection import evaluator, judge_of, less_is_better
from ultr.training.traps import check_pairs
from ultr.training.warm_start import start_trees
from ultr.utils.devices import choose_device
from ultr.utils.distributed import size
from ultr.utils.jsonfiles import file_checksum
from ultr.utils.stages import begin_stage
from ultr.utils.stopping import EarlyStopping

BIAS_ROUNDS = 300  # largest number of boosting rounds of a bias model made of trees
LEAST_SHARE = 0.1  # of these rounds, in an update with few new requests
MOST_GROWTH = 3  # an update drops the trees of earlier updates if they made the trees of a run this many times as many


class TreeRun:
    """A run that trains boosted trees; the constructor checks all options."""

    def __init__(self, config: RunConfig, run_data: RunData, *, network: Path | None = None) -> None:
        if size() > 1:
            raise OptionError("only one process can train trees", hint="run without torchrun; all cores are used")
        if run_data.stream is not None:
            raise OptionError("trees need the whole log in memory", hint="pass --stream no, or a smaller log")
        if config.joins and not (network and (network / "model").is_dir()):
            hint = "train with --ranker auto"
            raise OptionError("there is no run of a network that these trees can join", where=network, hint=hint)
        check_has_features(run_data.train)
        features = run_data.train.features
        check_parameters(config.ranker, config.ranker_options, features=features.shape[1])
        if (features.min(axis=0) == features.max(axis=0)).all():  # a column with missing values is not equal
            raise DataError("there is no feature to split rows by", hint="check that features vary; all are constant")
        check_pairs(config, run_data.train)
        self.config, self.run_data, self.network = config, run_data, network
        self.method: TreeMethod = make_tree_method(
            config.method, method_inputs(config, run_data), **config.method_options
        )
        self.library = BOOSTERS[config.ranker]
        self._start = self._trees_to_extend()
        self.boosted = isinstance(self.method, TreePairwiseEM) and self.method.em == "trees"
        if self.boosted:
            check_parameters("lightgbm", {})
        if self.method.pair_model() is not None:
            kernels()  # raise MissingExtraError now, not after the bias stage
        on_cpu = self.boosted or self.method.pair_model() is None
        self.device = torch.device("cpu") if on_cpu else choose_device(config.training.device)

    def train(self, out: Path, shared: Path | None, listeners: Listeners) -> None:
        """Fit the bias model, if the method has one, grow all trees, and write the results into `out`."""
        config, run_data = self.config, self.run_data
        rows = self._binned()
        self._run_bias_stage(out, shared, listeners, rows)
        task = self.method.task(run_data.train, extends=self._start is not None)
        task = task if rows is None else replace(task, rows=rows)
        state, start = self._load_checkpoint(out, task)
        rewind_metrics(out, state.step or -1)
        judge = judge_of(config, run_data, out, shared, known=self.method.inputs.propensities)
        begin_stage("training")
        evaluate = evaluator(config, run_data, judge)
        booster = self._grow(out, task, state, start, evaluate, listeners)
        rounds = self._first + state.stopping.best_step
        booster.first = rounds if self._start is None else self._start.first
        best, scores, chosen = self._final(TreeRanker(booster, rounds), evaluate)
        options = config.training
        feed = Feed(ListBatches(run_data.train, device=self.device), batch=options.batch, seed=options.seed)

        def bias(batches: Iterable[Lists]) -> dict[str, Any] | None:
            report = self.method.bias(batches)
            return report if report is None else {**report, **chosen}

        written: dict[str, Any] = {"bias": bias, "ranker": best, "ranker_options": config.ranker_options}
        finish_run(config, run_data, out, scores=scores, judge=judge, feed=feed, **written)

    def _trees_to_extend(self) -> Booster | None:
        """Return the trees of the run that this one starts from; not too many, so that their number is bounded."""
        if self.config.warm_start is None:
            return None
        trees = start_trees(self.config.ranker, Path(self.config.warm_start))
        return None if trees is None else trees.to_extend(max(MOST_GROWTH * trees.first, self.config.training.steps))

    @property
    def _first(self) -> int:
        """The number of rounds before the first one of this run."""
        return 0 if self._start is None else self._start.rounds

    def _final(
        self, grown: TreeRanker, evaluate: Callable[[Tensor], dict[str, Tensor]]
    ) -> tuple[nn.Module, np.ndarray, dict[str, Any]]:
        """Return the final ranker, its scores of the validation rows, and how it was chosen, for the report."""
        validation, select = self.run_data.validation, self.config.selection
        seed = self.config.training.seed
        rankers = self.method.finals(grown, self.run_data.train, validation, seed=seed)
        scores = {name: score_rows(ranker, validation.features) for name, ranker in rankers.items()}
        values = {name: float(evaluate(torch.from_numpy(rows))[select]) for name, rows in scores.items()}
        best = (min if less_is_better(select) else max)(values, key=values.__getitem__)
        chosen: dict[str, Any] = {"metric": select, "values": values}
        chosen = {"final": {"ranker": best, **chosen}} if len(values) > 1 else {}
        if not (self.config.joins and self.network is not None):
            return rankers[best], scores[best].astype(np.float64), chosen
        feedback = self.method.feedback(validation)
        blend, summed, share = join(self.network, rankers[best], scores[best], validation, feedback)
        return blend, summed, {**chosen, "shares": {"a network": share, self.config.ranker: 1 - share}}

    def _grow(
        self,
        out: Path,
        task: TreeTask,
        state: RunState,
        start: Booster | None,
        evaluate: Callable[[Tensor], dict[str, Tensor]],
        listeners: Listeners,
    ) -> Booster:
        """Grow the remaining trees of the run; `start` has the trees so far, None if there are none."""
        options, select, first = self.config.training, self.config.selection, self._first
        validation = self.run_data.validation.features
        scores, grown = np.zeros(len(validation)), start
        if start is not None:
            scores += start.predict(validation)
        saved = time.monotonic()

        def record(loss: float) -> None:
            (metrics,) = as_numbers([evaluate(torch.from_numpy(scores.astype(np.float32)))], select)
            value = -metrics[select] if less_is_better(select) else metrics[select]
            improved = state.stopping.update(value, state.step)
            append_metrics(out, {"step": state.step, "loss": None if math.isnan(loss) else loss, **metrics})
            listeners.on_progress(Progress(state.step, loss, metrics, improved))

        def after_round(booster: Booster, rounds: int) -> bool:
            nonlocal scores, saved, grown
            grown, step = booster, rounds - first
            if step % options.evaluate_every and step < options.steps:
                return False
            scores += booster.predict(validation, first + state.step, rounds)
            state.step = step
            record(math.nan if task.objective is None else task.objective.last_loss())
            if task.objective is not None and time.monotonic() - saved >= listeners.checkpoint_seconds:
                self._save_checkpoint(out, booster, state)
                saved = time.monotonic()
            return state.is_done(options)

        boosting = Boosting(
            first + options.steps,
            options.lr,
            options.seed,
            self.config.ranker_options,
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
        parameters = {**self.config.ranker_options, "seed": self.config.training.seed}
        return binned(self.method.rows(self.run_data.train), parameters)

    def _run_bias_stage(self, out: Path, shared: Path | None, listeners: Listeners, rows: TreeRows | None) -> None:
        pair_model, on_progress = self.method.pair_model(), listeners.on_bias_progress
        progress, seed = BiasProgress(out, listeners.checkpoint_seconds), self.config.training.seed
        if (positions := self.method.position_model()) is not None:
            begin_stage("estimating the bias")
            log = self.run_data.train
            progress.estimate(positions, lambda: positions.estimate(log, user=None, sessions=0, seed=seed))
        if pair_model is None or pair_model.bias_learner() is None:
            return
        pair_model.to(self.device)
        fit = partial(self._fit_boosted, pair_model, progress, on_progress, rows) if self.boosted else None
        run_bias_stage(self.config, self.run_data, pair_model, out, shared, on_progress, progress=progress, fit=fit)

    def _fit_boosted(
        self,
        pair_model: PairwiseEM,
        progress: BiasProgress,
        on_progress: Callable[[Progress], None],
        all_rows: TreeRows | None,
        begin: Beginning | None,
    ) -> None:
        """Fit a bias model of trees: first θ (examination), then trees until held-out metrics no longer improve."""
        log, options = self.run_data.train, self.config.training
        progress.estimate(pair_model, lambda: pair_model.estimate_bias(log, user=None, sessions=0, seed=options.seed))
        if begin is not None:
            begin.give(pair_model.bias_model)
        new = None if begin is None else begin.new_requests(log)
        learned, held_out = held_out_requests(log, options.seed, new=new)
        held_out_feed = Feed(ListBatches(log), batch=256, seed=options.seed, requests=held_out)
        rows = log if learned is None else log.select(learned)
        places = np.flatnonzero(np.isin(log.request_of_row, np.arange(len(log)) if learned is None else learned))
        share = 1.0 if new is None else max(LEAST_SHARE, len(new) / len(log))  # what is new decides the most rounds
        fit_boosted(
            pair_model.bias_model,
            rows,
            self.method.labels(rows),
            held_out=some_batches(held_out_feed, len(held_out)),
            categorical=tuple(sorted(self.method.inputs.categories)),
            rounds=math.ceil(share * min(options.bias_steps, BIAS_ROUNDS)),
            growth=MOST_GROWTH,
            seed=options.seed,
            binned=None if all_rows is None else partial(all_rows.binned.subset, places),
            on_progress=lambda number, metrics: on_progress(Progress(number, math.nan, metrics, True)),
        )

    # --- Checkpoints ----------------------------------------------------------------------------------------------

    def _load_checkpoint(self, out: Path, task: TreeTask) -> tuple[RunState, Booster | None]:
        """Return the progress of the run and its trees so far, which are None if a new run starts with none.

        The objectives of LightGBM and XGBoost do not save their estimates by position, so runs with them start again.
        """
        if task.objective is None:
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
            return RunState(), self._start

        def read(folder: Path, meta: dict[str, Any]) -> tuple[RunState, Booster]:
            trees = folder / self.library.FILE
            if not trees.is_file() or file_checksum(trees) != meta["sum"]:
                hint = "train again with --overwrite"
                raise DataError("the file has changed since it was written", where=trees, hint=hint)
            grown = self.library.load(trees, task.rows.categorical)
            return RunState(meta["step"], EarlyStopping.from_json(meta)), grown

        return newest_checkpoint(out, read) or (RunState(), self._start)

    def _save_checkpoint(self, out: Path, booster: Booster, state: RunState) -> None:
        def write(folder: Path) -> dict[str, Any]:
            booster.save(folder / self.library.FILE, rounds=self._first + state.step)
            return {**state.stopping.to_json(), "sum": file_checksum(folder / self.library.FILE)}

        write_checkpoint(out, state.step, write)
