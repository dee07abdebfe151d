"""`ultr compare`: train several methods and compare them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultr.cli import options
from ultr.cli import training_options as shared
from ultr.cli.messages import progress_bar, with_options, words
from ultr.cli.options import (
    free_path,
    new_table,
    pages_can_be_made,
    print_next,
    print_notes,
    print_table,
    print_warning,
)
from ultr.errors import OptionError, nearest

if TYPE_CHECKING:
    from ultr.training.comparing.results import Comparison


WITHOUT = {"method", "propensities", "bias", "seed", "where", "categorical"}  # options of `ultr train` alone
OPTIONS = {name: kind for name, kind in shared.OPTIONS.items() if name not in WITHOUT} | {
    "ranker": Annotated[
        str | None, typer.Option(help="mlp, linear, lightgbm, xgboost or auto (as ultr train).", show_default="mlp")
    ]
}


@with_options("given", OPTIONS)
def compare(
    *,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, comma-separated; options follow a colon (pairwise-em:loss=opt:ranker=lightgbm). Upper "
            "bounds: lambdarank:from=truth (true labels), lambdarank:from=no-bias (users without bias)."
        ),
    ],
    out: Annotated[
        str, typer.Option(help="Folder of the comparison; finished runs in it are not repeated; also a URL.")
    ],
    seeds: Annotated[int, typer.Option(help="Runs of each method, with different seeds.")] = 5,
    reference: Annotated[
        str | None, typer.Option(help="Test the others against this method.", show_default="the first")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="Metrics on test requests, comma-separated.")] = None,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Learning rates to choose from on validation requests.",
            show_default="0.005,0.01,0.02,0.05; trees: 0.05,0.1",
        ),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Also choose from dropout=0,0.3; max_weight=2,3,5,none (the default); by seeds=3 runs of each. A "
            "method that still improves at its last step has up to longest=4 times the steps.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Parallel runs; 0: the number of cores, up to ten.", min=0)] = 0,
    given: dict[str, Any],
    settings: shared.SetOption = None,
    config_file: shared.ConfigOption = None,
    as_json: options.Json = False,
) -> None:
    """Compare methods: tune each on validation requests, train with the same seeds, and evaluate on test requests.

    A method differs from the reference if paired tests over seeds and over test requests both have p < 0.05. On a log,
    all runs and the logged ranking are evaluated under the same estimate of examination, on the same test requests.
    """
    from ultr.datasets.base import cache_folder
    from ultr.report import write_comparison_page
    from ultr.training.comparing.plan import LONGEST, run_folder
    from ultr.training.comparing.plan import compare as run_comparison
    from ultr.utils.stores import kept_here, url_below

    base = shared.training_config(given, sets=settings or (), file=config_file)
    if not base.data.source:
        raise OptionError("there is no data to learn from", hint="pass a log: ultr compare LOG --methods ... --out DIR")
    tuning = {"longest": 1 if "steps" in base.network.model_fields_set else LONGEST, **_tuning(tune or ())}
    here = kept_here(out, cache_folder() / "runs", resume=True, overwrite=False, writes=True)
    with progress_bar("runs") as bar, here as folder:

        def show(done: int, total: int, name: str) -> None:
            bar.update(completed=done, total=total, figure=name)

        result = run_comparison(
            base,
            [name for name in methods.split(",") if name.strip()],
            folder,
            seeds=seeds,
            rates=_numbers("--lrs", lrs or ""),
            metrics=metrics.split(",") if metrics else (),
            reference=reference or "",
            jobs=jobs,
            on_done=show,
            on_note=lambda note: print_notes([note]),
            on_warning=print_warning,
            **tuning,
        )
        if has_page := pages_can_be_made():
            write_comparison_page(folder, folder / "comparison.html", overwrite=True)
        best = result.best()
        best_run = run_folder(folder, best.entry, best.setting, 0)
        has_model, best_name = (best_run / "model").is_dir(), best_run.relative_to(folder).as_posix()
    if as_json:
        print(json.dumps(result.to_json()))
        return
    _print_comparison(result)
    page = f" and {url_below(out, 'comparison.html')}" if has_page else ""
    words.say(f"wrote {url_below(out, 'comparison.json')}{page}")
    if has_model:
        print_next("report", url_below(out, best_name), out=free_path("report.html"))


def _tuning(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `compare` for the options --tune, texts such as dropout=0,0.3."""
    names = {"dropout": "dropouts", "max_weight": "limits", "seeds": "tuning_seeds", "longest": "longest"}
    arguments: dict[str, Any] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in names:
            raise OptionError(f"--tune has no '{name}'", hint=nearest(name, names))
        numbers = _numbers(f"--tune {name}", values, words=("none",) if name == "max_weight" else ())
        if name in ("seeds", "longest"):
            if len(numbers) != 1 or not float(numbers[0]).is_integer() or numbers[0] < 1:
                raise OptionError(f"--tune {name} must be a whole number of at least 1", got=f"'{values}'")
            arguments[names[name]] = int(numbers[0])
        else:
            arguments[names[name]] = numbers
    return arguments


def _numbers(option: str, text: str, *, words: Sequence[str] = ()) -> list[Any]:
    """Return comma-separated numbers; `words` stay as they are."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return [part if part in words else float(part) for part in parts]
    except ValueError as error:
        raise OptionError(f"{option} must be comma-separated numbers, such as 0.5,2", got=f"'{text}'") from error


def _print_comparison(result: Comparison) -> None:
    from ultr.evaluation.comparing import LOGGED_RANKING

    title = f"Mean ± standard deviation over seeds; * differs from {result.reference}, p < 0.05 over seeds and requests"
    if result.logged:
        title += f"; † differs from {LOGGED_RANKING}, p < 0.05 over requests"
    table = new_table(f"{title} (corrected by Holm)", names=("method",), numbers=("setting", *result.metrics))
    if result.logged:
        table.add_row(LOGGED_RANKING, "", *(f"{mean.mean:.4f}{'':11}" for mean in result.logged.values()))
    for row in result.rows:
        cells = []
        for metric, summary in row.to_json()["figures"].items():
            marks = "*" if metric in row.against and row.against[metric].significant else " "
            if result.logged:
                marks += "†" if metric in row.against_logged and row.against_logged[metric].holm < 0.05 else " "
            cells.append(f"{summary['mean']:.4f} ± {summary['deviation']:.4f}{marks}")
        table.add_row(row.entry, str(row.setting), *cells)
    print_table(table)
