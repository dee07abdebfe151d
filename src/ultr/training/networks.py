"""Train a neural ranker: fit the bias model, take all training steps, and write the run directory."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ultr.bias.logging_policy import share_logging_score
from ultr.lists import ListBatches
from ultr.methods import Method, make_method
from ultr.methods.base import HeldOutRows
from ultr.rankers import score_rows, scores_on_device
from ultr.training.bias_progress import BiasProgress
from ultr.training.bias_stage import load_evidence, run_bias_stage
from ultr.training.checkpoints import append_metrics, load_checkpoint, rewind_metrics, save_checkpoint
from ultr.training.config import RunConfig, TrainingOptions, patience_for
from ultr.training.data import RunData
from ultr.training.finish import Listeners, finish_run
from ultr.training.inputs import method_inputs, with_hidden_layers
from ultr.training.loop import Progress, check_has_features, start, train
from ultr.training.selection import evaluator, judge_of, less_is_better
from ultr.training.traps import check_pairs
from ultr.training.warm_start import start_from
from ultr.utils.devices import choose_device
from ultr.utils.distributed import barrier, check_equal, copy_from_main, gather_shares, is_main, own_share
from ultr.utils.stages import begin_stage

BALANCED_ROWS = 50_000  # validation rows by which the terms of a ranker are weighed
LEAST_STEPS, MOST_STEPS = 150, 600  # without improvement, after which training on a log stops
WARM_LEAST_STEPS = 50  # the same as LEAST_STEPS, for training that starts from another run


class NetworkRun:
    """A run that trains a neural ranker; the constructor checks all options."""

    def __init__(self, config: RunConfig, run_data: RunData) -> None:
        check_has_features(run_data.train)  # first, as torch warns about networks without inputs
        check_pairs(config, run_data.train)
        config = with_hidden_layers(config, run_data)
        self.config, self.run_data = config, run_data
        self.method: Method = make_method(config.method, method_inputs(config, run_data), **config.method_options)
        self._first_weights: dict[str, Tensor] = {}  # of the ranker, if it starts from another run
        self.state = start(self.method, run_data.train, config.training, warm_start=self._warm_start)

    @property
    def options(self) -> TrainingOptions:
        """The training options, in which the patience is decided: by the log, unless it was chosen."""
        options, data = self.config.training, self.run_data
        if options.patience is not None or data.feeding_user is not None:
            return options
        requests = MOST_STEPS * options.batch if data.stream is not None else len(data.train)
        least = LEAST_STEPS if self.config.warm_start is None else WARM_LEAST_STEPS
        return replace(options, patience=patience_for(requests, options, least=least, most=MOST_STEPS))

    @property
    def starts_well(self) -> bool:
        """Whether the first weights may be the best ones."""
        return self.config.warm_start is not None or (self.method.anchored and self.run_data.feeding_user is None)

    def _warm_start(self) -> None:
        if self.config.warm_start is not None:
            self._first_weights = start_from(self.method, Path(self.config.warm_start), self.run_data.train)

    def train(self, out: Path, shared: Path | None, listeners: Listeners) -> None:
        """Fit the bias model, if the method has one, take all training steps, and write the results into `out`."""
        self.prepare(out, shared, listeners)
        begin_stage("training")
        options, select = self.options, self.config.selection
        how = {"larger_is_better": not less_is_better(select), "evaluate_start": self.starts_well}
        for progress in train(self.state, self.feed, self.evaluate, options, select=select, **how):
            self.record(progress)
        self.finish()

    def prepare(self, out: Path, shared: Path | None, listeners: Listeners, lists: ListBatches | None = None) -> None:
        """Do all work before the first step, or before the next one of a resumed run.

        `lists` are the training requests on the device, if another run has put them there.
        """
        config, run_data, method, state = self.config, self.run_data, self.method, self.state
        resumed = load_checkpoint(out, state)
        check_equal(state.step if resumed else -1, "the step to resume from")
        if shared is not None:
            share_logging_score(run_data.train, shared)
        progress = BiasProgress(out, listeners.checkpoint_seconds)
        if resumed:
            load_evidence(method, out, progress)
        else:
            run_bias_stage(config, run_data, method, out, shared, listeners.on_bias_progress, progress=progress)
            if self._first_weights:  # the bias stage may have fitted parts of the ranker to the log
                method.serving().load_state_dict(self._first_weights)
            elif run_data.feeding_user is None:
                if is_main():
                    method.start_ranker(run_data.train, seed=config.training.seed)
                copy_from_main(method.state_dict().values())
        if is_main():
            rewind_metrics(out, state.step if resumed else -1)
        self.out, self.listeners = out, listeners
        self.device, self.feed = choose_device(config.training.device), run_data.feed(config.training, lists)
        self.judge = judge_of(config, run_data, out, shared, known=method.inputs.propensities)
        self._evaluate_scores = evaluator(config, run_data, self.judge, self.device)
        self._rows: np.ndarray | Tensor = run_data.validation.features[own_share(run_data.validation.rows)]
        if self.device.type == "cuda":
            self._rows = torch.from_numpy(np.array(self._rows)).to(self.device)
        self._some = self._some_rows()
        self._saved = time.monotonic()

    def _some_rows(self) -> HeldOutRows:
        """Return validation rows by which the terms of a ranker are weighed."""
        log, label = self.run_data.validation, self.method.inputs.label
        features, request = log.features[:BALANCED_ROWS], log.request_of_row[:BALANCED_ROWS]
        labels = positions = None
        if log.positions is not None and set(label.actions) <= set(log.actions):
            labels, positions = label(log.actions)[:BALANCED_ROWS], log.positions[:BALANCED_ROWS]

        def here(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.array(values)).to(self.device)

        known = (None if each is None else here(each) for each in (labels, positions))
        return HeldOutRows(here(features), here(request), *known)

    def evaluate(self, method: Method) -> dict[str, Tensor]:
        method.eval()
        method.balance(self._some)
        scores = scores_on_device(method.score, self._rows, device=self.device)
        return self._evaluate_scores(gather_shares(scores, self.run_data.validation.rows))

    def record(self, progress: Progress) -> None:
        """Write the results of an evaluation, and a checkpoint if the last one is old enough."""
        if is_main():
            loss = progress.loss if math.isfinite(progress.loss) else None
            append_metrics(self.out, {"step": progress.step, "loss": loss, **progress.metrics})
            if time.monotonic() - self._saved >= self.listeners.checkpoint_seconds:
                save_checkpoint(self.out, self.state)
                self._saved = time.monotonic()
        self.listeners.on_progress(progress)

    def finish(self) -> None:
        """Write the results of the run."""
        method, validation = self.method, self.run_data.validation
        method.load_state_dict(self.state.best_weights)
        if is_main():
            method.eval()
            scores = score_rows(method.score, validation.features, device=self.device)
            finish_run(
                self.config,
                self.run_data,
                self.out,
                scores=scores,
                judge=self.judge,
                feed=self.feed,
                bias=method.bias,
                ranker=method.serving(),
                ranker_options=method.inputs.ranker_options,
            )
        barrier()
