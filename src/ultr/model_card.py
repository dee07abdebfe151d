"""The model card: what a model is, what it learned from, how good it was found to be, and what was not looked at.

What comes from data stands as code, cut short and on one line, so that no name can pass for text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultr.checkpoint import read_json
from ultr.commands import train_command
from ultr.evaluation import FEEDBACK, OFF_POLICY
from ultr.exported import ABOUT, INPUT, ONNX, OUTPUT
from ultr.outcomes import FOLDER
from ultr.preparing import RunConfig
from ultr.runs import best_evaluation

SHOWN = 50  # features, and positions
LONGEST = 80  # characters of a name
VERSIONS = ("ultr", "torch", "lightgbm", "xgboost")
FROM_METRIC = {
    OFF_POLICY: "feedback that was logged, corrected for position bias; no experiment has confirmed it",
    FEEDBACK: "feedback as it is, with its position bias",
}


def model_card(run: Path, about: Mapping[str, Any]) -> str:
    """The card of a run's model, whose description is `about`, as Markdown."""
    config_json = read_json(run / "config.json")
    config = RunConfig.from_json(config_json, where=run)
    bias = read_json(run / "bias.json") if (run / "bias.json").is_file() else None
    parts = [
        _what_it_is(run, config, about),
        _data(run, config, about),
        _training(config, config_json),
        _quality(run, config),
        _bias(bias),
        _limits(config, about, bias),
        _features(about),
        _use(about),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def code(text: object, longest: int = LONGEST) -> str:
    """Text of unknown origin as a code span that stays one."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", str(text)).split()).replace("`", "'")
    return f"`{line[: longest - 1] + '…' if len(line) > longest else line or ' '}`"


def _block(text: str, language: str = "") -> list[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}{language}", text, fence]


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(code(f"{name}={value}") for name, value in options.items()) or "the usual ones"


def _what_it_is(run: Path, config: RunConfig, about: Mapping[str, Any]) -> list[str]:
    return [
        f"# {code(run.resolve().name)}",
        "",
        f"A ranker: from {len(about['features']):,} features of an item to a score, by which a request's items are put",
        f"in order, highest first. It was trained by {code(config.method)} for the label {code(config.label, 1000)}.",
        "What was learned about bias was used in training alone: nothing of it is in this model.",
    ]


def _data(run: Path, config: RunConfig, about: Mapping[str, Any]) -> list[str]:
    lines = ["## Data", "", f"- {code(config.data, 200)}, fingerprint {code(about['data'])}"]
    if config.users is not None:
        lines.append(
            f"- feedback of simulated users ({code(config.users)}: {_options(config.user_options)}), not of people"
        )
    path = run / FOLDER / "outcome.json"
    if path.is_file():
        outcome = read_json(path)
        learned, held = outcome["data"], outcome["validation"]
        sample = " in a sample of what was learned from" if learned.get("sample") else ""
        lines.append(f"- learned from: {learned['requests']:,} requests with {learned['rows']:,} items{sample}")
        lines.append(f"- held out for validation: {held['requests']:,} requests with {held['rows']:,} items")
    if config.learn_from != "feedback":
        lines.append(f"- learned from {config.learn_from}, as a bound: this is not what a log alone can give")
    return lines


def _training(config: RunConfig, content: Mapping[str, Any]) -> list[str]:
    command, unsaid = train_command(config)
    versions = ", ".join(f"{name} {content[name]}" for name in VERSIONS if name in content)
    return [
        "## How it was trained",
        "",
        f"- method {code(config.method)}, options: {_options(config.method_options)}",
        f"- ranker {code(config.ranker)}, options: {_options(config.ranker_options)}",
        f"- seed {config.training.seed}, at most {config.training.steps:,} steps at a rate of {config.training.lr:g}",
        f"- versions: {versions}",
        "",
        "The command that repeats it:",
        "",
        *_block(command, "sh"),
        *(f"- {code(what, 300)}" for what in unsaid),
    ]


def _quality(run: Path, config: RunConfig) -> list[str]:
    select, best = best_evaluation(run)
    lines = [
        "## How well it ranks",
        "",
        f"- chosen at step {best['step']:,} as best by {code(select)} on validation: {_number(best[select])}",
    ]
    note = next((words for start, words in FROM_METRIC.items() if select.startswith(start)), None)
    if note is not None:
        lines.append(f"- that figure is from {note}, and the choice of the step makes it a little too good")
    if (run / "test.json").is_file():
        for name, value in read_json(run / "test.json").items():
            lines.append(f"- on test: {code(name)} {_number(value)}")
    else:
        lines.append("- no figures on test requests were kept with the run")
    return lines


def _bias(bias: Mapping[str, Any] | None) -> list[str]:
    lines = ["## Bias that was found", ""]
    if bias is None:
        return [*lines, "None: the method learns no bias by position, or was given feedback without any."]
    columns = {name: bias[name] for name in ("theta", "t_plus", "t_minus") if _is_column(bias, bias.get(name))}
    columns |= {
        f"tower of {name}": column for name, column in bias.get("towers", {}).items() if _is_column(bias, column)
    }
    if columns:
        heads = [code(name) for name in columns]
        lines += [f"| position | {' | '.join(h.replace('|', '/') for h in heads)} |", "|---|" + "---|" * len(columns)]
        for i, position in enumerate(bias["positions"][:SHOWN]):
            figures = " | ".join(_number(column[i]) for column in columns.values())
            lines.append(f"| {code(position).replace('|', '/')} | {figures} |")
        lines += [*_more(len(bias["positions"]), "positions"), ""]
    if "theta" in columns:
        lines.append("- theta: the probability that an item at the position is looked at")
    for name, words in (("theta_from", "found by"), ("theta_scale", "scale"), ("label", "for the label")):
        if bias.get(name):
            lines.append(f"- {words}: {code(bias[name], 300)}")
    for warning in bias.get("warnings", ()):
        lines.append(f"- warning: {code(warning['name'])}: {code(warning['what'], 300)}")
    if not bias.get("warnings"):
        lines.append("- no warning: nothing was found wrong with it, which does not prove it right")
    return lines


def _is_column(bias: Mapping[str, Any], values: object) -> bool:
    return isinstance(values, list) and len(values) == len(bias.get("positions", ()))


def _limits(config: RunConfig, about: Mapping[str, Any], bias: Mapping[str, Any] | None) -> list[str]:
    lines = [
        "## Limits",
        "",
        "- Scores compare items of one request; they are no probabilities, and mean nothing across requests or models.",
        "- Features must be those it was trained on, computed in the same way, in the order below.",
        "- Numbers further than 10 deviations from the mean of training are clipped there."
        if about["missing"] == "refuse"
        else "- A missing value is NaN, and goes the way that training chose for it.",
        "- A category that training never saw is code 0.",
    ]
    if bias is not None:
        lines.append(
            "- Feedback is taken to depend on position only through whether an item is looked at, and how it is then "
            "trusted, alike for all requests"
            + ("." if not config.columns.get("segment") else f" of a segment ({code(config.columns['segment'])}).")
        )
    elif config.learn_from == "feedback":
        lines.append("- No bias by position was corrected for: what was shown high up may be scored too high.")
    lines.append(
        "- Not measured: other kinds of bias (what was never shown, what stood around an item), what becomes of it as "
        "data changes, fairness between groups of items or people, and what people make of its rankings."
    )
    return lines


def _features(about: Mapping[str, Any]) -> list[str]:
    vocabularies = about["vocabularies"]
    lines = ["## Features, in order", ""]
    for place, name in enumerate(about["features"][:SHOWN]):
        kind = f": a category, codes 1 to {len(vocabularies[name]):,}" if name in vocabularies else ""
        lines.append(f"{place}. {code(name)}{kind}")
    return [*lines, *_more(len(about["features"]), "features", where=ABOUT)]


def _more(count: int, what: str, where: str = "the run's bias.json") -> list[str]:
    return ["", f"and {count - SHOWN:,} {what} more, in {where}"] if count > SHOWN else []


def _use(about: Mapping[str, Any]) -> list[str]:
    lines = ["## Use", ""]
    if ONNX not in about["files"]:
        return [*lines, f"There is no ONNX: {about['no_onnx']}. The library's own file is beside this one."]
    parity = about["parity"]
    rows, off, allowed = parity["rows"], parity["largest_difference"], parity["tolerance"]
    example = f"""import json

import numpy as np
import onnxruntime

names = json.load(open("{ABOUT}"))["features"]
session = onnxruntime.InferenceSession("{ONNX}")
items = [dict.fromkeys(names, 0.0), dict.fromkeys(names, 1.0)]  # of one request
features = np.array([[[item[name] for name in names] for item in items]], np.float32)
scores = session.run(["{OUTPUT}"], {{"{INPUT}": features}})[0]  # [requests, items]"""
    codes = [
        f"A category is given as its code: its place in `vocabularies` of {ABOUT} plus 1, or 0 for what is not there."
    ]
    return [
        *lines,
        *_block(example, "python"),
        "",
        *(codes if about["vocabularies"] else []),
        f"Tried on {rows:,} real rows, ONNX and the run differ by {off:.1e} at most, where {allowed:.1e} is allowed.",
    ]


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else "not known"
