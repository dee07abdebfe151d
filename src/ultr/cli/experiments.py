"""The command that repeats the paper's experiments."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from ultr.cli.common import Json, progress_bar, words
from ultr.errors import OptionError, UnfinishedError, nearest


def reproduce(
    experiments: Annotated[
        str, typer.Argument(help="Comma-separated: table1, table2, figure3, figure4, figure5, live, trees; or all.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the results; what is finished there is not run again.")] = Path(
        "reproduce"
    ),
    runs: Annotated[
        int, typer.Option(help="Runs of each method; 0: ten, or three with --quick (live: five, two).", min=0)
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small network and few runs: minutes on two cores.")] = False,
    data: Annotated[str | None, typer.Option(help="Data sets, comma-separated; if not given, the paper's.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of data sets (or ULTR_DATA).")] = None,
    jobs: Annotated[
        int, typer.Option(help="Runs side by side; 0: as many as there are cores, ten at most.", min=0)
    ] = 0,
    minutes: Annotated[
        float, typer.Option(help="Begin no run after so long and exit with 3; the same command goes on. 0: no limit.")
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    as_json: Json = False,
) -> None:
    """Repeat the paper's tables and figures, beside what was printed, and judge its claims."""
    from ultr.compare import Workers, default_jobs
    from ultr.experiments import EXPERIMENTS, FULL, QUICK, Lab

    names = list(EXPERIMENTS) if experiments == "all" else [name.strip() for name in experiments.split(",")]
    for name in names:
        if name not in EXPERIMENTS:
            raise OptionError(f"no experiment '{name}'", mend=nearest(name, [*EXPERIMENTS, "all"]))
    until = time.monotonic() + 60 * minutes if minutes else math.inf
    chosen = () if data is None else tuple(name.strip() for name in data.split(","))
    outcomes = {}
    with progress_bar() as bar, Workers(jobs or default_jobs(), until=until) as workers:
        task = bar.add_task("runs", total=None, figure="")

        def show(done: int, total: int, folder: str) -> None:
            bar.update(task, completed=done, total=total, figure=folder)

        lab = Lab(
            out,
            QUICK if quick else FULL,
            workers,
            runs=runs,
            data=chosen,
            data_dir=None if data_dir is None else str(data_dir),
            device=device,
            on_done=show,
        )
        for name in names:
            bar.update(task, description=name, completed=0, total=None)
            try:
                outcomes[name] = EXPERIMENTS[name](lab)
            except UnfinishedError as error:
                raise UnfinishedError(f"{name}: {error}", mend="give the same command to go on") from error
            outcomes[name].write(out)
    if as_json:
        print(json.dumps({name: outcome.to_json() for name, outcome in outcomes.items()}))
        return
    for outcome in outcomes.values():
        print(outcome.text())
    words.print(f"wrote {', '.join(f'{out / name}.md' for name in outcomes)}, each with its .json", soft_wrap=True)
