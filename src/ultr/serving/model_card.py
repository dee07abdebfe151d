"""The model card: the data, method, quality, bias and limits of a model, as Markdown.

Text from data is shown as code, shortened and on one line, so that no name can look like text of the card.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultr.evaluation.scores import FEEDBACK, OFF_POLICY
from ultr.rankers.boosters import is_trees
from ultr.serving.exported import ABOUT, INPUT, ONNX, OUTPUT
from ultr.training.command import train_command
from ultr.training.config import RunConfig
from ultr.training.outcome import FOLDER, value_of_run
from ultr.utils.jsonfiles import read_json

SHOWN = 50  # the largest number of features, and of positions, in the card
LONGEST = 80  # the largest number of characters of a name
VERSIONS = ("ultr", "torch", "lightgbm", "xgboost")
FROM_METRIC = {
    OFF_POLICY: "logged feedback, corrected for position bias; no experiment has confirmed it",
    FEEDBACK: "logged feedback, with its position bias",
}


def model_card(run: Path, about: Mapping[str, Any]) -> str:
    """Return the card of a run's model as Markdown; `about` is the content of the exported model.json."""
    config_json = read_json(run / "config.json")
    config = RunConfig.from_json(config_json, where=run)
    bias = read_json(run / "bias.json") if (run / "bias.json").is_file() else None
    parts = [
        _summary(run, config, about),
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
    """Return text of unknown origin as one code span on one line."""
    line = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", str(text)).split()).replace("`", "'")
    return f"`{line[: longest - 1] + '…' if len(line) > longest else line or ' '}`"


def _block(text: str, language: str = "") -> list[str]:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{fence}{language}", text, fence]


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(code(f"{name}={value}") for name, value in options.items()) or "defaults"


def _summary(run: Path, config: RunConfig, about: Mapping[str, Any]) -> list[str]:
    return [
        f"# {code(run.resolve().name)}",
        "",
        f"A ranker: it computes a score from {len(about['feature_names']):,} features of an item.",
        "The items of a request are ordered by score, highest first.",
        f"It was trained with the method {code(config.method)} for the label {code(config.label, 1000)}.",
        "The estimated bias was used only in training: this model does not contain it.",
    ]


def _data(run: Path, config: RunConfig, about: Mapping[str, Any]) -> list[str]:
    lines = ["## Data", "", f"- {code(config.data, 200)}, fingerprint {code(about['data'])}"]
    if config.users is not None:
        options = _options(config.user_options)
        lines.append(f"- feedback of simulated users ({code(config.users)}, options: {options}), not of people")
    path = run / FOLDER / "outcome.json"
    if path.is_file():
        outcome = read_json(path)
        training, held_out = outcome["data"], outcome["validation"]
        sample = " (a sample of the training data)" if training.get("sample") else ""
        lines.append(f"- training: {training['requests']:,} requests with {training['rows']:,} items{sample}")
        lines.append(f"- held-out validation: {held_out['requests']:,} requests with {held_out['rows']:,} items")
    if config.learn_from != "feedback":
        lines.append(f"- trained on {config.learn_from}, as an upper bound: logs do not contain it")
    return lines


def _training(config: RunConfig, content: Mapping[str, Any]) -> list[str]:
    command, notes = train_command(config)
    versions = ", ".join(f"{name} {content[name]}" for name in VERSIONS if name in content)
    sources = {"started from the run": config.warm_start, "bias taken from": config.bias}
    return [
        "## Training",
        "",
        f"- method {code(config.method)}, options: {_options(config.method_options)}",
        f"- ranker {code(config.ranker_name)}, options: {_options(config.ranker_options)}",
        f"- seed {config.training.seed}, at most {config.training.steps:,} steps, learning rate {config.training.lr:g}",
        *(f"- {what} {code(path, 200)}" for what, path in sources.items() if path is not None),
        f"- versions: {versions}",
        "",
        "The command that repeats the training:",
        "",
        *_block(command, "sh"),
        *(f"- {code(note, 300)}" for note in notes),
    ]


def _quality(run: Path, config: RunConfig) -> list[str]:
    select, value, step = value_of_run(run)
    lines = [
        "## Quality",
        "",
        f"- best {code(select)} on validation: {_number(value)}, at step {step:,}, which was selected",
    ]
    source = next((words for start, words in FROM_METRIC.items() if select.startswith(start)), None)
    if source is not None:
        lines += [f"- computed from {source}", "- slightly too high, because this value selected the step"]
    if (run / "test.json").is_file():
        for name, value in read_json(run / "test.json").items():
            lines.append(f"- on test: {code(name)} {_number(value)}")
    else:
        lines.append("- the run has no results on test requests")
    return lines


def _bias(bias: Mapping[str, Any] | None) -> list[str]:
    lines = ["## Estimated bias", ""]
    if bias is None:
        return [*lines, "None: the method does not estimate position bias, or its feedback has none."]
    columns = {name: bias[name] for name in ("theta", "t_plus", "t_minus") if _is_column(bias, bias.get(name))}
    columns |= {
        f"tower of {name}": column for name, column in bias.get("towers", {}).items() if _is_column(bias, column)
    }
    if columns:
        heads = [code(name) for name in columns]
        lines += [f"| position | {' | '.join(h.replace('|', '/') for h in heads)} |", "|---|" + "---|" * len(columns)]
        for i, position in enumerate(bias["positions"][:SHOWN]):
            values = " | ".join(_number(column[i]) for column in columns.values())
            lines.append(f"| {code(position).replace('|', '/')} | {values} |")
        lines += [*_more(len(bias["positions"]), "positions"), ""]
    if "theta" in columns:
        lines.append("- theta: the probability that users examine an item at the position")
    for name, words in (("theta_from", "estimated by"), ("theta_scale", "scale"), ("label", "for the label")):
        if bias.get(name):
            lines.append(f"- {words}: {code(bias[name], 300)}")
    for warning in bias.get("warnings", ()):
        lines.append(f"- warning: {code(warning['name'])}: {code(warning['what'], 300)}")
    if not bias.get("warnings"):
        lines.append("- no warnings; this does not prove that the estimate is right")
    return lines


def _is_column(bias: Mapping[str, Any], values: object) -> bool:
    return isinstance(values, list) and len(values) == len(bias.get("positions", ()))


_MISSING = {
    True: "- A missing value is NaN, and follows the branches that training chose for it.",
    False: "- A missing value is NaN, and counts as the mean of training rows; an indicator says that it is missing.",
}


def _limits(config: RunConfig, about: Mapping[str, Any], bias: Mapping[str, Any] | None) -> list[str]:
    lines = [
        "## Limits",
        "",
        "- Scores are comparable only within one request. They are not probabilities.",
        "- Features must be computed as for training, and be in the order below.",
        _MISSING[is_trees(config.ranker)]
        if about["keeps_missing"]
        else "- Numbers more than 10 standard deviations from the mean in training are clipped.",
        "- A category that was not in the training data has code 0.",
    ]
    if bias is not None:
        lines.append(
            "- Position is assumed to affect feedback only by examination and trust, and equally for all requests"
            + ("." if not config.columns.get("segment") else f" of a segment ({code(config.columns['segment'])}).")
        )
    elif config.learn_from == "feedback":
        lines.append("- Position bias was not corrected: items that were shown at the top may get too high scores.")
    lines.append(
        "- Not measured: other kinds of bias (items that were never shown, neighbouring items), quality on later data, "
        "fairness between groups of items or people, and the reaction of users to its rankings."
    )
    return lines


def _features(about: Mapping[str, Any]) -> list[str]:
    vocabularies = about["vocabularies"]
    lines = ["## Features, in order", ""]
    for index, name in enumerate(about["feature_names"][:SHOWN]):
        kind = f": a category, codes 1 to {len(vocabularies[name]):,}" if name in vocabularies else ""
        lines.append(f"{index}. {code(name)}{kind}")
    return [*lines, *_more(len(about["feature_names"]), "features", where=ABOUT)]


def _more(count: int, what: str, where: str = "the run's bias.json") -> list[str]:
    return ["", f"{count - SHOWN:,} more {what} are in {where}."] if count > SHOWN else []


def _use(about: Mapping[str, Any]) -> list[str]:
    lines = ["## Use", ""]
    if ONNX not in about["files"]:
        return [*lines, f"There is no ONNX model: {about['no_onnx']}. The library's own file is next to this card."]
    parity = about["parity"]
    rows, largest, allowed = parity["rows"], parity["largest_difference"], parity["tolerance"]
    example = f"""import json

import numpy as np
import onnxruntime

names = json.load(open("{ABOUT}"))["feature_names"]
session = onnxruntime.InferenceSession("{ONNX}")
items = [dict.fromkeys(names, 0.0), dict.fromkeys(names, 1.0)]  # two items of one request
features = np.array([[[item[name] for name in names] for item in items]], np.float32)
scores = session.run(["{OUTPUT}"], {{"{INPUT}": features}})[0]  # [requests, items]"""
    codes = [f"A category is a code: its index in `vocabularies` of {ABOUT} plus 1, or 0 if it is not there."]
    return [
        *lines,
        *_block(example, "python"),
        "",
        *(codes if about["vocabularies"] else []),
        f"On {rows:,} real rows, the scores differ from the run's by at most {largest:.1e} ({allowed:.1e} is allowed).",
    ]


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and math.isfinite(value) else "unknown"
