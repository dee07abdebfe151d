"""Fit the bias model of a ranker, which comes before the ranker: a part of the stage `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ultr.bias.examination import Examination
from ultr.bias.propensities import BIAS_FILE, known_slots, theta_by_id
from ultr.errors import DataError
from ultr.lists import ListBatches, Lists
from ultr.log import Log
from ultr.log.splits import queries_of, split_by_query
from ultr.methods import Method
from ultr.methods.bias_model import BiasModel
from ultr.methods.pair_weights import PairWeights
from ultr.rankers.matching import load_matched_weights, load_weights, match_features
from ultr.rankers.model import load_model
from ultr.training.config import BIAS_TRAINING, TrainingOptions, patience_for
from ultr.training.data import Data, used_requests
from ultr.training.feed import Feed, Feeding, step_seed
from ultr.training.fitting import FitInputs, FitPlace
from ultr.training.folder import STAGE, fit_folder, load_checkpoint, part_of, save_checkpoint, wait_for_lock
from ultr.training.loop import TrainingState, start, train
from ultr.utils.display import begin_stage
from ultr.utils.distributed import check_equal, choose_device, copy_from_main, is_main
from ultr.utils.files import atomic_path
from ultr.utils.jsonfiles import load_tensors, read_json, save_tensors, write_json
from ultr.utils.stores import fetched

HELD_OUT_SHARE = 0.1  # share of the training requests that are held out to evaluate the fit of a bias model
NEW_SHARE = 0.2  # largest share of the new requests that are held out, if training starts from another bias model
LEAST_STEPS, MOST_STEPS = 200, 1000  # without improvement, after which the training of a bias model stops
LEAST_GAIN = 0.001  # share of the held-out likelihood; training that gains less in all these steps stops too
HELD_OUT_BATCHES = 8  # at most, one for every 128 requests
SHORT_LIST = 64  # items; shorter lists are evaluated all at once on a GPU
BIAS = "bias"  # folder of a fit
EVIDENCE = "evidence.json"  # how θ was estimated, for the report
Weights = Mapping[str, Tensor]
ESTIMATED = ("theta", "zeta", "impressions", "clicks", "shown", "moved")  # buffers of a bias model, estimated once


def fit_bias(method: Method | PairWeights, inputs: FitInputs, place: FitPlace) -> None:
    """Fit the bias of a method, or load it if it was saved: by this run, by that of `--bias`, or in the shared folder.

    The fit starts from the bias model of the run `warm_start`, if this run has one for the same label and positions.
    """
    begin_stage("estimating the bias")
    config, data, kind, shared = inputs.config, inputs.data, inputs.kind, place.shared
    model, folder = method.bias_learner(), place.folder(kind) / BIAS
    if not isinstance(model, BiasModel):  # all other kinds of bias are fitted quickly, and not used by other runs
        _train(method, inputs, place, None)
        return
    if folder.is_dir():  # written by this run before it was killed
        load_bias(folder, model)
        return
    before, begin = config.start_run, None
    if before is not None and (fit_folder(before, kind) / BIAS).is_dir():
        begin = Beginning(before, kind, data)
    other = None if config.examination.bias is None else fetched(config.examination.bias)
    if other is not None and (fit_folder(other, kind) / BIAS).is_dir():
        _take_bias(other, kind, model, data)
    elif shared is None:
        _train(method, inputs, place, begin)
    else:
        shared_model = shared / config.shared_key(kind, data.label, model.settings())
        with wait_for_lock(shared_model):
            if shared_model.is_dir():
                load_bias(shared_model, model)
            else:
                _train(method, inputs, place, begin)
                save_bias(shared_model, model)
    if is_main():
        save_bias(folder, model)


def _train(method: Method | PairWeights, inputs: FitInputs, place: FitPlace, begin: Beginning | None) -> None:
    """Estimate the bias of a method, and train its bias model, if it has one, from the newest checkpoint."""
    folder, saved = place.folder(inputs.kind) / STAGE, time.monotonic()
    training = bias_training(method, inputs.data, inputs.options, examination=place.examined.examination, begin=begin)
    if training is None:
        return
    state = training.state
    resumed = load_checkpoint(folder, state)
    check_equal(state.step if resumed else -1, "the step of the bias model to resume from")
    how: dict[str, Any] = {"select": "likelihood", "evaluate_start": training.continued}
    for evaluation in train(state, training.feed, training.evaluate, training.options, **how):
        if is_main() and time.monotonic() - saved >= place.listeners.checkpoint_seconds:
            save_checkpoint(folder, state)
            saved = time.monotonic()
        place.listeners.on_bias_progress(replace(evaluation, ranker=inputs.kind))
    training.finish()


@dataclass(frozen=True, eq=False)
class Beginning:
    """The bias model of the run `warm_start`, which the fit of a bias model starts from."""

    run: Path
    kind: str
    data: Data

    def give(self, model: BiasModel) -> bool:
        """Give a bias model the networks of that run; return False if they are for other data or labels.

        Estimates by position stay as they are: they are known, or were estimated before.
        """
        known = ("theta", "shown") if model.theta_from == "known" else () if model.theta_learned else ESTIMATED
        kept, evidence = {name: getattr(model, name).clone() for name in known}, model.evidence
        network, weights = model.network, {name: values.clone() for name, values in model.state_dict().items()}
        try:
            _take_bias(self.run, self.kind, model, self.data)
        except DataError:
            model.network, model.evidence = network, evidence
            model.load_state_dict(weights)
            return False
        for name, values in kept.items():
            getattr(model, name).copy_(values)
        model.evidence = model.evidence if model.theta_from == "known" else evidence
        return True

    def new_requests(self, log: Log) -> np.ndarray | None:
        """Return the indices of the requests of queries that the other run was not trained on; None if not known."""
        used = used_requests(self.run, log)
        if used is None:
            return None
        query = queries_of(log)
        return np.flatnonzero(np.bincount(query, used[0] | used[1])[query] == 0)


@dataclass(frozen=True, eq=False)
class BiasTraining:
    """All that is needed to train a bias model."""

    state: TrainingState
    feed: Feeding
    held_out: list[Lists]
    options: TrainingOptions
    continued: bool = False  # whether it starts from the bias model of another run

    def evaluate(self, model: Any) -> dict[str, Tensor]:
        model.eval()
        return dict(model.held_out_metrics(self.held_out))

    def finish(self) -> None:
        self.state.method.load_state_dict(self.state.best_weights)


def bias_training(
    method: Method | PairWeights,
    data: Data,
    options: TrainingOptions,
    *,
    examination: Examination | None = None,
    begin: Beginning | None = None,
    lists: ListBatches | None = None,
) -> BiasTraining | None:
    """Estimate the bias of a method from the whole log; return what trains its bias model, or None.

    The bias model has its own learning rate and steps, so that those of the ranker can be tuned separately.
    `examination` is the estimate of the run. `begin` gives the bias model the weights that it starts from. `lists` are
    the training requests, if the device has them.
    """
    seed, device = options.seed, choose_device(options.device)
    log, user, stream = data.train, data.feeding_user, data.stream
    if is_main():
        sessions = options.bias_steps * options.batch
        method.estimate_bias(log, user=user, sessions=sessions, seed=seed, examination=examination)
    copy_from_main(method.state_dict().values())
    model = method.bias_learner()
    if model is None or next(model.parameters(), None) is None:
        return None
    bias_options = replace(
        BIAS_TRAINING,
        steps=options.bias_steps,
        batch=options.batch,
        seed=step_seed(seed, 0, 3),
        device=options.device,
        precision=options.precision,
    )
    new = None if stream is not None or begin is None else begin.new_requests(log)
    if stream is None and user is None:
        least, most = (LEAST_STEPS, MOST_STEPS) if begin is None else (LEAST_STEPS // 4, MOST_STEPS // 2)
        to_learn = len(log) if new is None else len(new)
        patience = patience_for(to_learn, bias_options, least=least, most=most)
        bias_options = replace(bias_options, patience=patience)
    if stream is None:
        learned, held_out = held_out_requests(log, seed, new=new)
        lists, count = lists or ListBatches(log, device=device), len(held_out)
        feed: Feeding = Feed(lists, batch=bias_options.batch, seed=bias_options.seed, user=user, requests=learned)
        held_out_feed = Feed(lists, batch=256, seed=bias_options.seed, user=user, requests=held_out)
    else:
        feed, count = stream(bias_options), len(data.validation)
        held_out_feed = Feed(ListBatches(data.validation, device=device), batch=256, seed=bias_options.seed)
    held_out_lists = [held_out_feed(step) for step in range(max(1, min(HELD_OUT_BATCHES, count // 128)))]
    if device.type == "cuda" and max(each.where.shape[1] for each in held_out_lists) <= SHORT_LIST:
        held_out_lists = [Lists.together([replace(each, parts=(), key=None) for each in held_out_lists])]
    continued = False

    def warm_start() -> None:
        nonlocal continued
        continued = begin is not None and isinstance(model, BiasModel) and begin.give(model)

    state = start(model, log, bias_options, warm_start=warm_start)
    state.stopping.least = LEAST_GAIN
    return BiasTraining(state, feed, held_out_lists, bias_options, continued)


def held_out_requests(log: Log, seed: int, *, new: np.ndarray | None = None) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the indices of the requests that a bias model learns from (None: all), and of those that evaluate it.

    Requests of a query are either all learned from or all held out. If there are `new` requests, which the bias model
    that training starts from has not seen, a part of these is held out.
    """
    count = HELD_OUT_SHARE * len(log)
    if new is not None and len(new):
        chosen, _ = split_by_query(log.select(new), [max(1, round(min(count, NEW_SHARE * len(new))))], seed=seed)
        held_out = new[chosen]
        learned = np.setdiff1d(np.arange(len(log)), held_out)
    else:
        held_out, learned = split_by_query(log, [max(1, round(count))], seed=seed)
    return (learned if len(learned) else None), held_out


# --- Files --------------------------------------------------------------------------------------------------------


def save_bias(folder: Path, model: BiasModel) -> None:
    """Write the weights of a bias model into a folder."""
    with atomic_path(folder, overwrite=True, folder=True) as temporary:
        save_tensors(temporary / "weights.safetensors", model.state_dict())
        if model.evidence:
            write_json(temporary / EVIDENCE, model.evidence)


def load_bias(folder: Path, model: BiasModel, load: Callable[[nn.Module, Weights], None] = load_weights) -> None:
    """Load a saved bias model; `load` loads the weights, if the features or positions of the two may differ."""
    try:
        load(model, load_tensors(folder / "weights.safetensors"))
        if (folder / EVIDENCE).is_file():  # known propensities have none
            model.evidence = read_json(folder / EVIDENCE)
    except (RuntimeError, KeyError, ValueError, IndexError) as error:
        hint = "pass --bias with a run that has the same features, positions, label and bias options"
        raise DataError("the saved bias model does not fit this run", where=folder, hint=hint) from error


def _take_bias(run: Path, kind: str, model: BiasModel, data: Data) -> None:
    """Load the bias model of another run: its features are matched by name and value, and its positions by name."""
    report, folder = read_json(run / BIAS_FILE), fit_folder(run, kind) / BIAS
    only_positions = f"pass only the estimates by position, with --bias {run / BIAS_FILE}"
    if (label := report.get("label")) != data.label:
        hint = f"pass --label '{label}', or {only_positions}"
        raise DataError("the bias model is for another label", where=run, got=f"'{label}'", hint=hint)
    trained = load_model(part_of(run, kind))
    match = match_features(trained, data.train)
    saved = [str(position) for position in report["positions"]]
    ids = tuple(model.index.ids.tolist())
    places = torch.tensor([saved.index(name) for name in known_slots(saved, ids, data.segments, nearest=True).values()])

    def of_positions(theta: Sequence[float]) -> list[float]:
        known = dict(zip(saved, theta, strict=True))
        return list(theta_by_id(known, ids, data.segments, nearest=True).values())

    def load(module: nn.Module, weights: Weights) -> None:
        at_positions = model.weights_at(weights, places)
        at_positions["theta"] = torch.tensor(of_positions(weights["theta"].tolist())).to(weights["theta"])
        load_matched_weights(module, at_positions, match, indicators=trained.indicators or ())

    load_bias(folder, model, load)
    if "theta" in model.evidence:
        model.evidence["theta"] = of_positions(model.evidence["theta"])
