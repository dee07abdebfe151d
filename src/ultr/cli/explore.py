"""`ultr explore`: plan the cheapest experiment that identifies examination."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ultr.cli import options
from ultr.cli.messages import with_options, words
from ultr.cli.options import print_notes, print_table

if TYPE_CHECKING:
    from ultr.bias.audit import BiasReport
    from ultr.bias.explore import ExplorationPlan, Traffic
    from ultr.log import Log

DAY = 86_400  # seconds


@with_options(
    "columns",
    options.columns("request", "position", "row", "column", "item", "actions", "query", "randomised", "swaps"),
)
def explore(
    *,
    log_path: options.AnyLog,
    precision: Annotated[
        float, typer.Option(help="Half-width of the 95% intervals, relative to examination.", min=0.01, max=1.0)
    ] = 0.1,
    share: Annotated[
        float, typer.Option(help="Share of the requests whose order is changed.", min=0.001, max=0.5)
    ] = 0.1,
    plan: Annotated[
        str | None,
        typer.Option(help="Plan to write: neighbours, first or top3. Default: the one with the fewest requests."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="CSV file for the table that a service applies; also a URL.")] = None,
    requests_per_day: Annotated[
        float | None, typer.Option(help="Requests of the service per day.", min=1.0, show_default="from --time")
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="NAME", help="Column with the time of the request.")] = None,
    labels: options.ClickLabels = None,
    columns: dict[str, str],
    on_duplicates: options.OnDuplicates = "error",
    where: options.Where = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Plan the cheapest experiment that shows how often users look at each position, and write it as a table."""
    from ultr.bias.explore import PLANS, SwapTable, fastest, make_plan, traffic_of
    from ultr.errors import OptionError, nearest
    from ultr.utils.files import check_output

    if plan is not None and plan not in PLANS:
        raise OptionError(f"there is no plan '{plan}'", hint=nearest(plan, PLANS))
    if out is not None:
        check_output(out, overwrite=overwrite)
    source, label = options.one_source(log_path), options.sum_of_labels(labels)
    with words.status(f"reading {source} ..."):
        rows: dict[str, Any] = {"on_duplicates": on_duplicates, "where": tuple(where or ())}
        log, report = _audit(source, label, time, rows, columns)
    traffic = traffic_of(report)
    names = [name for name in PLANS if name != "top3" or len(traffic.positions) > 2]
    plans = {str(name): make_plan(name, traffic, precision=precision, share=share) for name in names}
    chosen = fastest(plans.values()) if plan is None else plans[plan]
    if out is not None:
        SwapTable.of(chosen).write(out, overwrite=overwrite)
    daily = requests_per_day if requests_per_day is not None else _requests_per_day(log)
    if as_json:
        print(json.dumps(_content(report, traffic, plans, chosen, daily)))
        return
    print_notes(log.notes)
    _print_examination(traffic)
    _print_plans(plans, daily)
    _print_choice(plans, chosen)
    if out is not None:
        control = f"{1 - chosen.share:.1%} of the requests are the control"
        words.say(f"wrote {out}: {len(chosen.swaps)} swaps; {control}")
        words.say("log the drawn arm of each request, then run: ultr bias LOG --swaps COLUMN")


def _audit(
    source: str, label: str | None, time: str | None, rows: dict[str, Any], columns: dict[str, Any]
) -> tuple[Log, BiasReport]:
    """Return the log without features, and its bias report, which has no estimates from features."""
    from ultr.api import described_rows
    from ultr.bias.audit import audit
    from ultr.log import read_log
    from ultr.log.labels import click_label
    from ultr.log.readers import read_columns

    has_names = read_columns(source, **columns) is not None  # prepared lists and SVMlight have none
    reading = {**rows, **columns, **({"features": [], "categorical": []} if has_names else {})}
    log = read_log(source, time=time, **reading).without_features()
    described = described_rows(source, log, reading) if has_names else None
    return log, audit(log, label=click_label(log.actions) if label is None else label, described=described)


def _requests_per_day(log: Log) -> float | None:
    """Return the mean requests per day of a log with times; None if it has none."""
    if "time" not in log.context:
        return None
    times = log.context["time"].to_numpy(zero_copy_only=False)
    return len(log) / max(1.0, float(times.max() - times.min()) / DAY)


def _content(
    report: BiasReport,
    traffic: Traffic,
    plans: dict[str, ExplorationPlan],
    chosen: ExplorationPlan,
    daily: float | None,
) -> dict[str, Any]:
    """Return the results for --json."""
    from ultr.log.table import as_shown

    return {
        "verdict": report.verdict.status,
        "worst_case": traffic.assumed,
        "positions": [*map(as_shown, traffic.positions.tolist())],
        "theta": traffic.theta.tolist(),
        "chosen": chosen.name,
        "plans": {
            name: {
                "swaps": dict(zip(each.swaps, each.shares.tolist(), strict=True)),
                "positions": [*map(as_shown, each.positions)],
                "half_widths": each.half_widths.tolist(),
                "requests": each.requests,
                "share": each.share,
                "days": None if daily is None else each.days(daily),
                "lost_clicks": each.lost_clicks,
                "lost_per_1000_requests": 1000 * each.lost_per_request,
                "lost_share": each.lost_share,
                "lost_share_standard_error": each.lost_error,
                "most_lost_share": each.most_lost_share,
            }
            for name, each in plans.items()
        },
    }


def _print_examination(traffic: Traffic) -> None:
    if traffic.assumed:
        what = "the log does not identify examination, so the plans assume the worst case"
        words.say(f"examination: {what}: swaps lose at most the clicks below")
        return
    from ultr.log.table import as_shown

    places = map(as_shown, traffic.positions.tolist())
    shown = ", ".join(f"{theta:.2f} at {k}" for k, theta in zip(places, traffic.theta, strict=True))
    words.say(f"examination, as the log estimates it: {shown}")


def _print_plans(plans: dict[str, ExplorationPlan], daily: float | None) -> None:
    import numpy as np

    from ultr.bias.audit import ranges
    from ultr.bias.explore import PLANS

    first = next(iter(plans.values()))
    title = f"Plans that estimate examination to within {first.precision:.0%} and change {first.share:.1%} of requests"
    table = Table(title=title, title_justify="left")
    days = () if daily is None else ("days",)
    table.add_column("plan")
    table.add_column("each changed request")
    for heading in ("positions", "requests", *days, "clicks lost", "per 1,000 requests", "of all clicks (± s.e.)"):
        table.add_column(heading, justify="right")
    for each in plans.values():
        places = np.array(each.positions)
        lost = (
            f"{each.lost_clicks:,.0f}",
            f"{1000 * each.lost_per_request:.2f}",
            f"{each.lost_share:.2%} ± {each.lost_error:.2%}",
        )
        length = () if daily is None else (f"{each.days(daily):,.1f}",)
        table.add_row(each.name, PLANS[each.name], ranges(places, places), f"{each.requests:,}", *length, *lost)
    print_table(table)


def _print_choice(plans: dict[str, ExplorationPlan], chosen: ExplorationPlan) -> None:
    """Print which plan is chosen, and another one that loses fewer clicks in more time."""
    words.say(f"chosen: {chosen.name}")
    others = [each for each in plans.values() if each.swaps and each.positions == chosen.positions]
    least = min(others, key=lambda each: each.lost_clicks)
    if least.lost_clicks < chosen.lost_clicks:
        longer = f"{least.requests / chosen.requests:.1f} times as many requests"
        words.say(
            f"{least.name} loses {least.lost_clicks:,.0f} clicks instead of {chosen.lost_clicks:,.0f}, "
            f"but needs {longer} (--plan {least.name})",
        )
