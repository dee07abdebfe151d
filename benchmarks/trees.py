"""Rounds of boosting with our objectives beside rounds with the library's own LambdaRank, in one run.

    python benchmarks/trees.py --documents 500000 --items 10 40 120

All competitors of a library grow at the same time and take turns, round by round, each with data of its own, through
`Booster.grow`; the order turns with the rounds. A ratio is of two rounds of the same turn: reported are the median of
the ratios and their quartiles. `objective` is one call of ours, within the round, and `share` its part of the round.
What is compiled is compiled before, and the first rounds are left out.

Memory is the largest resident (VmHWM; ru_maxrss of a child would include its parent's) of a process of its own that
reads the features from a file, makes the data set and grows trees. All of these processes import the same modules and
load the same compiled code, so that a ratio is about training; `training` leaves out what was resident before it,
which is those modules, the features and what the objective is made from.
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

from ultr.bias import exact_weights
from ultr.methods.trees import bucketed
from ultr.rankers.boosters import BOOSTERS, Booster, Boosting, TreeRows
from ultr.rankers.trees import Kind, PairTerms, PairwiseObjective, kernels

CLICKS = 0.15  # of items
DEPENDS = 10  # features that relevance follows from
OWN = "own"
LOSSES: dict[str, tuple[Kind, bool]] = {  # kind of weights, and whether times |ΔDCG|
    "posterior": (Kind.GAP, False),
    "opt": (Kind.GAP, True),
    "ipw": (Kind.PRODUCT, False),
    "bayes-ipw": (Kind.TRUSTED, False),
}
MOST_TIME, MOST_MEMORY = 1.5, 1.3  # times the library's own


# --- The log ----------------------------------------------------------------------------------------------------------


def write(folder: Path, documents: int, items: int, features: int) -> None:
    """Position-based users who click on some of the items and stay for a while, and a bias model that knows them."""
    rng = np.random.default_rng(0)
    rows = documents // items * items
    x = rng.standard_normal((rows, features), dtype=np.float32)
    place = np.tile(np.arange(items), rows // items)
    position = 1.0 + np.arange(items)
    theta = position**-0.3
    worth = x[:, :DEPENDS] @ rng.normal(size=DEPENDS).astype(np.float32) / 2
    low, high = -10.0, 10.0
    for _ in range(40):  # until as many are clicked as there should be
        shift = (low + high) / 2
        beta = 1 / (1 + np.exp(-worth.astype(np.float64) - shift))
        low, high = (low, shift) if (theta[place] * beta).mean() > CLICKS else (shift, high)
    stay = np.exp(0.3 * worth + 2)
    clicked = rng.random(rows) < theta[place] * beta
    label = (clicked * rng.exponential(stay)).astype(np.float32)
    unseen = beta * (1 - theta[place]) / (1 - theta[place] * beta)  # P(relevant), of what was not clicked
    ones, seen = torch.ones(rows), torch.from_numpy(theta[place].astype(np.float32))
    below = exact_weights(torch.from_numpy(clicked), ones, seen, torch.from_numpy(beta.astype(np.float32)))
    arrays: dict[str, np.ndarray] = {
        "features": x,
        "offsets": np.arange(0, rows + 1, items),
        "label": label,
        "value": np.where(clicked, label, unseen * stay),
        "above": 1 / theta[place],
        "below": below.numpy(),
        "place": place,
        "preference": worth,
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
    if kind == Kind.TRUSTED:
        rows |= read(folder, "place", "preference", "plus", "minus")
    return PairwiseObjective(PairTerms(offsets, weights, np.load(folder / "label.npy"), kind, by_metric, **rows))


def task(folder: Path, library: str, what: str, features: np.ndarray) -> tuple[TreeRows, dict[str, Any]]:
    """Rows, and the objective in them: five grades for the library's own, or ours."""
    lengths = np.diff(np.load(folder / "offsets.npy"))
    names = tuple(f"f{i}" for i in range(features.shape[1]))
    if what != OWN:
        return TreeRows(features, lengths, names), {"objective": objective(folder, what)}
    grades, gain = bucketed(np.load(folder / "label.npy"))
    if library == "lightgbm":
        return TreeRows(features, lengths, names, label=grades), {
            "own": {"objective": "lambdarank", "label_gain": gain}
        }
    label = np.asarray(gain, np.float32)[grades.astype(np.int64)]
    return TreeRows(features, lengths, names, label=label), {"own": {"objective": "rank:ndcg", "ndcg_exp_gain": False}}


# --- Time -------------------------------------------------------------------------------------------------------------


class Timed:
    """An objective that keeps the seconds of its last call."""

    def __init__(self, inner: Callable[..., tuple[np.ndarray, np.ndarray]]) -> None:
        self.inner, self.seconds = inner, 0.0

    def __deepcopy__(self, _memo: object) -> Timed:
        return self  # LightGBM copies its parameters, and the seconds would be those of the copy

    def __call__(self, scores: np.ndarray, data: object) -> tuple[np.ndarray, np.ndarray]:
        begun = time.perf_counter()
        found = self.inner(scores, data)
        self.seconds = time.perf_counter() - begun
        return found


class Competitor:
    """Trees that grow in a thread of their own, and only for as long as `round` takes."""

    def __init__(self, library: str, rows: TreeRows, rounds: int, inside: dict[str, Any]) -> None:
        self.timed = Timed(inside["objective"]) if "objective" in inside else None
        how = Boosting(rounds, 0.1, **({"objective": self.timed} if self.timed else inside))
        self.go, self.done = SimpleQueue[None](), SimpleQueue[BaseException | None]()
        self.library, self.rows, self.how = library, rows, how
        Thread(target=self._grow, daemon=True).start()
        self.round()  # with the data set

    def _grow(self) -> None:
        def after_round(_booster: Booster, number: int) -> bool:
            self.done.put(None)
            if number < self.how.rounds:
                self.go.get()
            return False

        self.go.get()
        try:
            BOOSTERS[self.library].grow(self.rows, self.how, after_round)
        except BaseException as error:
            self.done.put(error)

    def round(self) -> tuple[float, float]:
        """Seconds of a round, and of our objective in it."""
        begun = time.perf_counter()
        self.go.put(None)
        if (error := self.done.get()) is not None:
            raise error
        return time.perf_counter() - begun, self.timed.seconds if self.timed else 0.0


def rounds_of(folder: Path, library: str, losses: list[str], rounds: int, skipped: int) -> dict[str, np.ndarray]:
    """Seconds of each round and of the objective in it, [rounds, 2], by competitor."""
    features = np.load(folder / "features.npy")
    names = [OWN, *losses]
    all_rounds = rounds + skipped
    competitors = {
        n: Competitor(library, r, all_rounds, i) for n in names for r, i in [task(folder, library, n, features)]
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(1, all_rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(competitors[name].round())
    return {name: np.array(times[skipped - 1 :]) for name, times in found.items()}


# --- Memory -----------------------------------------------------------------------------------------------------------


def resident(which: str) -> float:
    """MiB of this process: VmRSS is what it has, VmHWM the most it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:")) / 1024


def warm() -> None:
    """Load what is compiled, for all competitors alike."""
    import lightgbm  # noqa: F401
    import xgboost  # noqa: F401

    kernels()
    PairwiseObjective(PairTerms(np.array([0, 2]), np.ones(1), np.arange(2.0)))


def child(folder: Path, library: str, what: str, rounds: int) -> dict[str, float]:
    """In this process: the largest resident memory of making a data set and growing trees."""
    warm()
    rows, inside = task(folder, library, what, np.load(folder / "features.npy"))
    before = resident("VmRSS")
    BOOSTERS[library].grow(rows, Boosting(rounds, 0.1, **inside), lambda _booster, _number: False)
    return {"before": before, "peak": resident("VmHWM")}


def peaks(folder: Path, library: str, losses: list[str], rounds: int, threads: int) -> dict[str, dict[str, float]]:
    found = {}
    for what in (OWN, *losses):
        command = [sys.executable, __file__, "--child", what, "--library", library, "--folder", str(folder)]
        command += ["--rounds", str(rounds), "--threads", str(threads)]
        found[what] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


# --- Tables -----------------------------------------------------------------------------------------------------------


def quartiles(values: np.ndarray, digits: int = 2) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def time_table(found: dict[str, np.ndarray]) -> Iterator[str]:
    yield f"  {'':12}{'ms a round':>22}{'times own':>20}{'objective, ms':>22}{'share':>20}"
    own = found[OWN][:, 0]
    for name, times in found.items():
        line = f"  {name:12}{quartiles(1e3 * times[:, 0], 1):>22}"
        if name != OWN:
            ratio = times[:, 0] / own
            line += f"{quartiles(ratio):>20}{quartiles(1e3 * times[:, 1], 1):>22}"
            line += f"{quartiles(times[:, 1] / times[:, 0]):>20}"
            line += "" if np.median(ratio) <= MOST_TIME else f"   above {MOST_TIME}"
        yield line


def memory_table(found: dict[str, dict[str, float]]) -> Iterator[str]:
    yield f"  {'':12}{'peak MiB':>12}{'times own':>12}{'before':>12}{'training':>12}{'times own':>12}"
    own = found[OWN]
    for name, sizes in found.items():
        ratio, training = sizes["peak"] / own["peak"], sizes["peak"] - sizes["before"]
        line = f"  {name:12}{sizes['peak']:12.0f}{ratio:12.2f}{sizes['before']:12.0f}{training:12.0f}"
        line += f"{training / (own['peak'] - own['before']):12.2f}"
        yield line + ("" if ratio <= MOST_MEMORY else f"   above {MOST_MEMORY}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=500_000)
    parser.add_argument("--items", type=int, nargs="+", default=[10, 40, 120], help="of a list")
    parser.add_argument("--features", type=int, default=136)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--skipped", type=int, default=3, help="rounds before those that count")
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
                    found = rounds_of(folder, library, options.losses, options.rounds, options.skipped)
                    print(*time_table(found), sep="\n", flush=True)
                if "memory" in options.what:
                    print(f" {library}, memory: data set and {options.rounds} rounds")
                    sizes = peaks(folder, library, options.losses, options.rounds, options.threads)
                    print(*memory_table(sizes), sep="\n", flush=True)


if __name__ == "__main__":
    main()
