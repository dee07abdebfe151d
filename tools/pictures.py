"""Draw the pictures of docs/concepts, from simulated users: `python tools/pictures.py`. Takes about a minute."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from ultr.bias.after_click import estimate_after_click
from ultr.bias.examination import estimate_examination
from ultr.datasets import load_dataset, randomise, ranking_svm, show
from ultr.datasets.users import CarouselUser, User, draw_sessions, make_user, simulate_log
from ultr.evaluation.off_policy import OffPolicyValue, fit_direct, off_policy_value
from ultr.evaluation.scores import evaluate_scores, mean_with_interval
from ultr.log import Log, read_log
from ultr.log.labels import Label
from ultr.log.table import by_position, by_row, by_segment, grid_ids, slot
from ultr.log.watch import WatchModel
from ultr.report.page import Plot
from ultr.report.plots import heat_map, interval_plot, line_plot, svg
from ultr.report.runs import load_run, reliability_plot
from ultr.training.config import make_config
from ultr.training.run import run_training
from ultr.utils.files import atomic_path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from worlds.contexts import contexts  # type: ignore[import-not-found]
from worlds.shown import SLOPE, shown, without_column  # type: ignore[import-not-found]
from worlds.watches import watches  # type: ignore[import-not-found]

FOLDER = Path(__file__).parents[1] / "docs" / "concepts"
SESSIONS, POSITIONS = 20_000, np.arange(1, 11)
NAMES = [str(k) for k in POSITIONS]


def lines(title: str, values: dict[str, np.ndarray], y: str, *, dashed: tuple[str, ...] = ()) -> Plot:
    points = {name: (NAMES[: len(each)], [float(value) for value in each]) for name, each in values.items()}
    return line_plot(title, points, x="position", y=y, from_zero=True, categories=True, dashed=dashed)


def draw(name: str, plot: Plot) -> None:
    with atomic_path(FOLDER / f"{name}.svg", overwrite=True) as path:
        path.write_text(svg(plot.title, plot.figure, 300, width=600), encoding="utf-8")


def main() -> None:
    data, user = load_dataset("synthetic"), User()
    initial = ranking_svm(data.train)
    listed = show(data.train, initial(data.train.features))
    log, _ = simulate_log(listed, user, sessions=SESSIONS)
    theta = user.theta(torch.from_numpy(POSITIONS)).double().numpy()
    clicks = by_position(log).rates["click"]
    attracted = user.attracted(torch.from_numpy(log.true_relevance)).numpy()
    relevance = np.array([attracted[log.shown_positions("a picture") == k].mean() for k in POSITIONS])

    title = "Clicks fall faster than relevance (position 1 = 1)"
    values = {"clicks": clicks / clicks[0], "true relevance": relevance / relevance[0], "examination": theta / theta[0]}
    draw("position-bias", lines(title, values, "relative", dashed=("examination",)))

    corrected = clicks / theta
    values = {"clicks": clicks / clicks[0], "clicks / θ": corrected / corrected[0], "true": relevance / relevance[0]}
    draw("propensities", lines("Divided by examination, clicks show relevance", values, "relative", dashed=("true",)))

    rng = np.random.default_rng(0)
    good = ranking_svm(data.train, share=0.5)(data.train.features)
    ordered, mixed = (
        by_position(simulate_log(show(data.train, scores), user, sessions=SESSIONS, seed=1)[0]).rates["click"]
        for scores in (good, rng.random(data.train.rows))
    )
    values = {"production order": ordered / ordered[0], "random order": mixed / mixed[0], "true θ": theta / theta[0]}
    draw("identification", lines("Clicks on requests in random order show θ", values, "relative", dashed=("true θ",)))

    trusting = make_user("trust", eta=0.0)
    grades = {"relevant item": 4.0, "item that is not relevant": 0.0}
    positions = torch.from_numpy(POSITIONS)
    values = {
        name: trusting.expected(torch.full((len(POSITIONS),), grade), positions, "click").double().numpy()
        for name, grade in grades.items()
    }
    draw("trust", lines("Users trust high positions: P(click | examined)", values, "probability of a click"))

    draw("after-click", dwell_after_clicks())
    draw("off-policy", values_of_rankers(user))
    draw("watch-time", watch_times())
    draw("scores", reliability_of_run(log))
    draw("not-shown", examination_of_viewports())
    draw("grid", carousels())
    draw("contexts", curves_of_a_small_context())


def watch_times() -> Plot:
    """Plot the mean watch time by the length of videos: as logged, with cut watches continued, and in truth."""
    world = watches(SESSIONS)
    log = read_log(world.log, actions="watch", features="duration", extra=["duration", "cut"])
    model = WatchModel("watch", "duration", "cut").fit(log)
    started = log.actions["watch"] > 0
    group = np.searchsorted(model.limits, log.extra["duration"])[started]
    each = {"logged": log.actions["watch"], "continued": model(log).actions["watch"], "true": world.uncut}
    x = [f"{np.median(log.extra['duration'][started][group == g]):.0f}" for g in range(len(model.groups))]
    means = {name: np.bincount(group, values[started]) / np.bincount(group) for name, values in each.items()}
    points = {name: (x, values.tolist()) for name, values in means.items()}
    title, x_title = "Ends of sessions cut watches of long videos", "length of the video in seconds"
    return line_plot(title, points, x=x_title, y="mean watch time", from_zero=True, categories=True, dashed=("true",))


def dwell_after_clicks() -> Plot:
    """Plot the dwell time of clicked rows by position: as logged, and if an item were clicked at another position."""
    data, user = load_dataset("synthetic"), make_user("watch")
    shown = show(data.train, ranking_svm(data.train, share=0.3)(data.train.features))
    log, _ = simulate_log(randomise(draw_sessions(shown, 4 * SESSIONS), 0.3), user)
    clicked = log.actions["click"] > 0
    logged = np.array([log.actions["dwell"][clicked & (log.positions == k)].mean() for k in POSITIONS])
    tau = estimate_after_click(log, Label("click + dwell"))["dwell"].tau
    truth = np.sqrt(2 / (POSITIONS + 1))
    values = {"clicked rows as logged": logged / logged[0], "estimated τ": np.array(tau), "true τ": truth}
    return lines("Dwell after a click (position 1 = 1)", values, "relative", dashed=("true τ",))


def reliability_of_run(log: Log) -> Plot:
    """Plot the mean feedback on test requests by expected feedback, for a run on a simulated log."""
    config = make_config(label="click", ranker="lightgbm", device="cpu")
    with TemporaryDirectory() as folder:
        run = load_run(run_training(config, Path(folder) / "run", source=replace(log, relevance=None)))
    return reliability_plot("Clicks on test requests are as expected", run)


def examination_of_viewports() -> Plot:
    """Plot θ estimated from a log whose sessions end, with and without the column that marks what was shown."""
    table = shown(SESSIONS, viewport=True)
    logs = {"with the column": table, "without the column": without_column(table)}
    values = {}
    for name, rows in logs.items():
        theta = estimate_examination(read_log(rows, features=["f1", "f2"], actions=["click"]), Label("click")).theta
        values[name] = theta / theta[0]
    title = "Rows below the last seen one make examination look low"
    return lines(title, {**values, "true": POSITIONS**-SLOPE}, "θ relative to position 1", dashed=("true",))


def carousels(rows: int = 4, columns: int = 6) -> Plot:
    """Plot how often users of carousels look at each slot."""
    slots = grid_ids(np.repeat(np.arange(1, rows + 1), columns), np.tile(np.arange(1, columns + 1), rows))
    theta = CarouselUser(columns=columns).theta(torch.from_numpy(slots)).double().tolist()
    names, places, values = by_row(slots.tolist(), theta)
    title = "Examination of four carousels: users swipe to see columns 5 and 6"
    return heat_map(title, values, columns=places, rows=names, x="column", y="row")


def curves_of_a_small_context(name: str = "desk + home") -> Plot:
    """Plot examination in the rarest of four contexts: the truth, and three estimates of it."""
    table, truth = contexts(30_000, seed=4)
    whole = read_log(table, segment="device,surface", randomised="random", features=[])
    log, segments = by_segment(whole)
    slots = [f"{k}@{name}" for k in range(1, 9)]

    def curve(segments_of: tuple[str, ...], log: Log, *, shared: bool) -> np.ndarray:
        found = estimate_examination(log, Label("click"), segments=segments_of if shared else ())
        theta = {slot(k, segments_of): value for k, value in found.by_position().items()}
        values = np.array([theta[text if segments_of else text.partition("@")[0]] for text in slots])
        return np.asarray(values / values[0])

    values = {
        "one curve for all": curve((), whole, shared=False),
        "this segment alone": curve(segments, log, shared=False),
        "shared strength": curve(segments, log, shared=True),
        "true": np.array([truth[text] for text in slots]),
    }
    return lines("Examination on desktops at home, 3% of the requests", values, "relative", dashed=("true",))


def values_of_rankers(user: User, k: int = 3) -> Plot:
    """Plot clicks@k of the old and a new ranker: as logged clicks say, as estimated off policy, and in truth."""
    data = load_dataset("synthetic")
    old, new = ranking_svm(data.train), ranking_svm(data.train, share=0.2)
    log, _ = simulate_log(show(data.train, old(data.train.features)), user, sessions=SESSIONS)
    train, held_out = log.select(range(SESSIONS // 2)), log.select(range(SESSIONS // 2, SESSIONS))
    theta = {int(k): float(user.theta(torch.tensor([k]))[0]) for k in POSITIONS}
    everything_seen = dict.fromkeys(theta, 1.0)
    direct = fit_direct(train, theta=theta, label="click")(held_out)
    logged, scores = -held_out.shown_positions("a picture").astype(float), new(held_out.features)

    def as_logged(order: np.ndarray) -> OffPolicyValue:
        return off_policy_value(held_out, order, theta=everything_seen, estimator="ips", label="click", k=k)

    estimate = off_policy_value(held_out, scores, theta=theta, direct=direct, label="click", k=k)
    metric = f"reward@{k}"
    truth = mean_with_interval(evaluate_scores(held_out, scores, metric, user=user, label="click")[metric])
    values = {
        "old ranker: clicks in the log": as_logged(logged),
        "new ranker: clicks as they are": as_logged(scores),
        "new ranker: off-policy estimate": estimate,
    }
    rows = {name: (each.value, each.low, each.high) for name, each in values.items()}
    rows["new ranker: truth"] = (truth.mean, truth.low, truth.high)
    return interval_plot(f"Expected clicks on the first {k} items", rows, x="clicks per request")


if __name__ == "__main__":
    main()
