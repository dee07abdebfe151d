"""Compare rounds of boosting with our objectives to rounds with LambdaRank of the tree library, in one run.

    python benchmarks/trees.py --documents 500000 --items 10 40 120

All competitors of a library grow through `Booster.grow` and take turns, round by round, in rotating order. Each has its
own copy of the data. A ratio compares two rounds of the same turn. The output has the median of the ratios and their
quartiles. `objective` is the time of one call of our objective, and `share` is its share of the round. Code is compiled
before, and the first rounds are not counted.

Memory is the peak resident memory (VmHWM, because ru_maxrss of a child includes its parent's) of a separate process.
The process reads the features from a file, makes the data set and grows trees. All of these processes import the same
modules and load the same compiled code, so that a ratio is about training. `before` is the memory of the modules, the
features and the inputs of the objective. `training` is the peak without it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch

from ultr.bias.equations import exact_below
from ultr.methods.trees import bucketed
from ultr.rankers.boosters import BOOSTERS, Booster, Boosting, TreeRows
from ultr.rankers.tree_objective import Kind, PairTerms, PairwiseObjective, kernels

CLICKS = 0.15  # the share of items that are clicked
RELEVANT_FEATURES = 10  # relevance is a function of this number of features
BUILT_IN = "LambdaRank"
LOSSES: dict[str, tuple[Kind, bool]] = {  # the kind of weights, and whether they are multiplied by |ΔDCG|
    "posterior": (Kind.GAP, False),
    "opt-posterior": (Kind.GAP, True),
    "ipw, exact": (Kind.PRODUCT, False),
    "bayes-ipw, exact": (Kind.TRUSTED, False),
    "bayes-ipw": (Kind.PAPER, False),
}
TIME_BOUND, MEMORY_BOUND = 1.5, 1.3  # relative to LambdaRank of the library


# --- The log ----------------------------------------------------------------------------------------------------------


def write(folder: Path, documents: int, items: int, features: int) -> None:
    """Write the clicks and dwell times of simulated position-based users, and the true bias model of these users."""
    rng = np.random.default_rng(0)
    rows = documents // items * items
    x = rng.standard_normal((rows, features), dtype=np.float32)
    place = np.tile(np.arange(items), rows // items)
    position = 1.0 + np.arange(items)
    theta = position**-0.3
    worth = x[:, :RELEVANT_FEATURES] @ rng.normal(size=RELEVANT_FEATURES).astype(np.float32) / 2
    low, high = -10.0, 10.0
    for _ in range(40):  # find the shift that gives the share of clicks, by bisection
        shift = (low + high) / 2
        beta = 1 / (1 + np.exp(-worth.astype(np.float64) - shift))
        low, high = (low, shift) if (theta[place] * beta).mean() > CLICKS else (shift, high)
    stay = np.exp(0.3 * worth + 2)
    clicked = rng.random(rows) < theta[place] * beta
    label = (clicked * rng.exponential(stay)).astype(np.float32)
    unseen = beta * (1 - theta[place]) / (1 - theta[place] * beta)  # P(relevant | not clicked)
    seen = torch.from_numpy(theta[place].astype(np.float32))
    below = exact_below(torch.from_numpy(clicked), seen, torch.from_numpy(beta.astype(np.float32)))
    arrays: dict[str, np.ndarray] = {
        "features": x,
        "offsets": np.arange(0, rows + 1, items),
        "label": label,
        "value": np.where(clicked, label, unseen * stay),
        "above": 1 / theta[place],
        "below": below.numpy(),
        "place": place,
        "preference": worth,
        "beta": beta,
        "examined": (theta * (1 - CLICKS))[place],
        "plus": 0.6 + 0.4 / (1 + np.abs(position[:, None] - position)),
        "minus": 0.4 / np.sqrt(position[:, None] * np.ones(items)),
    }
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)


def read(folder: Path, *names: str) -> dict[str, Any]:
    return {name: np.load(folder / f"{name}.npy") for name in names}


def objective(folder: Path, loss: str) -> PairwiseObjective:
    kind, by_metric = LOSSES[loss]
    offsets = np.load(folder / "offsets.npy")
    weights = np.ones(len(offsets) - 1)
    if kind == Kind.GAP:
        return PairwiseObjective(PairTerms(offsets, weights, np.load(folder / "value.npy"), kind, by_metric))
    rows = read(folder, "above", "below")
    if kind in (Kind.TRUSTED, Kind.PAPER):
        rows |= read(folder, "place", "preference", "beta", "examined", "plus", "minus")
    return PairwiseObjective(PairTerms(offsets, weights, np.load(folder / "label.npy"), kind, by_metric, **rows))


def task(folder: Path, library: str, what: str, features: np.ndarray) -> tuple[TreeRows, dict[str, Any]]:
    """Return rows and options of `Boosting`: LambdaRank of the library on five grades, or one of our objectives."""
    lengths = np.diff(np.load(folder / "offsets.npy"))
    names = tuple(f"f{i}" for i in range(features.shape[1]))
    if what != BUILT_IN:
        return TreeRows(features, lengths, names), {"objective": objective(folder, what)}
    label, gain = bucketed(np.load(folder / "label.npy"))
    options: dict[str, Any] = {"objective": "lambdarank", "label_gain": gain}
    if library == "xgboost":
        label = np.asarray(gain, np.float32)[label.astype(np.int64)]
        options = {"objective": "rank:ndcg", "ndcg_exp_gain": False}
    return TreeRows(features, lengths, names, label=label), {"library_options": options}


# --- Time -------------------------------------------------------------------------------------------------------------


class Timed:
    """An objective that stores the seconds of its last call."""

    def __init__(self, inner: Callable[..., tuple[np.ndarray, np.ndarray]]) -> None:
        self.inner, self.seconds = inner, 0.0

    def __deepcopy__(self, _memo: object) -> Timed:
        return self  # LightGBM copies its parameters, and only the copy would store the seconds

    def __call__(self, scores: np.ndarray, data: object) -> tuple[np.ndarray, np.ndarray]:
        begun = time.perf_counter()
        derivatives = self.inner(scores, data)
        self.seconds = time.perf_counter() - begun
        return derivatives


class Competitor:
    """Trees that grow in a separate thread, only while `round` runs."""

    def __init__(self, library: str, rows: TreeRows, rounds: int, inside: dict[str, Any]) -> None:
        self.timed = Timed(inside["objective"]) if "objective" in inside else None
        boosting = Boosting(rounds, 0.1, **({"objective": self.timed} if self.timed else inside))
        self.go, self.done = SimpleQueue[None](), SimpleQueue[BaseException | None]()
        self.library, self.rows, self.boosting = library, rows, boosting
        Thread(target=self._grow, daemon=True).start()
        self.round()  # the first round also makes the data set

    def _grow(self) -> None:
        def after_round(_booster: Booster, number: int) -> bool:
            self.done.put(None)
            if number < self.boosting.rounds:
                self.go.get()
            return False

        self.go.get()
        try:
            BOOSTERS[self.library].grow(self.rows, self.boosting, after_round)
        except BaseException as error:
            self.done.put(error)

    def round(self) -> tuple[float, float]:
        """Grow one round; return its seconds, and those of our objective in it."""
        begun = time.perf_counter()
        self.go.put(None)
        if (error := self.done.get()) is not None:
            raise error
        return time.perf_counter() - begun, self.timed.seconds if self.timed else 0.0


def measure_rounds(folder: Path, library: str, losses: list[str], rounds: int, skipped: int) -> dict[str, np.ndarray]:
    """Return the seconds of each round and of the objective in it, [rounds, 2], by competitor."""
    features = np.load(folder / "features.npy")
    names = [BUILT_IN, *losses]
    all_rounds = rounds + skipped
    competitors = {
        n: Competitor(library, r, all_rounds, i) for n in names for r, i in [task(folder, library, n, features)]
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(1, all_rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(competitors[name].round())
    return {name: np.array(rounds[skipped - 1 :]) for name, rounds in times.items()}


# --- Memory -----------------------------------------------------------------------------------------------------------


def resident(which: str) -> float:
    """Return the resident memory of this process in MiB: VmRSS is the current, VmHWM the peak value."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:")) / 1024


def warm() -> None:
    """Load the libraries and the compiled code, so that it is in the memory of every competitor."""
    import lightgbm  # noqa: F401
    import xgboost  # noqa: F401

    kernels()
    PairwiseObjective(PairTerms(np.array([0, 2]), np.ones(1), np.arange(2.0)))


def child(folder: Path, library: str, what: str, rounds: int) -> dict[str, float]:
    """Make a data set and grow trees in this process; return its memory before, and its peak."""
    warm()
    rows, inside = task(folder, library, what, np.load(folder / "features.npy"))
    before = resident("VmRSS")
    BOOSTERS[library].grow(rows, Boosting(rounds, 0.1, **inside), lambda _booster, _number: False)
    return {"before": before, "peak": resident("VmHWM")}


def peaks(folder: Path, library: str, losses: list[str], rounds: int, threads: int) -> dict[str, dict[str, float]]:
    sizes = {}
    for what in (BUILT_IN, *losses):
        command = [sys.executable, __file__, "--child", what, "--library", library, "--folder", str(folder)]
        command += ["--rounds", str(rounds), "--threads", str(threads)]
        sizes[what] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return sizes


# --- Tables -----------------------------------------------------------------------------------------------------------


def quartiles(values: np.ndarray, digits: int = 2) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def time_table(times: dict[str, np.ndarray]) -> Iterator[str]:
    yield f"  {'':12}{'ms per round':>22}{'ratio':>20}{'objective, ms':>22}{'share':>20}"
    for name, rounds in times.items():
        line = f"  {name:12}{quartiles(1e3 * rounds[:, 0], 1):>22}"
        if name != BUILT_IN:
            ratio = rounds[:, 0] / times[BUILT_IN][:, 0]
            line += f"{quartiles(ratio):>20}{quartiles(1e3 * rounds[:, 1], 1):>22}"
            line += f"{quartiles(rounds[:, 1] / rounds[:, 0]):>20}"
            line += "" if np.median(ratio) <= TIME_BOUND else f"   above the bound {TIME_BOUND}"
        yield line


def memory_table(sizes: dict[str, dict[str, float]]) -> Iterator[str]:
    yield f"  {'':12}{'peak MiB':>12}{'ratio':>12}{'before':>12}{'training':>12}{'ratio':>12}"
    built_in = sizes[BUILT_IN]
    for name, size in sizes.items():
        ratio, training = size["peak"] / built_in["peak"], size["peak"] - size["before"]
        line = f"  {name:12}{size['peak']:12.0f}{ratio:12.2f}{size['before']:12.0f}{training:12.0f}"
        line += f"{training / (built_in['peak'] - built_in['before']):12.2f}"
        yield line + ("" if ratio <= MEMORY_BOUND else f"   above the bound {MEMORY_BOUND}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=500_000, help="rows of the log")
    parser.add_argument("--items", type=int, nargs="+", default=[10, 40, 120], help="list lengths to measure")
    parser.add_argument("--features", type=int, default=136)
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds")
    parser.add_argument("--skipped", type=int, default=3, help="rounds before the measured ones")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--library", choices=list(BOOSTERS), nargs="+", default=list(BOOSTERS))
    parser.add_argument("--losses", choices=list(LOSSES), nargs="+", default=list(LOSSES))
    parser.add_argument("--what", choices=("time", "memory"), nargs="+", default=["time", "memory"])
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        print(json.dumps(child(options.folder, options.library[0], options.child, options.rounds)))
        return
    warm()
    for items in options.items:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write(folder, options.documents, items, options.features)
            clicks = float((np.load(folder / "label.npy") > 0).mean())
            print(
                f"{options.documents} documents in lists of {items}, {options.features} features, "
                f"{clicks:.0%} clicked, {options.threads} threads",
                flush=True,
            )
            for library in options.library:
                if "time" in options.what:
                    print(f" {library}, time: median (quartiles) of {options.rounds} rounds")
                    times = measure_rounds(folder, library, options.losses, options.rounds, options.skipped)
                    print(*time_table(times), sep="\n", flush=True)
                if "memory" in options.what:
                    print(f" {library}, memory: data set and {options.rounds} rounds")
                    sizes = peaks(folder, library, options.losses, options.rounds, options.threads)
                    print(*memory_table(sizes), sep="\n", flush=True)


if __name__ == "__main__":
    main()
