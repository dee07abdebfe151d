"""A simulated A/B test, as in the paper behind pairwise-em (CIKM 2022): the relative gain (lift) over PAL-Click."""

from __future__ import annotations

from ultr.errors import DataError
from ultr.experiments.claims import DIRECTION, HELD, NOT, REVERSED, Claim
from ultr.experiments.lab import TITLES, ExperimentResult, Lab
from ultr.experiments.live import LiveOptions, LiveResult, run_live
from ultr.experiments.paper import DEFAULT, LIVE_LIFT, OPT
from ultr.report.parts import Section, Table
from ultr.report.plots import line_plot

FULL_LIVE = LiveOptions(days=10, sessions=6000, hidden=(512, 256, 128), dropout=0.3, steps=300, bias_steps=1500)
QUICK_LIVE = LiveOptions(days=7, sessions=1000, hidden=(64, 32), dropout=0.1, steps=100, bias_steps=200)
LIVE_RUNS = {"full": 5, "quick": 2}


def live_test(lab: Lab) -> ExperimentResult:
    """Run the live test: simulated users click, dwell, like and share; rankers learn daily from their own traffic."""
    available, absent = lab.find(["synthetic"])
    if len(available) > 1:
        raise DataError("the live test takes one data set", got=", ".join(available), hint="pass one with --data")
    base = QUICK_LIVE if lab.budget.name == "quick" else FULL_LIVE
    options = LiveOptions(**{**vars(base), "data": available[0], "data_dir": lab.data_dir, "device": lab.device})
    folder = lab.out / "runs" / lab.budget.name / available[0] / "live"
    runs = lab.runs or LIVE_RUNS[lab.budget.name]
    result = run_live(options, folder, runs=runs, workers=lab.workers, on_done=lab.on_done)
    about = (
        f"{runs} runs of {options.days} days after day 0, {options.sessions} sessions per bucket and day, "
        f"{TITLES.get(available[0], available[0])}. The live metric is {options.label}, summed over a session. "
        f"Lifts are over {options.buckets[0]}, days 1 to {options.days}, in exact expectation and in sampled traffic, "
        f"with 95% intervals over runs. The paper's A/B test over seven days had a lift of {LIVE_LIFT:+.2%}."
    )
    sections = [_lifts(result), _days(result)]
    title = f"Live test (budget: {lab.budget.name})"
    return ExperimentResult("live", title, about, sections, _claims(result), result.to_json(), absent)


def _lifts(result: LiveResult) -> Section:
    rows = []
    for name, lift in result.lifts.items():
        by_run = [run["lifts"][name] for run in result.runs]
        tests = ", ".join(f"{one['lift']:+.1%} (p = {one['p']:.2g})" for one in by_run)
        rows.append([name, _interval(lift["expected"]), _interval(lift["sampled"]), tests])
    days = list(range(result.options.days + 1))
    lines = {
        name: (days, [100 * day["expected"]["mean"] for day in lift["by_day"]]) for name, lift in result.lifts.items()
    }
    title = f"Lift over {result.options.buckets[0]} by day"
    plot = line_plot(title, lines, x="day", y="exact expectation, %", categories=True, order=result.options.buckets)
    return Section("Lift", [Table(["bucket", "exact", "sampled", "test of each run"], rows), plot])


def _interval(lift: dict[str, float]) -> str:
    ends = "" if lift["low"] is None else f" [{lift['low']:+.2%}, {lift['high']:+.2%}]"
    return f"{lift['mean']:+.2%}{ends}"


def _days(result: LiveResult) -> Section:
    days = list(range(result.options.days + 1))
    rows, errors, lines = [], [], {}
    for name, course in result.course.items():
        lines[name] = (days, [day["expected"] for day in course])
        rows.append([name, *(f"{day['expected']:.3f}" for day in course)])
        if any(day["theta_error"] is not None for day in course):
            cells = ["" if day["theta_error"] is None else f"{day['theta_error']:.0%}" for day in course]
            errors.append([name, *cells])
    head = ["bucket", *(f"day {day}" for day in days)]
    plot = line_plot("The live metric by day", lines, x="day", y="exact expectation", categories=True)
    metric = Table(head, rows, "The live metric in exact expectation, means over runs")
    return Section("Day by day", [plot, metric, Table(head, errors, "Largest error of theta_k / theta_1")])


def _claims(result: LiveResult) -> list[Claim]:
    """Check the claims that our methods raise the live metric over PAL-Click, over all days and on the last day."""
    data, claims = TITLES.get(result.options.data, result.options.data), []
    for name, entry in (("loss_opt", OPT), ("The default", DEFAULT)):
        lift = result.lifts[entry]
        last = f"{name} still has a lift on the last day, when it learns from its own log"
        for text, over in (
            (f"{name} lifts the live metric over PAL-Click", lift["expected"]),
            (last, lift["by_day"][-1]["expected"]),
        ):
            claims.append(Claim(text, data, _verdict(over), _interval(over)))
    return claims


def _verdict(lift: dict[str, float]) -> str:
    if lift["mean"] > 0:
        return HELD if lift["low"] is not None and lift["low"] > 0 else DIRECTION
    return REVERSED if lift["high"] is not None and lift["high"] < 0 else NOT
