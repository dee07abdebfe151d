"""Measure whether experiments that `ultr explore` plans are as precise, and lose as few clicks, as it says.

    python benchmarks/explore.py [--simulations 20] [--precision 0.1] [--share 0.1] [--plans first neighbours]

The log is that of the demo: simulated users of a Ranking-SVM. A plan is made for it twice: as the log is, so that the
worst case is assumed, and with the true examination. Each simulation applies the table of a plan to new requests, draws
the clicks of users, and audits the result. The figures are, over simulations:

- half-width: that of the 95% intervals of θ relative to the planned one, as a mean over positions, and its range;
- within 20%: simulations in which this mean is within 20% of 1;
- largest: the mean of the largest half-width of a position;
- lost: the expected clicks lost, relative to the planned ones, with the sampling error of a simulation.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch

from ultr.bias.audit import audit
from ultr.bias.explore import PLANS, ExplorationPlan, SwapTable, make_plan, traffic_of
from ultr.datasets import load_dataset, ranking_svm, show
from ultr.datasets.users import User, draw_sessions, simulate_log
from ultr.log import Log
from ultr.log.swaps import swap_items

BOOTSTRAP = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=20)
    parser.add_argument("--sessions", type=int, default=6000, help="requests of the log that plans are made for")
    parser.add_argument("--precision", type=float, default=0.1)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--plans", nargs="*", default=["first"], help=f"some of {', '.join(PLANS)}")
    options = parser.parse_args()
    data = load_dataset("synthetic")
    user = User(max_grade=data.max_grade)
    production = show(data.train, ranking_svm(data.train, seed=0)(data.train.features)).without_features()
    production = replace(production, item_ids=None)
    log = replace(simulate_log(production, user, sessions=options.sessions)[0], context={}, relevance=None)
    theta = {k: float(user.theta(torch.tensor([k]))[0]) for k in range(1, 11)}
    for known, name in ((None, "worst case"), (theta, "θ is known")):
        traffic = traffic_of(audit(log, known=known, bootstrap=2))
        assert traffic.assumed == (known is None)
        for plan in (
            make_plan(each, traffic, precision=options.precision, share=options.share) for each in options.plans
        ):
            print(f"{plan.name} ({name}): {plan.requests:,} requests; {plan.lost_clicks:,.0f} clicks lost", end="")
            print(f" ({plan.lost_share:.2%} ± {plan.lost_error:.2%}; at most {plan.most_lost_share:.2%})", flush=True)
            _report(plan, [simulated(plan, production, user, seed) for seed in range(options.simulations)])


def _report(plan: ExplorationPlan, found: list[tuple[np.ndarray, float, float]]) -> None:
    widths = np.array([each for each, _, _ in found])
    reached = (widths / plan.half_widths[1:]).mean(1)
    lost = np.array([each for _, each, _ in found]) / plan.lost_clicks
    print(f"  half-width {reached.mean():.3f} ({reached.min():.3f} to {reached.max():.3f})", end="")
    print(f"; within 20%: {int((np.abs(reached - 1) <= 0.2).sum())} of {len(found)}", end="")
    print(f"; largest {widths.max(1).mean():.3f}; lost {lost.mean():.2f} ± {lost.std(ddof=1):.2f}", end="")
    print(f"; {np.mean([seconds for _, _, seconds in found]):.1f} s each", flush=True)


def simulated(plan: ExplorationPlan, production: Log, user: User, seed: int) -> tuple[np.ndarray, float, float]:
    """Return the half-widths that one experiment reaches, the expected clicks that it loses, and its seconds."""
    begun = time.perf_counter()
    drawn = draw_sessions(production, plan.requests, seed=seed)
    shown = swap_items(replace(drawn, context={}), SwapTable.of(plan).draw(drawn.request_ids.to_pylist()))
    before, chance = _chances(drawn, user), _chances(shown, user)
    click = np.random.default_rng(seed).random(shown.rows) < chance
    log = replace(shown, relevance=None, actions={"click": click.astype(np.float32)})
    estimate = audit(log, bootstrap=BOOTSTRAP, seed=seed).estimates["swaps"]
    widths = estimate.half_width[1 : len(plan.positions)]
    return widths, float(before.sum() - chance.sum()), time.perf_counter() - begun


def _chances(log: Log, user: User) -> np.ndarray:
    """Return P(click) of each row."""
    grades, positions = torch.from_numpy(log.true_relevance), torch.from_numpy(log.shown_positions("a simulation"))
    return user.click_probability(grades, positions).double().numpy()


if __name__ == "__main__":
    main()
