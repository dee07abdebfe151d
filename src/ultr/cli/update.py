"""`ultr update`: train a run further on a new log, and replace it only if the new ranker is not worse."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ultr.cli import options
from ultr.cli.evaluate import print_comparison
from ultr.cli.messages import progress_bar, words
from ultr.cli.options import free_path, metrics_text, one_source, print_next, print_notes, print_warnings
from ultr.errors import UnfinishedError


def update(
    run: Annotated[str, typer.Argument(help="The run of yesterday: a finished run on a log; also a URL.")],
    log: Annotated[
        list[str],
        typer.Option(
            "--log",
            help="The log of today, or of the last days: a log or prepared lists, as for ultr train; may be repeated, "
            "the oldest first.",
        ),
    ],
    out: Annotated[str, typer.Option(help="The run directory to write; also a URL.")],
    gate: Annotated[
        float, typer.Option(help="Reject the new run if it is worse than the old one with this confidence.")
    ] = 0.95,
    min_evidence: Annotated[
        float, typer.Option(min=0, help="Minimum effective clicks of the new test requests; 0: none.")
    ] = 30.0,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a finding about the new log that does not stop the update, or all; may be repeated."
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="A log of good days to test on too.", show_default="requests that the run keeps"),
    ] = None,
    decay: Annotated[
        float | None,
        typer.Option(help="Half-life of the weights of requests, in days."),
    ] = None,
    time: Annotated[str | None, typer.Option(help="Column with the time, for --decay and --action-delay.")] = None,
    action_delay: options.ActionDelay = None,
    actions_until: options.ActionsUntil = None,
    refit_bias: Annotated[
        bool,
        typer.Option("--refit-bias", help="Estimate examination from the new log."),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Training steps of the network, or new rounds of trees alone.",
            show_default="a fifth of the first training",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate of the network, or of trees alone.", show_default="as for the run"),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Where to compute.", show_default="as for the run")
    ] = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Train a run further on a new log, and write it if a gate lets it pass.

    The options come from the run. Training starts from its ranker and its bias model; trees get further rounds. A
    log that differs too much from earlier logs is quarantined. Else both rankers are compared off policy,
    on requests of the new log and of the last good days that neither was trained on. If the gate stops the update, the
    command says why, exits with code 3, and writes nothing at --out. A killed command is resumed by the same command,
    unless the log has changed.
    """
    from ultr.datasets.base import cache_folder
    from ultr.training.gate import NEW_LOG, Gate
    from ultr.training.loop import Listeners
    from ultr.training.update import CANDIDATE, update_run
    from ultr.utils.stores import kept_here

    source = one_source(log)
    here = kept_here(out, cache_folder() / "runs", resume=True, overwrite=overwrite, writes=True)
    with progress_bar("update") as bar, here as folder:

        def show(progress: Any) -> None:
            bar.update(description=progress.ranker, completed=progress.step, figure=metrics_text(progress.metrics))

        result = update_run(
            run,
            source,
            folder,
            gate=Gate(gate, min_evidence, tuple(allow or ())),
            reference=reference,
            refit_bias=refit_bias,
            decay=decay,
            time=time,
            action_delay=action_delay,
            actions_until=actions_until,
            overwrite=overwrite,
            listeners=Listeners(lambda note: print_notes([note]), options.print_warning, on_progress=show),
            steps=steps,
            lr=lr,
            device=device,
        )
    written = out if result.accepted else f"{out.rstrip('/')}{CANDIDATE}" if result.run else None
    print_warnings(result.warnings)
    if as_json:
        print(json.dumps({**result.to_json(), "run": written}))
    else:
        for where, comparison in result.comparisons.items():
            print_comparison(comparison, source if where == NEW_LOG else where)
    if not result.accepted:
        for each in result.reasons:
            words.say(f"{each.name}: {each.what}; {each.hint}")
        kept = f"; the new run is in {written}" if written else ", and nothing was trained"
        words.say(f"{result.status}: {out} was not written{kept}")
        raise typer.Exit(UnfinishedError.exit_code)
    test = result.value.difference if result.value else None
    about = (
        "" if test is None else f"difference {test.difference:+.4f}, 95% interval {test.low:+.4f} to {test.high:+.4f}"
    )
    words.say(f"wrote {out}: not clearly worse than {run} ({about})")
    if not as_json:
        print_next("report", run, out, out=free_path("report.html"))
