"""The paper's A/B test, simulated: the lift over PAL-Click, and what becomes of it over days of feedback."""

from __future__ import annotations

from ultr.errors import DataError
from ultr.experiments.claims import DIRECTION, HELD, NOT, REVERSED, Claim
from ultr.experiments.lab import TITLES, Lab, Outcome, markdown_table
from ultr.experiments.live import LiveOptions, LiveResult, run_live
from ultr.experiments.paper import LIVE_LIFT, OPT
from ultr.plots import Line, Panel, write_line_plot

FULL_LIVE = LiveOptions(days=10, sessions=6000, hidden=(512, 256, 128), dropout=0.3, steps=300, bias_steps=1500)
QUICK_LIVE = LiveOptions(days=7, sessions=1000, hidden=(64, 32), dropout=0.1, steps=100, bias_steps=200)
LIVE_RUNS = {"full": 5, "quick": 2}


def live_test(lab: Lab) -> Outcome:
    """Traffic with clicks, dwell, likes and shares, served by rankers that learn daily from what they served."""
    here, absent = lab.find(["synthetic"])
    if len(here) > 1:
        raise DataError("the live test takes one data set", got=", ".join(here))
    base = QUICK_LIVE if lab.budget.name == "quick" else FULL_LIVE
    options = LiveOptions(**{**vars(base), "data": here[0], "data_dir": lab.data_dir, "device": lab.device})
    folder = lab.out / "runs" / lab.budget.name / here[0] / "live"
    runs = lab.runs or LIVE_RUNS[lab.budget.name]
    result = run_live(options, folder, runs=runs, workers=lab.workers, on_done=lab.on_done)
    _plot(lab, result)
    control = options.buckets[0]
    about = (
        f"{runs} runs of {options.days} days after day 0, {options.sessions} sessions a bucket and day, "
        f"{TITLES.get(here[0], here[0])}; the live metric is `{options.label}`, summed over a session. "
        f"Lift over {control}, days 1 to {options.days}: in exact expectation, and as sampled traffic shows it, with "
        f"95% intervals over runs. The paper's A/B test of seven days: {LIVE_LIFT:+.2%}."
    )
    sections = [about, _lifts(result), _course(result)]
    title = f"Live test (budget: {lab.budget.name})"
    return Outcome("live", title, sections, _claims(result), result.to_json(), absent, ["live.svg"])


def _lifts(result: LiveResult) -> str:
    rows = []
    for name, lift in result.lifts.items():
        within = [run["lifts"][name] for run in result.runs]
        tests = ", ".join(f"{one['lift']:+.1%} (p = {one['p']:.2g})" for one in within)
        rows.append([name, _interval(lift["expected"]), _interval(lift["sampled"]), tests])
    return "## Lift\n\n" + markdown_table(["bucket", "exact", "sampled", "each run's test"], rows)


def _interval(lift: dict[str, float]) -> str:
    ends = "" if lift["low"] is None else f" [{lift['low']:+.2%}, {lift['high']:+.2%}]"
    return f"{lift['mean']:+.2%}{ends}"


def _course(result: LiveResult) -> str:
    days = range(result.options.days + 1)
    rows, errors = [], []
    for name, course in result.course.items():
        rows.append([name, *(f"{day['expected']:.3f}" for day in course)])
        if any(day["theta_error"] is not None for day in course):
            found = ["" if day["theta_error"] is None else f"{day['theta_error']:.0%}" for day in course]
            errors.append([name, *found])
    heads = ["bucket", *(f"day {day}" for day in days)]
    text = "## Day by day\n\nThe live metric in exact expectation, means over runs:\n\n" + markdown_table(heads, rows)
    return text + "\n\nLargest error of theta_k / theta_1:\n\n" + markdown_table(heads, errors)


def _plot(lab: Lab, result: LiveResult) -> None:
    days = list(range(result.options.days + 1))
    metric = [Line(name, [day["expected"] for day in course]) for name, course in result.course.items()]
    lifts = [
        Line(name, [100 * day["expected"]["mean"] for day in lift["by_day"]]) for name, lift in result.lifts.items()
    ]
    control = result.options.buckets[0]
    panels = [
        Panel("The live metric by day", days, "day", "exact expectation", metric),
        Panel(f"Lift over {control} by day", days, "day", "exact, %", lifts),
    ]
    lab.out.mkdir(parents=True, exist_ok=True)
    write_line_plot(lab.out / "live.svg", panels)


def _claims(result: LiveResult) -> list[Claim]:
    """Whether debiasing pairs lifts the live metric over PAL-Click, and does so to the last day."""
    data = TITLES.get(result.options.data, result.options.data)
    found = []
    whole = result.lifts[OPT]
    last = whole["by_day"][-1]
    for text, lift in (
        ("loss_opt lifts the live metric over PAL-Click", whole["expected"]),
        ("and still on the last day, learning from its own log", last["expected"]),
    ):
        found.append(Claim(text, data, _verdict(lift), _interval(lift)))
    return found


def _verdict(lift: dict[str, float]) -> str:
    if lift["mean"] > 0:
        return HELD if lift["low"] is not None and lift["low"] > 0 else DIRECTION
    return REVERSED if lift["high"] is not None and lift["high"] < 0 else NOT
