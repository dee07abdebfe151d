"""The bias stage of training, for tests of methods."""

from __future__ import annotations

from ultr.datasets.users import User
from ultr.log import Log
from ultr.methods import Method
from ultr.training.biases import bias_training
from ultr.training.config import TrainingOptions
from ultr.training.data import Data
from ultr.training.loop import train


def fit_bias(method: Method, log: Log, options: TrainingOptions, user: User | None = None) -> None:
    if (training := bias_training(method, Data(log, log, "", feeding_user=user), options)) is not None:
        for _ in train(training.state, training.feed, training.evaluate, training.options, select="likelihood"):
            pass
        training.finish()
    method.estimate_policy(log, seed=options.seed)
