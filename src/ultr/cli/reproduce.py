"""`ultr reproduce`: repeat the experiments of the paper that pairwise-em comes from (CIKM 2022)."""

from __future__ import annotations

import json
import math
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from ultr.cli.messages import progress_bar, words
from ultr.cli.options import Json, pages_can_be_made
from ultr.errors import OptionError, UnfinishedError, nearest


def reproduce(
    experiments: Annotated[
        str,
        typer.Argument(
            help="Comma-separated: table1, table2, figure3, figure4, figure5, live, settling, trees, worlds; or all."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the results; finished runs in it are not repeated.")] = Path(
        "reproduce"
    ),
    runs: Annotated[
        int, typer.Option(help="Runs of each method; 0: ten, or three with --quick (live, trees: five or two).", min=0)
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Small network, few runs: minutes on two cores.")] = False,
    data: Annotated[
        str | None, typer.Option(help="Data sets, comma-separated. Default: all of the experiment.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of data sets (or set ULTR_DATA).")] = None,
    jobs: Annotated[int, typer.Option(help="Number of parallel runs; 0: one per core, at most ten.", min=0)] = 0,
    minutes: Annotated[
        float,
        typer.Option(help="Time limit: no run starts later, exit code 3; the same command continues. 0: no limit."),
    ] = 0,
    users: Annotated[
        str,
        typer.Option(
            help="Simulated users of tables and figures: pbm, trust, cascade, dcm, clickbait, watch, grid or carousel."
        ),
    ] = "pbm",
    sessions: Annotated[
        int | None,
        typer.Option(
            help="Sessions of the log that all methods of a run learn from; 0: new ones at each step.",
            show_default="30000, or 5000 with --quick",
            min=0,
        ),
    ] = None,
    logging: Annotated[
        str,
        typer.Option(
            help="What orders what users see: weak, linear, network, strong, both, randomised, or a network trained on "
            "a share of the requests, such as 0.1 (see the docs)."
        ),
    ] = "linear",
    select: Annotated[
        str | None,
        typer.Option(
            help="How tables choose steps and settings: off-policy (without true labels), truth, or off-policy,truth.",
            show_default="off-policy,truth, or off-policy with --quick",
        ),
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(help="Write the tables and plots for the documentation into this folder too.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:1.")] = "auto",
    as_json: Json = False,
) -> None:
    """Repeat the experiments of the paper that pairwise-em comes from (CIKM 2022), and check the paper's claims."""
    from ultr.datasets.initial import parse_logging
    from ultr.datasets.users import make_user
    from ultr.experiments import EXPERIMENTS, FULL, QUICK, SELECTIONS, Lab
    from ultr.experiments.lab import write_docs
    from ultr.training.comparing.tasks import Workers, default_jobs
    from ultr.utils.stores import on_this_machine

    out = on_this_machine(out)
    make_user(users)  # raises OptionError if there are no such users
    selections = () if select is None else tuple(name.strip() for name in select.split(","))
    logged = parse_logging(logging)
    for given in selections:
        if given not in SELECTIONS:
            raise OptionError(f"'{given}' is not one of {', '.join(SELECTIONS)}", hint=nearest(given, SELECTIONS))
    names = list(EXPERIMENTS) if experiments == "all" else [name.strip() for name in experiments.split(",")]
    for name in names:
        if name not in EXPERIMENTS:
            raise OptionError(f"there is no experiment '{name}'", hint=nearest(name, [*EXPERIMENTS, "all"]))
    until = time.monotonic() + 60 * minutes if minutes else math.inf
    chosen = () if data is None else tuple(name.strip() for name in data.split(","))
    with_pages = pages_can_be_made()
    values = {"runs": runs or None, "data": data, "sessions": sessions, "select": select}
    values |= {"users": None if users == "pbm" else users, "logging": None if logging == "linear" else logging}
    options = ["--quick"] * quick  # the options that change results
    options += [text for name, value in values.items() if value is not None for text in (f"--{name}", str(value))]
    results = {}
    with progress_bar("runs") as bar, Workers(jobs or default_jobs(), until=until) as workers:

        def show(done: int, total: int, folder: str) -> None:
            bar.update(completed=done, total=total, figure=folder)

        lab = Lab(
            out,
            QUICK if quick else FULL,
            workers,
            runs=runs,
            data=chosen,
            data_dir=None if data_dir is None else str(data_dir),
            device=device,
            users=users,
            sessions=sessions,
            logging=logged,
            selections=selections,
            on_done=show,
        )
        for name in names:
            bar.update(description=name, completed=0, total=None)
            try:
                results[name] = EXPERIMENTS[name](lab)
            except UnfinishedError as error:
                raise UnfinishedError(f"{name}: {error}", hint="run the same command again to continue") from error
            results[name].write(out, page=with_pages)
            if docs is not None:
                write_docs(results[name], docs, shlex.join(["ultr", "reproduce", name, *options]))
    if as_json:
        print(json.dumps({name: result.to_json() for name, result in results.items()}))
        return
    for result in results.values():
        print(result.text())
    kinds = ".json and .html" if with_pages else ".json"
    written = ", ".join(f"{out / name}.md" for name in results)
    words.say(f"wrote {written}, each with {kinds} of the same name")
