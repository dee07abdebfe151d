"""`ultr simulate`: write a log with the feedback of simulated users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ultr.cli.messages import words
from ultr.cli.options import DataDir, Epsilon, Eta, Json, Overwrite, Seed, print_next
from ultr.errors import OptionError


def simulate(
    data: Annotated[str, typer.Argument(help="Data set (synthetic, ml-1m, mq2007, ...), or a LETOR file or folder.")],
    out: Annotated[str, typer.Option(help="The log to write (Parquet); also a URL.")],
    users: Annotated[
        str, typer.Option(help="Simulated users: pbm, trust, cascade, dcm, clickbait, watch, grid or carousel.")
    ] = "pbm",
    eta: Eta = 1.0,
    epsilon: Epsilon = 0.1,
    items: Annotated[int, typer.Option(help="Items shown per request.")] = 10,
    columns: Annotated[
        int | None, typer.Option(help="Columns of a grid or carousel; default: 4 or 12. Items fill it row by row.")
    ] = None,
    sessions: Annotated[int | None, typer.Option(help="Number of requests to draw; default: each once.")] = None,
    split: Annotated[str, typer.Option(help="Requests to show: train, validation or test.")] = "train",
    share: Annotated[
        float, typer.Option(help="Share of the requests that train the initial ranker, whose order users see.")
    ] = 0.01,
    logging: Annotated[
        str,
        typer.Option(
            help="The initial ranker: weak (linear, on a tenth of --share), linear, network, strong (a network trained "
            "on all requests), or a network trained on a share of the requests, such as 0.1."
        ),
    ] = "linear",
    random_share: Annotated[float, typer.Option(help="Share of requests to show in random order and mark.")] = 0.0,
    dwell_decay: Annotated[
        float, typer.Option(help="Multiply dwell times by position^-decay; 0: no effect of position.")
    ] = 0.0,
    dwell_file: Annotated[
        Path | None, typer.Option(help="File of dwell times, one per line; simulated ones get their distribution.")
    ] = None,
    action: Annotated[
        list[str] | None,
        typer.Option(
            help="Another action after a click, with its probability by grade: like=0.01,0.02,0.05,0.1,0.3; may be "
            "repeated."
        ),
    ] = None,
    truth: Annotated[bool, typer.Option("--truth", help="Keep the true relevance in the log.")] = False,
    data_dir: DataDir = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a biased impression log: a ranker shows a data set with true labels to simulated users."""
    from dataclasses import replace

    import numpy as np
    import pyarrow as pa

    from ultr.datasets import load_dataset, randomise, show
    from ultr.datasets.initial import initial_rankers, parse_logging
    from ultr.datasets.users import Dwell, draw_sessions, make_user, read_dwell_times, simulate_log
    from ultr.log import write_log
    from ultr.log.table import check_parquet_name
    from ultr.utils.files import check_output

    check_parquet_name(out)
    check_output(out, overwrite=overwrite)
    if (kind := parse_logging(logging)) in ("both", "randomised"):
        raise OptionError(f"--logging {logging} is for training", hint="use --random-share, or another --logging")
    dwell = Dwell(decay=dwell_decay)
    if dwell_file is not None:
        dwell = Dwell.fit(read_dwell_times(dwell_file), decay=dwell_decay, seed=seed)
    actions = dict(_parse_action(text) for text in action or [])
    if len(actions) < len(action or []):
        raise OptionError("an action is given twice", got=", ".join(action or []), hint="pass each --action once")
    of_grid = {} if columns is None else {"columns": columns}
    user = make_user(users, eta=eta, epsilon=epsilon, dwell=dwell, further=actions, **of_grid)
    with words.status(f"reading {data} ..."):
        dataset = load_dataset(data, data_dir=data_dir)
    user = replace(user, max_grade=dataset.max_grade)
    with words.status("ranking and simulating feedback ..."):
        (initial,) = initial_rankers(dataset, kind=kind, share=share, seed=seed)
        rows = dataset[split]
        rows = replace(rows, item_ids=rows.item_ids or pa.array(np.arange(rows.rows)))
        shown = show(rows, initial(rows.features), items=items)
        if sessions is not None:
            shown = draw_sessions(shown, sessions, seed=seed)
        if random_share:
            shown = randomise(shown, random_share, seed=seed)
        log, _ = simulate_log(shown, user, seed=seed)
        if not truth:
            log = replace(log, relevance=None)
        notes = {"data": dataset.name, "fingerprint": dataset.fingerprint, "users": users, "seed": seed}
        notes |= {
            "eta": eta,
            "epsilon": epsilon,
            "items": items,
            "split": split,
            "share": share,
            "logging": logging,
            **of_grid,
        }
        write_log(log, out, overwrite=overwrite, metadata={"ultr.simulation": json.dumps(notes)})
    if as_json:
        content = {"out": str(out), "requests": len(log), "rows": log.rows, "actions": list(log.actions)}
        print(json.dumps({**content, "features": len(log.feature_names), "simulation": notes}))
        return
    words.say(f"wrote {out}: {log!r}")
    print_next("describe", out)


def _parse_action(text: str) -> tuple[str, tuple[float, ...]]:
    name, _, values = text.partition("=")
    try:
        return name.strip(), tuple(float(value) for value in values.split(","))
    except ValueError as error:
        raise OptionError("--action must have the form name=p0,p1,... (one for each grade)", got=f"'{text}'") from error
