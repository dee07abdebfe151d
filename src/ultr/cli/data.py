"""Commands that look at data and make it: demo, describe, simulate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ultr.cli.common import (
    ActionColumns,
    FeatureColumns,
    Json,
    Overwrite,
    PositionColumn,
    RequestColumn,
    Seed,
    pages_can_be_made,
    plain,
    print_table,
    words,
)
from ultr.errors import OptionError

if TYPE_CHECKING:
    from ultr.demo import Demo, Learned
    from ultr.log.summary import ByPosition


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the demonstration's files.")] = Path("ultr-demo"),
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """See position bias and what it costs: generated data, simulated users, a ranker that believes their log."""
    from ultr.demo import run_demo, run_learning
    from ultr.report import write_report

    with words.status("generating data and drawing clicks ..."):
        result = run_demo(out, seed=seed)
    if not as_json:
        _print_bias(result)
    with words.status("learning from the feedback, without and with correction, and without position bias ..."):
        learned = run_learning(out, seed=seed)
    page = write_report(learned.runs, out / "report.html", overwrite=True) if pages_can_be_made() else None
    if as_json:
        columns = ("positions", "examined", "clicked", "looks", "truth")
        figures: dict[str, Any] = {name: getattr(result, name).tolist() for name in columns}
        figures |= {"theta": learned.theta.tolist(), "true_theta": learned.true_theta.tolist()}
        print(json.dumps({**figures, "outcomes": [vars(outcome) for outcome in learned.outcomes]}))
        return
    _print_learned(learned)
    log = out / "log.parquet"
    words.print(f"\nwrote {log}: {result.log!r}", soft_wrap=True)
    if page is not None:
        words.print(f"wrote {page}: open it in a browser to see what was learned", soft_wrap=True)
    words.print(f"next: ultr train {log} --out my-run", soft_wrap=True)


def _print_learned(learned: Learned) -> None:
    table = Table(title="\nExamination learned from the feedback alone, first position = 100%", title_justify="left")
    table.add_column("position", justify="right")
    table.add_column("learned, and true", no_wrap=True)
    for i, shares in enumerate(zip(learned.theta, learned.true_theta, strict=True), start=1):
        colours = ("blue", "green")
        bars = (f"[{colour}]{_bar(share)}[/] {share:.0%}" for colour, share in zip(colours, shares, strict=True))
        table.add_row(str(i), "\n".join(bars))
    print_table(table)
    table = Table(title="\nWhat the bias costs: test requests, judged by true labels", title_justify="left")
    table.add_column("ranker", no_wrap=True)
    table.add_column("NDCG@10", justify="right")
    table.add_column("Reward@10", justify="right")
    for outcome in learned.outcomes:
        table.add_row(outcome.name, f"{outcome.ndcg:.3f}", f"{outcome.reward:.3f}")
    print_table(table)
    start, biased, corrected, fair = (outcome.ndcg for outcome in learned.outcomes)
    kept, mended = ((reached - start) / (fair - start) for reached in (biased, corrected))
    words.print(
        "Of what users without position bias would have taught (NDCG), learning from biased feedback keeps "
        f"{kept:.0%}; with the bias corrected, {mended:.0%}.",
        soft_wrap=True,
    )


def _print_bias(result: Demo) -> None:
    table = Table(title="Position bias in a simulated search log", title_justify="left")
    for heading in ("position", "examined\n(hidden)", "click rate\n(in the log)"):
        table.add_column(heading, justify="right")
    table.add_column("relevance as a naive reader sees it,\nand as it is, position 1 = 100%", no_wrap=True)
    for i, position in enumerate(result.positions):
        bars = "\n".join(
            f"[{colour}]{_bar(share)}[/] {share:.0%}"
            for colour, share in (("red", result.looks[i]), ("green", result.truth[i]))
        )
        table.add_row(str(position), f"{result.examined[i]:.0%}", f"{result.clicked[i]:.1%}", bars)
    print_table(table)
    first, last = result.positions[0], result.positions[-1]
    words.print(
        f"By clicks alone, items at position {last} look {1 / result.looks[-1]:.1f} times less relevant than at "
        f"position {first}; they are {1 / result.truth[-1]:.1f} times less.\n"
        f"The naive reader overstates the gap {result.overstated:.0f} times: users rarely look that far down.",
        soft_wrap=True,
    )


def describe(
    log_path: Annotated[Path, typer.Argument(metavar="LOG", help="A log: Parquet, Arrow, CSV or SVMlight.")],
    request: RequestColumn = None,
    position: PositionColumn = None,
    features: FeatureColumns = None,
    actions: ActionColumns = None,
    as_json: Json = False,
) -> None:
    """Check a log and see what is in it: what its columns were taken for, and feedback by position."""
    from ultr.log import read_log
    from ultr.log.summary import by_position

    log = read_log(log_path, request=request, position=position, features=features, actions=actions)
    lengths = log.lengths
    facts: dict[str, Any] = {
        "requests": len(log),
        "rows": log.rows,
        "items_per_request": {"min": int(lengths.min()), "mean": float(lengths.mean()), "max": int(lengths.max())},
        "features": len(log.feature_names),
        "actions": list(log.actions),
        "true_relevance": log.relevance is not None,
        "unused_columns": list(log.unused_columns),
    }
    table = by_position(log) if log.positions is not None else None
    if table is not None:
        facts["positions"] = {
            "position": table.positions.tolist(),
            "impressions": table.impressions.tolist(),
            **{f"{name}_rate": rates.tolist() for name, rates in table.rates.items()},
            **{f"{name}_mean": means.tolist() for name, means in table.means.items()},
        }
    if as_json:
        print(json.dumps(facts))
        return
    words.print(f"{log!r}, {lengths.min()} to {lengths.max()} items a request", soft_wrap=True)
    if log.unused_columns:
        some = ", ".join(log.unused_columns[:20]) + (" ..." if len(log.unused_columns) > 20 else "")
        words.print(
            f"columns that play no part: {plain(some)} (name them with --features or --actions)", soft_wrap=True
        )
    if table is None or not log.actions:
        words.print("no feedback to show: the log has no positions or no actions")
        return
    _print_by_position(table)


def _print_by_position(table: ByPosition, most: int = 20) -> None:
    """Rates of every action, and means of those that are more than yes or no."""
    means = {name: mean for name, mean in table.means.items() if not (mean == table.rates[name]).all()}
    shown = Table(title="Feedback by position", title_justify="left")
    headings = ["position", "shown", *(f"{name} rate" for name in table.rates), *(f"mean {name}" for name in means)]
    for heading in headings:
        shown.add_column(heading, justify="right")
    for i in range(min(most, len(table.positions))):
        figures = [f"{rate[i]:.2%}" for rate in table.rates.values()] + [f"{mean[i]:.4g}" for mean in means.values()]
        shown.add_row(str(table.positions[i]), f"{table.impressions[i]:,}", *figures)
    print_table(shown)
    if len(table.positions) > most:
        words.print(f"and {len(table.positions) - most} more positions (--json prints all)")


def simulate(
    data: Annotated[str, typer.Argument(help="synthetic, ml-1m, mq2007, ... or a LETOR-format file or folder.")],
    out: Annotated[Path, typer.Option(help="The log to write (Parquet).")],
    users: Annotated[str, typer.Option(help="How users behave: pbm, trust, cascade or clickbait.")] = "pbm",
    eta: Annotated[float, typer.Option(help="Severity of position bias; 0: everything is examined.")] = 1.0,
    epsilon: Annotated[float, typer.Option(help="Click noise of pbm and cascade users.")] = 0.1,
    items: Annotated[int, typer.Option(help="Items shown per request.")] = 10,
    sessions: Annotated[int | None, typer.Option(help="Requests to draw; each once if not given.")] = None,
    split: Annotated[str, typer.Option(help="Which requests: train, validation or test.")] = "train",
    share: Annotated[float, typer.Option(help="Share of training requests the initial ranker learns from.")] = 0.01,
    random_share: Annotated[float, typer.Option(help="Share of requests shown in random order, and marked.")] = 0.0,
    dwell_decay: Annotated[float, typer.Option(help="Dwell scales with position^-decay; 0: free of position.")] = 0.0,
    dwell_file: Annotated[Path | None, typer.Option(help="Dwell times, one per line, to fit the mixture to.")] = None,
    action: Annotated[
        list[str] | None,
        typer.Option(help="An action that may follow a click, by grade: like=0.01,0.02,0.05,0.1,0.3. Repeatable."),
    ] = None,
    truth: Annotated[bool, typer.Option("--truth", help="Keep the true relevance in the log.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of data sets (or ULTR_DATA).")] = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write a biased impression log: data with true labels, shown by a weak ranker to simulated users."""
    from dataclasses import replace

    import numpy as np
    import pyarrow as pa

    from ultr.datasets import load_dataset, randomise, ranking_svm, show
    from ultr.dwell import Dwell, read_dwell_times
    from ultr.files import refuse_existing
    from ultr.log import write_log
    from ultr.log.table import check_parquet_name
    from ultr.simulate import draw_sessions, make_user, simulate_log

    check_parquet_name(out)
    refuse_existing(out, overwrite=overwrite)
    dwell = Dwell(decay=dwell_decay)
    if dwell_file is not None:
        dwell = Dwell.fit(read_dwell_times(dwell_file), decay=dwell_decay, seed=seed)
    further = dict(_action(text) for text in action or [])
    if len(further) < len(action or []):
        raise OptionError("an --action is given twice", got=", ".join(action or []))
    user = make_user(users, eta=eta, epsilon=epsilon, dwell=dwell, further=further)
    with words.status(f"reading {data} ..."):
        dataset = load_dataset(data, data_dir=data_dir)
    user = replace(user, max_grade=dataset.max_grade)
    with words.status("ranking, and drawing feedback ..."):
        initial = ranking_svm(dataset.train, share=share, seed=seed)
        chosen = dataset[split]
        chosen = replace(chosen, item_ids=chosen.item_ids or pa.array(np.arange(chosen.rows)))
        shown = show(chosen, initial(chosen.features), items=items)
        if sessions is not None:
            shown = draw_sessions(shown, sessions, seed=seed)
        if random_share:
            shown = randomise(shown, random_share, seed=seed)
        log, _ = simulate_log(shown, user, seed=seed)
        if not truth:
            log = replace(log, relevance=None)
        notes = {"data": dataset.name, "fingerprint": dataset.fingerprint, "users": users, "seed": seed}
        notes |= {"eta": eta, "epsilon": epsilon, "items": items, "split": split, "share": share}
        write_log(log, out, overwrite=overwrite, metadata={"ultr.simulation": json.dumps(notes)})
    words.print(f"wrote {out}: {log!r}\nnext: ultr describe {out}", soft_wrap=True)


def _action(text: str) -> tuple[str, tuple[float, ...]]:
    name, _, values = text.partition("=")
    try:
        return name.strip(), tuple(float(value) for value in values.split(","))
    except ValueError as error:
        raise OptionError("--action should read name=p0,p1,...", got=f"'{text}'") from error


def _bar(share: float, width: int = 30) -> str:
    return "█" * max(0, round(float(share) * width))
