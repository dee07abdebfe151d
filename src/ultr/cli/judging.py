"""Commands that use what was learned: evaluate, score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ultr.cli.common import (
    DataDir,
    Device,
    Epsilon,
    Eta,
    FeatureColumns,
    Json,
    Overwrite,
    RequestColumn,
    print_table,
    progress_bar,
    words,
)


def _columns_of(run: Path, categorical: list[str], metrics: list[str]) -> dict[str, Any]:
    """The parts that columns of the run's own log were given by name, where feedback in another like it is judged."""
    from ultr.checkpoint import read_json
    from ultr.evaluation import FEEDBACK, OFF_POLICY
    from ultr.preparing import RunConfig

    config = RunConfig.from_json(read_json(run / "config.json"), where=run)
    logged = config.users is None and any(name.startswith((FEEDBACK, OFF_POLICY)) for name in metrics)
    named = dict(config.columns) if logged else {}
    return {**named, "categorical": named.get("categorical") or categorical or None}


def evaluate(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    data: Annotated[str, typer.Argument(help="A log with true labels or feedback, or a data set.")],
    metrics: Annotated[
        str,
        typer.Option(help="Comma-separated; off-policy-reward@10 corrects logged feedback, feedback-ndcg@10 does not."),
    ] = "ndcg@10",
    split: Annotated[str, typer.Option(help="Of a data set: train, validation or test.")] = "test",
    users: Annotated[str, typer.Option(help="Who is shown the ranking, for reward.")] = "pbm",
    eta: Eta = 1.0,
    epsilon: Epsilon = 0.1,
    data_dir: DataDir = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Judge a run on data: means over requests with 95% intervals."""
    from ultr.evaluation import OFF_POLICY, Mean, mean_with_interval
    from ultr.judging import figures_of, load_judge
    from ultr.log.segments import by_segment
    from ultr.models import load_model
    from ultr.preparing import read_data
    from ultr.simulate import make_user

    model = load_model(run)
    names = [name.strip() for name in metrics.split(",")]
    columns = _columns_of(run, list(model.vocabularies), names)
    log, max_grade = read_data(data, split=split, data_dir=data_dir, columns={**columns, "missing": model.missing})
    user = make_user(users, eta=eta, epsilon=epsilon, max_grade=max_grade)
    log = model.view(log)  # the judge, too, takes features by their place
    scores, judge = model.score(log, device=device), load_judge(run / "judge")
    segments: tuple[str, ...] = ()
    if columns.get("segment"):
        log, segments = by_segment(log)
    figures = figures_of(log, scores, names, user=user, label=model.label, judge=judge, segments=segments)
    means = {name: mean_with_interval(values, log.weights) for name, values in figures.items()}
    for name in names:
        if name.startswith(OFF_POLICY) and judge is not None:
            found = judge.value(log, scores, name, label=model.label, segments=segments)
            means[name] = Mean(found.value, found.low, found.high, len(log))
            words.print(f"{name}: as much as {found.effective_clicks:,.0f} clicks of equal weight tell")
    if as_json:
        print(json.dumps({name: mean.mean for name, mean in means.items()}))
        return
    table = Table(title=f"{run} on {data} ({len(log):,} requests)", title_justify="left")
    for heading in ("metric", "mean", "95% interval"):
        table.add_column(heading, justify="right")
    for name, mean in means.items():
        table.add_row(name, f"{mean.mean:.4f}", f"{mean.low:.4f} to {mean.high:.4f}")
    print_table(table)


def score(
    run: Annotated[Path, typer.Argument(help="A finished run.")],
    candidates: Annotated[
        Path, typer.Argument(help="Rows to score: a log's columns; no position or action is needed.")
    ],
    out: Annotated[Path, typer.Option(help="The scores to write (.parquet, .csv).")],
    request: RequestColumn = None,
    features: FeatureColumns = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Score items with a run: the request, item and position of each row, and its score. Files may be of any size."""
    from ultr.models import load_model
    from ultr.scoring import score_file

    model = load_model(run)
    with progress_bar() as bar:
        task = bar.add_task("rows", total=None, figure="")
        scores = score_file(
            model,
            candidates,
            out,
            request=request,
            features=features,
            overwrite=overwrite,
            device=device,
            on_progress=lambda done, rows: bar.update(task, completed=done, total=rows),
        )
    words.print(f"wrote {out}: {scores:,} scores", soft_wrap=True)
