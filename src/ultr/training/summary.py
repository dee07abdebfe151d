"""The bias report of a run, bias.json, with a few sentences: how users look, on which evidence, what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ultr.bias.after_click import AfterClick
from ultr.bias.audit import times_as_often
from ultr.bias.examination import SOURCES, Examination
from ultr.bias.identification import INTERVENED
from ultr.bias.propensities import bias_file, read_bias_file, write_bias_file
from ultr.bias.sharing import told_position
from ultr.log.table import is_grid, named_places, position_id, slot
from ultr.methods import thresholds
from ultr.training.combining import Ranker
from ultr.training.config import Config
from ultr.training.data import Data
from ultr.training.fitting import Fitted
from ultr.utils.stores import fetched

NAMED = (2, 3, 5, 10, 20)  # the positions, by their order in the list, whose θ is told
MOST_SEGMENTS = 3  # segments whose θ is told, at most
MOST_VALUES = 6  # values of a column that are told, at most
IMPRECISE = 0.1  # a standard error of θ above which more evidence would help
NAMES = {"mlp": "a network", "linear": "a linear ranker"}
FEATURES_ALONE = "features alone, by ultr bias"
NOT_CONFIRMED = (SOURCES["strata"], FEATURES_ALONE)  # evidence of examination that the log cannot confirm


def write_bias_report(
    config: Config, data: Data, fits: Sequence[Fitted], ranker: Ranker, examination: Examination | None, out: Path
) -> None:
    """Write bias.json, if the method estimates bias: the report of the first fit, and the shares of the rankers."""
    fit = fits[0]
    if fit.report is None:
        return
    report = dict(fit.report)
    if ranker.shares:
        report["shares"] = ranker.shares
    if "theta_from" in report:
        report |= _origin_of_theta(config)
        if examination is not None and examination.deviations:
            report["contexts"] = examination.contexts(data.segment)
        if examination is not None and examination.actions:
            report["actions"] = {name: each.to_json() for name, each in examination.actions.items()}
        report["summary"] = _sentences(report, config, data)
    clicks_only = thresholds(config.method.name, data.label, config.method.options, ranker=fit.kind)
    if data.segments or is_grid(report["positions"]):
        report["positions"] = [slot(position, data.segments) for position in report["positions"]]
    write_bias_file(out, {**report, "label": f"{data.label} > 0" if clicks_only else data.label})


def _origin_of_theta(config: Config) -> dict[str, Any]:
    """Return where the examination that a run takes from `--bias` comes from; {} if it estimates its own."""
    if config.examination.bias is None:
        return {}
    content = read_bias_file(bias_file(fetched(config.examination.bias)))
    if "theta_from" in content:
        return {name: content[name] for name in ("theta_from", "theta_standard_error") if name in content}
    verdict = content.get("verdict")
    if not isinstance(verdict, dict) or verdict.get("anchor") in (None, "known"):
        return {}
    by_bias = f"the estimate '{verdict['anchor']}' of ultr bias"
    return {"theta_from": by_bias if verdict["anchor"] in INTERVENED else FEATURES_ALONE}


def _sentences(report: Mapping[str, Any], config: Config, data: Data) -> dict[str, str]:
    """Return sentences by name from the bias report of a run, in which positions do not yet have names of segments."""
    error = report.get("theta_standard_error")
    evidence = f"{report['theta_from']}" + ("" if error is None else f", with a standard error of {error:.1%}")
    sentences = {"users": _users(report, data.segments), "evidence": evidence}
    if "contexts" in report:
        at = told_position(report["positions"])
        sentences["contexts"] = "; ".join(_context(name, each, at) for name, each in report["contexts"].items())
    if "actions" in report:
        curves = {name: AfterClick.of(each) for name, each in report["actions"].items()}
        sentences["after the click"] = "; ".join(each.sentence(name) for name, each in curves.items())
    if "rho" in report or "zeta" in report:
        sentences["trust"] = "higher positions are trusted more; feedback is corrected for that"
    if "shares" in report:
        shares = " and ".join(f"{NAMES.get(name, name)} ({share:.0%})" for name, share in report["shares"].items())
        sentences["ranker"] = f"the sum of {shares}, by the likelihood of the validation requests"
    if (advice := _would_help(report, config, data)) is not None:
        sentences["would help"] = advice
    return sentences


def _users(report: Mapping[str, Any], segments: tuple[str, ...]) -> str:
    curves: dict[str, dict[str, float]] = {}  # segment -> position -> θ; one segment without a name if there are none
    for place, theta in zip(report["positions"], report["theta"], strict=True):
        position, _, segment = slot(int(place), segments).partition("@")
        curves.setdefault(segment, {})[position] = float(theta)
    if not segments:
        return _curve(curves[""])
    shown = [f"{segment}: {_curve(curve)}" for segment, curve in [*curves.items()][:MOST_SEGMENTS]]
    more = f"; and {len(curves) - MOST_SEGMENTS} more segments" if len(curves) > MOST_SEGMENTS else ""
    return "; ".join(shown) + more


def _context(column: str, deviation: Mapping[str, Any], position: str) -> str:
    """Return how the values of a column differ in how far down users look."""
    if not deviation["size"]:
        return f"no difference was found between the values of '{column}'"
    ratios = (
        f"{value or 'missing'} {middle:.2f} ({low:.2f} to {high:.2f})"
        for value, (middle, low, high) in [*deviation["ratios"].items()][:MOST_VALUES]
    )
    return f"by '{column}', looks at position {position} over the average: {', '.join(ratios)}"


def _curve(theta: Mapping[str, float]) -> str:
    """Return how often users look at some positions, compared with that at which they look most often."""
    positions = list(theta)
    top = max(positions, key=theta.__getitem__)
    places = named_places([position_id(position) for position in positions], NAMED)
    named = [positions[i] for i in places if positions[i] != top]
    if not named or theta[top] <= 0:
        return "they look at one position"
    times = times_as_often({position: theta[position] / theta[top] for position in named})
    return f"compared with position {top}, they look {times}"


def _would_help(report: Mapping[str, Any], config: Config, data: Data) -> str | None:
    """Return what would make the estimate of examination better, or None if it is known, or simulated, or precise."""
    if config.users is not None or config.examination.propensities is not None:
        return None
    log, error = data.train, report.get("theta_standard_error")
    if report["theta_from"] in NOT_CONFIRMED:
        ids = "" if log.item_ids is not None else ", or the ids of items (--item), if items recur at other positions"
        return f"some requests in random order, marked in a column (--randomised){ids}: features alone do not suffice"
    if error is not None and error > IMPRECISE:
        times = f"about {(error / IMPRECISE) ** 2:.2g} times as many, for a standard error of {IMPRECISE:.0%}"
        return f"more requests, or more in random order if some are: {times}"
    return None
