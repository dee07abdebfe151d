"""Fit a network: train its bias model, then take all training steps. A part of the stage `fit`."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ultr.bias.logging_policy import share_logging_score
from ultr.lists import ListBatches
from ultr.methods import Method, make_method
from ultr.methods.base import HeldOutRows, Relevance
from ultr.rankers import scores_on_device
from ultr.training.biases import fit_bias
from ultr.training.checking import check_pairs
from ultr.training.config import TrainingOptions, patience_for
from ultr.training.examining import evaluator
from ultr.training.fitting import FitInputs, FitPlace, Fitted, first_batches, load_fitted, scores_of, start_from
from ultr.training.folder import append_metrics, has_checkpoint, load_checkpoint, rewind_metrics, save_checkpoint
from ultr.training.loop import Progress, check_has_features, start, train
from ultr.utils.display import begin_stage
from ultr.utils.distributed import (
    barrier,
    check_equal,
    choose_device,
    copy_from_main,
    gather_shares,
    is_main,
    own_share,
)

WEIGHTED_ROWS = 50_000  # validation rows that decide the weights of the terms of a ranker
LEAST_STEPS, MOST_STEPS = 150, 600  # without improvement, after which training on a log stops
WARM_LEAST_STEPS = 50  # the same as LEAST_STEPS, for training that starts from another run


class NetworkFit:
    """The fit of a network; the constructor checks all options."""

    def __init__(self, inputs: FitInputs) -> None:
        config, data = inputs.config, inputs.data
        check_has_features(data.train)  # first, as torch warns about networks without inputs
        check_pairs(config, inputs.kind, data.train)
        torch.manual_seed(config.seed)
        self.inputs = inputs
        self.method: Method = make_method(config.method.name, inputs.of_method(), **config.method.options)
        self._first_weights: dict[str, Tensor] = {}  # of the ranker, if it starts from another run
        self.state = start(self.method, data.train, inputs.options, warm_start=self._warm_start)

    @property
    def options(self) -> TrainingOptions:
        """The training options, in which the patience is decided: by the log, unless it was chosen."""
        options, data = self.inputs.options, self.inputs.data
        if options.patience is not None or data.feeding_user is not None:
            return options
        requests = MOST_STEPS * options.batch if data.stream is not None else len(data.train)
        least = LEAST_STEPS if self.inputs.config.training.warm_start is None else WARM_LEAST_STEPS
        return replace(options, patience=patience_for(requests, options, least=least, most=MOST_STEPS))

    @property
    def starts_well(self) -> bool:
        """Whether the first weights may be the best ones."""
        from_log = self.method.anchored and self.inputs.data.feeding_user is None
        return self.inputs.config.training.warm_start is not None or from_log

    def _warm_start(self) -> None:
        if (run := self.inputs.config.start_run) is not None:
            self._first_weights = start_from(self.method, run, self.inputs.data.train)

    def fit(self, place: FitPlace, relevance: Relevance | None = None) -> Fitted:
        """Train the network in the folder of its fit, or load it if it is there already.

        `relevance` is that of the training rows by trees of the run.
        """
        if (before := load_fitted(place.folder(self.inputs.kind), self.inputs)) is not None:
            return before
        self.prepare(place, relevance=relevance)
        begin_stage("training")
        how: dict[str, Any] = {"select": self.inputs.config.selection, "evaluate_start": self.starts_well}
        for progress in train(self.state, self.feed, self.evaluate, self.options, **how):
            self.record(progress)
        return self.finish()

    def prepare(self, place: FitPlace, lists: ListBatches | None = None, relevance: Relevance | None = None) -> None:
        """Do all work before the first step, or before the next one of a resumed run.

        `lists` are the training requests on the device, if another run has put them there.
        """
        inputs, method, examined = self.inputs, self.method, place.examined
        config, data = inputs.config, inputs.data
        self.place, self.folder = place, place.folder(inputs.kind)
        if place.shared is not None:
            share_logging_score(data.train, place.shared)
        relevance = relevance if method.takes_relevance else None
        if relevance is None:
            fit_bias(method, inputs, place)
        elif is_main():
            known: dict[str, Any] = {"seed": config.seed, "examination": examined.examination}
            method.estimate_bias(data.train, user=None, sessions=0, **known)
        if not has_checkpoint(self.folder):
            if is_main():
                method.estimate_policy(data.train, seed=config.seed)
                if data.feeding_user is None and not self._first_weights:
                    method.start_ranker(data.train, seed=config.seed)
            copy_from_main(method.state_dict().values())
        if self._first_weights:  # the bias stage may have fitted parts of the ranker to the log
            method.serving().load_state_dict(self._first_weights)
        resumed = load_checkpoint(self.folder, self.state)
        check_equal(self.state.step if resumed else -1, "the step to resume from")
        if is_main():
            rewind_metrics(place.run, inputs.kind, self.state.step if resumed else -1)
        self.device = choose_device(config.machine.device)
        by_row = self.device.type == "cpu" or (method.by_item and lists is None)
        if relevance is not None:
            data = replace(data, train=method.with_relevance(data.train, relevance))
        elif by_row and data.stream is None and data.feeding_user is None:
            data = replace(data, train=method.with_targets(data.train))
        self.feed = data.feed(inputs.options, lists)
        self._evaluate_scores = evaluator(config, data, examined.values, self.device)
        self._rows: np.ndarray | Tensor = data.validation.features[own_share(data.validation.rows)]
        if self.device.type == "cuda":
            self._rows = torch.from_numpy(np.array(self._rows)).to(self.device)
        self._some = self._some_rows()
        self._saved = time.monotonic()

    def _some_rows(self) -> HeldOutRows:
        """Return validation rows that decide the weights of the terms of a ranker."""
        log, label = self.inputs.data.validation, self.method.inputs.label
        features, request = log.features[:WEIGHTED_ROWS], log.request_of_row[:WEIGHTED_ROWS]
        labels = positions = None
        if log.positions is not None and set(label.actions) <= set(log.actions):
            labels, positions = label(log.actions)[:WEIGHTED_ROWS], log.positions[:WEIGHTED_ROWS]

        def here(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.array(values)).to(self.device)

        known = (None if each is None else here(each) for each in (labels, positions))
        return HeldOutRows(here(features), here(request), *known)

    def evaluate(self, method: Method) -> dict[str, Tensor]:
        method.eval()
        method.balance(self._some)
        scores = scores_on_device(method.score, self._rows, device=self.device)
        return self._evaluate_scores(gather_shares(scores, self.inputs.data.validation.rows))

    def record(self, progress: Progress) -> None:
        """Write the results of an evaluation, and a checkpoint if the last one is old enough."""
        if is_main():
            loss = progress.loss if math.isfinite(progress.loss) else None
            line = {"ranker": self.inputs.kind, "step": progress.step, "loss": loss, **progress.metrics}
            append_metrics(self.place.run, line)
            if time.monotonic() - self._saved >= self.place.listeners.checkpoint_seconds:
                save_checkpoint(self.folder, self.state)
                self._saved = time.monotonic()
        self.place.listeners.on_progress(replace(progress, ranker=self.inputs.kind))

    def finish(self) -> Fitted:
        """Keep the best weights, write the trained ranker, and return it."""
        method = self.method
        method.load_state_dict(self.state.best_weights)
        method.eval()
        ranker = method.serving().eval()
        report = method.bias(first_batches(self.feed)) if is_main() else None
        scores = scores_of(ranker, self.inputs.data.validation.features)
        ranker = ranker.cpu()  # where the other parts of a sum are
        fitted = Fitted(self.inputs, ranker, method.inputs.ranker_options, scores, report)
        fitted.save(self.folder)
        barrier()
        return fitted
