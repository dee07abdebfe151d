"""`ultr evaluate`: evaluate the model of a run on a log or data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ultr.cli import options
from ultr.cli.options import named_columns, print_notes, print_table, words


def evaluate(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    data: Annotated[str, typer.Argument(help="A log with true labels or feedback, or a data set.")],
    metrics: Annotated[
        str,
        typer.Option(
            help="Metrics, comma-separated. ndcg@10 uses true labels, feedback-ndcg@10 logged feedback, and "
            "off-policy-reward@10 logged feedback corrected for bias."
        ),
    ] = "ndcg@10",
    split: Annotated[str, typer.Option(help="Split of a data set: train, validation or test.")] = "test",
    users: Annotated[
        str, typer.Option(help="Simulated users for reward metrics: pbm, trust, cascade, clickbait or watch.")
    ] = "pbm",
    eta: options.Eta = 1.0,
    epsilon: options.Epsilon = 0.1,
    request: options.RequestColumn = None,
    position: options.PositionColumn = None,
    item: options.ItemColumn = None,
    features: options.FeatureColumns = None,
    actions: options.ActionColumns = None,
    query: options.QueryColumn = None,
    segment: options.SegmentColumn = None,
    relevance: options.RelevanceColumn = None,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Evaluate the model of a run on data: print the mean of each metric over requests, with its 95% interval.

    The columns of a log have the names of the training log, unless options name others.
    """
    from ultr.datasets.users import make_user
    from ultr.evaluation.judge import evaluate_requests, load_judge
    from ultr.evaluation.scores import OFF_POLICY, Mean, mean_with_interval
    from ultr.log.segments import by_segment
    from ultr.rankers.model import load_model
    from ultr.training.data import columns_for_run, read_data

    named = named_columns(locals())
    model = load_model(run)
    names = [name.strip() for name in metrics.split(",")]
    columns = columns_for_run(run, model, named)
    log, max_grade = read_data(data, split=split, data_dir=data_dir, columns=columns)
    print_notes(log.notes)
    user = make_user(users, eta=eta, epsilon=epsilon, max_grade=max_grade)
    log = model.view(log)  # off-policy metrics need the features in the order of the model
    scores, judge = model.score(log, device=device), load_judge(run / "judge")
    segments: tuple[str, ...] = ()
    if columns.get("segment"):
        log, segments = by_segment(log)
    results = evaluate_requests(log, scores, names, user=user, label=model.label, judge=judge, segments=segments)
    means = {name: mean_with_interval(values, log.weights) for name, values in results.items()}
    for name in names:
        if name.startswith(OFF_POLICY) and judge is not None:
            value = judge.value(log, scores, name, label=model.label, segments=segments)
            means[name] = Mean(value.value, value.low, value.high, len(log))
            words.print(f"{name}: the effective sample size is {value.effective_clicks:,.0f} clicks")
    if as_json:
        print(json.dumps({name: mean.mean for name, mean in means.items()}))
        return
    table = Table(title=f"{run} on {data} ({len(log):,} requests)", title_justify="left")
    for heading in ("metric", "mean", "95% interval"):
        table.add_column(heading, justify="right")
    for name, mean in means.items():
        table.add_row(name, f"{mean.mean:.4f}", f"{mean.low:.4f} to {mean.high:.4f}")
    print_table(table)
