"""`ultr demo`: show position bias, its cost and its correction on generated data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ultr.cli.messages import words
from ultr.cli.options import Json, Seed, free_path, new_table, pages_can_be_made, print_next, print_table

if TYPE_CHECKING:
    from ultr.experiments.demo import Demo, Learned

WIDTH = 30  # of a bar for 100%


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the files of the demo.")] = Path("ultr-demo"),
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Show position bias and its cost: generate data, simulate users, and train rankers on their feedback."""
    from ultr.experiments.demo import run_demo, run_learning
    from ultr.report import write_report
    from ultr.utils.stores import on_this_machine

    out = on_this_machine(out)
    with words.status("generating data and simulating clicks ..."):
        result = run_demo(out, seed=seed)
    if not as_json:
        _print_bias(result)
    with words.status("training on the feedback, with and without correction, and on unbiased feedback ..."):
        learned = run_learning(out, seed=seed)
    page = write_report(learned.runs, out / "report.html", overwrite=True) if pages_can_be_made() else None
    if as_json:
        columns = ("positions", "examined", "clicked", "looks", "truth")
        content: dict[str, Any] = {name: getattr(result, name).tolist() for name in columns}
        content |= {"theta": learned.theta.tolist(), "true_theta": learned.true_theta.tolist()}
        print(json.dumps({**content, "outcomes": [vars(ranker) for ranker in learned.results]}))
        return
    _print_learned(learned)
    log = out / "log.parquet"
    words.say(f"\nwrote {log}: {result.log!r}")
    if page is not None:
        words.say(f"wrote {page}: open it in a browser to see the results")
    print_next("train", log, out=free_path("my-run"))


def _print_learned(learned: Learned) -> None:
    table = Table(title="\nExamination estimated from the feedback (first position = 100%)", title_justify="left")
    table.add_column("position", justify="right")
    table.add_column("estimated (above) and true (below)", no_wrap=True)
    for i, shares in enumerate(zip(learned.theta, learned.true_theta, strict=True), start=1):
        table.add_row(str(i), _bars(blue=shares[0], green=shares[1]))
    print_table(table)
    title = "\nThe cost of the bias: metrics on test requests, by true labels"
    table = new_table(title, names=("ranker",), numbers=("NDCG@10", "Reward@10"))
    for ranker in learned.results:
        table.add_row(ranker.name, f"{ranker.ndcg:.3f}", f"{ranker.reward:.3f}")
    print_table(table)
    start, biased, corrected, unbiased = (ranker.ndcg for ranker in learned.results)
    naive_gain, corrected_gain = ((ndcg - start) / (unbiased - start) for ndcg in (biased, corrected))
    words.say(
        "Training on the feedback of users without position bias gives the full gain in NDCG. Training on biased "
        f"feedback gives {naive_gain:.0%} of this gain; with bias correction, {corrected_gain:.0%}.",
    )


def _print_bias(result: Demo) -> None:
    table = Table(title="Position bias in a simulated search log", title_justify="left")
    for heading in ("position", "examined\n(hidden)", "click rate\n(in the log)"):
        table.add_column(heading, justify="right")
    table.add_column("relevance: apparent (above) and true (below),\nposition 1 = 100%", no_wrap=True)
    for i, position in enumerate(result.positions):
        bars = _bars(red=result.looks[i], green=result.truth[i])
        table.add_row(str(position), f"{result.examined[i]:.0%}", f"{result.clicked[i]:.1%}", bars)
    print_table(table)
    first, last = result.positions[0], result.positions[-1]
    words.say(
        f"By clicks, items at position {last} seem {1 / result.looks[-1]:.1f} times less relevant than at "
        f"position {first}. In truth they are {1 / result.truth[-1]:.1f} times less relevant.\n"
        f"Clicks overstate the difference by a factor of {result.overstated:.0f}, as users rarely look so far down.",
    )


def _bars(**shares: float) -> str:
    """Return a bar for each share, by its colour, with lines between them."""
    return "\n".join(
        f"[{colour}]{'█' * max(0, round(float(share) * WIDTH))}[/] {share:.0%}" for colour, share in shares.items()
    )
