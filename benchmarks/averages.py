"""Measure what the average of ratios that the CIKM 2022 paper prints (`em=printed`) costs against `em=joint`.

    python benchmarks/averages.py [--seeds 3] [--sessions 2000] [--steps 500] [--batches 8,32,256]

Users are simulated, and θ, β and γ are known, so that EM estimates only ε⁺, ε⁻ and θ⁻. The error is the mean absolute
difference between ε⁺ after some batches, and the fixed point of EM on the whole log.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from ultr.datasets import load_dataset, ranking_svm, show
from ultr.datasets.users import User, simulate_log
from ultr.lists import Lists
from ultr.log.labels import Label
from ultr.methods import MethodInputs
from ultr.methods.bias_model import OracleModel

ITERATIONS = 100  # of EM on the whole log


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="logs")
    parser.add_argument("--sessions", type=int, default=2000, help="requests of a log")
    parser.add_argument("--steps", type=int, default=500, help="batches, drawn from the log")
    parser.add_argument("--batches", default="8,32,256", help="requests per batch, separated by commas")
    options = parser.parse_args()
    sizes = [int(size) for size in options.batches.split(",")]
    data = load_dataset("synthetic")
    user = User(max_grade=data.max_grade)
    errors: dict[tuple[int, bool], list[float]] = {(size, printed): [] for size in sizes for printed in (False, True)}
    for seed in range(options.seeds):
        rng = np.random.default_rng(seed)
        shown = show(data.train, ranking_svm(data.train, seed=seed)(data.train.features))
        log, _ = simulate_log(shown.select(rng.integers(0, len(shown), options.sessions)), user, seed=seed)
        positions = tuple(np.unique(log.shown_positions("this benchmark")).tolist())
        inputs = MethodInputs(Label(), data.train.features.shape[1], positions, user=user, binary=("click",))
        whole, lists = OracleModel(inputs, pairs=True), Lists.from_log(log)
        for _ in range(ITERATIONS):
            whole.updates.zero_()  # no earlier batches count
            whole.update(lists)
        seen = whole.pair_sums[1].view_as(whole.plus) > 0
        for (size, printed), found in errors.items():
            model = OracleModel(inputs, pairs=True, printed=printed)
            drawn = np.random.default_rng([seed, size])  # both forms have the same batches
            for _ in range(options.steps):
                model.update(Lists.from_log(log.select(drawn.integers(0, len(log), size))))
            found.append(float((model.plus - whole.plus)[seen].abs().mean()))
    for size in sizes:
        joint, ratios = (np.array(errors[size, each]) for each in (False, True))
        print(
            f"batches of {size}: error of eps+ {joint.mean():.3f} ± {joint.std():.3f} (em=joint), "
            f"{ratios.mean():.3f} ± {ratios.std():.3f} (em=printed), ratio {ratios.mean() / joint.mean():.1f}"
        )


if __name__ == "__main__":
    main()
