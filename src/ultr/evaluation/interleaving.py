"""Compare rankers by interleaved lists: each item of a list was picked by one of the rankers, its *team*.

In *team-draft interleaving* (Radlinski et al. 2008) the rankers take turns, in random order within each round, to add
their best item that is not in the list yet. Users see the teams at equal positions on average, so that feedback on
their items compares the rankers without a model of examination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from scipy.special import bdtrc, betaincinv

from ultr.bias.counts import queries_recur
from ultr.errors import DataError
from ultr.evaluation.comparing import DEPLOY, REJECT, SIGNIFICANT, UNCLEAR, Decision, requests_needed
from ultr.evaluation.scores import PairedTest, holm, paired_test
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.splits import codes
from ultr.utils.arguments import checked
from ultr.utils.jsonfiles import finite

UNFAIR = 1e-4  # p value of the test that chance decided who picked first
MOST_TEAMS = 20


@dataclass(frozen=True)
class TeamTest:
    """The comparison of two teams over the requests in which both have items."""

    first: str
    second: str
    requests: int
    wins: int  # requests in which the items of the first team have more feedback
    losses: int
    share: float  # wins / (wins + losses)
    low: float  # of the exact 95% interval of the share
    high: float
    p: float  # of the sign test
    difference: PairedTest  # of the feedback per request on the items of the two teams
    holm: float = 1.0  # the p value of the difference, corrected for the number of pairs of teams

    @property
    def ties(self) -> int:
        return self.requests - self.wins - self.losses

    @property
    def decision(self) -> Decision:
        """Return whether to deploy the first team instead of the second."""
        better = self.difference.difference > 0
        low, high = (f"{value:+.4g}" for value in (self.difference.low, self.difference.high))
        about = f"{self.difference.difference:+.4g} ({low} to {high}) feedback per request"
        worse = float(1 - self.difference.p / 2 if not better else self.difference.p / 2)
        if self.holm >= SIGNIFICANT:
            needed = requests_needed(self.difference, self.requests)
            more = "" if needed is None else f"; it needs about {needed:,} requests"
            return Decision(UNCLEAR, f"no difference was found: {about} against {self.second}{more}", worse, needed)
        return Decision(DEPLOY if better else REJECT, f"{about} against {self.second}", worse)


@dataclass(frozen=True)
class Interleaving:
    """The result of an interleaving experiment: a test of each pair of teams."""

    tests: tuple[TeamTest, ...]
    label: str
    requests: int
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        tests = [{**asdict(test), "ties": test.ties, "decision": asdict(test.decision)} for test in self.tests]
        content = {"label": self.label, "requests": self.requests, "tests": tests, "warnings": self.warnings}
        return dict(finite(content))


@checked
def evaluate_interleaving(log: Log, team: Sequence[str], *, label: str) -> Interleaving:
    """Compare the teams of interleaved lists by the feedback on their items.

    `team` names the team of each row; rows without one (an empty text) count for no team. Each request gives
    each of its teams the sum of the `label` over its items. Where queries recur, their requests are not independent:
    intervals of differences are over queries.
    """
    if len(team) != log.rows:
        raise DataError("there must be one team for each row", got=f"{len(team)} teams, {log.rows} rows")
    names, number = np.unique(np.array(team, str), return_inverse=True)
    teams = [i for i, name in enumerate(names.tolist()) if name]
    if not 2 <= len(teams) <= MOST_TEAMS:
        hint = "name the column that says which ranker picked an item with --team"
        raise DataError(f"interleaved lists have 2 to {MOST_TEAMS} teams", got=len(teams), hint=hint)
    feedback = np.asarray(Label(label)(log.actions), np.float64)
    size = (len(log), len(names))
    cell = log.request_of_row * len(names) + number
    credit = np.bincount(cell, feedback, size[0] * size[1]).reshape(size)
    items = np.bincount(cell, minlength=size[0] * size[1]).reshape(size)
    groups = codes(log.context["query"]) if queries_recur(log) else None
    tests, warnings = list[TeamTest](), list[str]()
    for a, b in combinations(teams, 2):
        both = (items[:, a] > 0) & (items[:, b] > 0)
        if not both.any():
            continue
        pair = str(names[a]), str(names[b])
        of_pair = None if log.weights is None else log.weights[both]
        grouped = None if groups is None else groups[both]
        difference = paired_test(credit[both, a], credit[both, b], of_pair, groups=grouped)
        tests.append(_team_test(credit[both, a], credit[both, b], pair, difference))
        warnings += _unfair(log, number, both, (a, b), pair)
    if not tests:
        hint = "name the column with the request with --request"
        raise DataError("no request has items of two teams", hint=hint)
    corrected = holm([test.difference.p for test in tests])
    tests = [replace(test, holm=p) for test, p in zip(tests, corrected, strict=True)]
    return Interleaving(tuple(tests), label, len(log), tuple(warnings))


def _team_test(a: np.ndarray, b: np.ndarray, names: tuple[str, str], difference: PairedTest) -> TeamTest:
    wins, losses = int((a > b).sum()), int((a < b).sum())
    decided = wins + losses
    return TeamTest(
        *names,
        requests=len(a),
        wins=wins,
        losses=losses,
        share=wins / decided if decided else 0.5,
        low=float(betaincinv(wins, losses + 1, 0.025)) if wins else 0.0,  # Clopper and Pearson
        high=float(betaincinv(wins + 1, losses, 0.975)) if losses else 1.0,
        p=_sign_test(wins, decided),
        difference=difference,
    )


def _sign_test(wins: int, decided: int) -> float:
    """Return the two-sided p value of so many wins by chance."""
    more = max(wins, decided - wins)
    return min(1.0, 2 * float(bdtrc(more - 1, decided, 0.5))) if decided else 1.0


def _unfair(log: Log, number: np.ndarray, both: np.ndarray, pair: tuple[int, int], names: tuple[str, str]) -> list[str]:
    """Return a warning if chance did not decide which of two teams picked the first item of a list."""
    if log.positions is None:
        return []
    of_pair = np.flatnonzero(np.repeat(both, log.lengths) & np.isin(number, pair))
    first = number[of_pair[np.unique(log.request_of_row[of_pair], return_index=True)[1]]]
    count, of_first = len(first), int((first == pair[0]).sum())
    if _sign_test(of_first, count) > UNFAIR:
        return []
    return [
        f"{names[0]} picked first in {of_first / count:.1%} of the requests, and chance would give 50%. A team "
        "that is higher is seen more often, so do not trust the comparison."
    ]
