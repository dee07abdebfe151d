"""Tables 1 and 2 as printed in *Unbiased Learning to Rank with Biased Continuous Feedback* (CIKM 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CUTOFFS = (3, 5, 10)
Printed = tuple[float, float]  # mean and standard deviation over runs


@dataclass(frozen=True)
class TableRow:
    """A row of a table: its name in the paper, the method here, and the results in the paper by data set and cutoff.

    A row without `printed` results is not in the paper.
    """

    name: str
    entry: str
    printed: Mapping[str, tuple[Printed, ...]] = field(default_factory=dict)


def _row(name: str, entry: str, first: str, means: str, deviations: str, second: str) -> TableRow:
    pairs = [(float(m), float(d)) for m, d in zip(means.split(), deviations.split(), strict=True)]
    return TableRow(name, entry, {first: tuple(pairs[:3]), second: tuple(pairs[3:])})


def _table1(name: str, entry: str, means: str, deviations: str) -> TableRow:
    return _row(name, entry, "yahoo", means, deviations, "ml-1m")


def _table2(name: str, entry: str, means: str, deviations: str) -> TableRow:
    return _row(name, entry, "yahoo", means, deviations, "mslr-web30k")


OPT, BAYES, IPW = "pairwise-em:loss=opt", "pairwise-em:loss=bayes-ipw", "pairwise-em:loss=ipw"
UPPER = "lambdarank:from=truth"
DEFAULT = "pairwise-em"
DEFAULT_ROW = TableRow("pairs and likelihood (the default)", DEFAULT)

TABLE1 = (
    _table1(
        "Our Method (loss_opt)",
        OPT,
        "2.3319 2.7185 2.9735 5.8553 7.6690 9.1400",
        "6.9e-3 7.5e-3 5.9e-3 1.1e-2 1.5e-2 1.6e-2",
    ),
    _table1(
        "Our Method (loss_Bayes-IPW)",
        BAYES,
        "2.3046 2.6864 2.9423 5.8415 7.6486 9.1217",
        "8.5e-3 7.5e-3 8.0e-3 1.4e-2 7.8e-3 9.7e-3",
    ),
    _table1(
        "Our Method (loss_IPW)",
        IPW,
        "2.2447 2.6239 2.8828 5.8584 7.6635 9.1285",
        "9.9e-3 1.0e-2 8.9e-3 2.0e-2 2.1e-2 2.5e-2",
    ),
    _table1(
        "Sum-Synthesize",
        "sum-synthesize",
        "2.2599 2.6380 2.8913 5.7863 7.5704 9.0289",
        "5.0e-3 8.1e-3 8.7e-3 2.5e-2 3.1e-2 3.5e-2",
    ),
    _table1(
        "PAL-Synthesize",
        "pal-synthesize",
        "2.2612 2.6388 2.8914 5.7484 7.5271 8.9682",
        "8.7e-3 6.0e-3 5.6e-3 3.1e-2 3.7e-2 4.0e-2",
    ),
    _table1(
        "Sum-Click",
        "sum-click",
        "2.2776 2.6590 2.9146 5.7283 7.5570 9.0264",
        "1.2e-2 9.7e-3 8.9e-3 2.1e-2 2.3e-2 2.8e-2",
    ),
    _table1(
        "PAL-Click",
        "pal-click",
        "2.2907 2.6719 2.9274 5.7385 7.5838 9.0586",
        "9.9e-3 6.6e-3 6.7e-3 1.9e-2 1.8e-2 1.9e-2",
    ),
    _table1(
        "PAL-Click + PAL-DwellTime",
        "pal-click-dwell",
        "2.2707 2.6504 2.9058 5.7569 7.5491 9.0031",
        "7.7e-3 7.3e-3 6.9e-3 2.7e-2 3.5e-2 3.7e-2",
    ),
    _table1(
        "Lower Bound (pointwise DNN)",
        "pointwise",
        "2.2548 2.6353 2.8892 5.7106 7.5392 9.0113",
        "4.4e-3 6.5e-3 5.3e-3 1.3e-2 1.6e-2 1.9e-2",
    ),
    _table1(
        "Lower Bound (LambdaRank)",
        "lambdarank",
        "2.1619 2.5370 2.7957 5.6800 7.4805 8.9387",
        "1.2e-2 8.5e-3 8.4e-3 2.1e-2 2.9e-2 4.7e-2",
    ),
)
BEYOND1 = (
    TableRow("posterior pairs", "pairwise-em:final=pairs"),
    TableRow("the default, theta up to 0.5", "pairwise-em:scale=0.5"),
    TableRow("the default, theta up to 1", "pairwise-em:scale=1"),
    TableRow("opt-posterior", "pairwise-em:loss=opt-posterior"),
    TableRow("loss_opt, exact pair weights", "pairwise-em:loss=opt:weights=exact"),
    TableRow("loss_opt, joint EM", "pairwise-em:loss=opt:em=joint"),
    TableRow("as released", "pairwise-em:variant=released"),
    TableRow("PAL-Click, dwell from all rows", "pal-click:rows=all"),
    TableRow("PAL-Click as released", "pal-click:variant=released"),
    TableRow("PAL-Click + PAL-DwellTime, all rows", "pal-click-dwell:rows=all"),
    TableRow("direct", "direct"),
    TableRow("direct, values by ordinal regression", "direct:values=ordinal"),
    TableRow("doubly robust", "doubly-robust"),
    TableRow("Sum-Click, weighted by the logging policy", "sum-click:sample_weights=logging"),
    TableRow("PAL-Click, gradient reversal", "pal-click:reversal=3"),
    TableRow("IPW-LambdaLoss", "ipw-lambdaloss:labels=values"),
    TableRow("PL-Rank", "pl-rank:labels=values"),
    TableRow("PRPO", "prpo:labels=values"),
    TableRow("exposure-based risk", "safe-ipw:labels=values"),
    TableRow("pointwise without position bias", "pointwise:from=no-bias"),
    TableRow("LambdaRank without position bias", "lambdarank:from=no-bias"),
)

TABLE2 = (
    _table2(
        "Upper Bound (LambdaRank, true labels)",
        UPPER,
        "0.6960 0.7175 0.7644 0.3960 0.4047 0.4286",
        "1.4e-3 1.3e-3 1.0e-3 2.3e-3 1.8e-3 1.8e-3",
    ),
    _table2(
        "Our Method (loss_opt)",
        OPT,
        "0.6895 0.7115 0.7589 0.3811 0.3899 0.4132",
        "2.5e-3 2.1e-3 1.4e-3 2.6e-3 1.7e-3 1.0e-3",
    ),
    _table2(
        "Our Method (loss_Bayes-IPW)",
        BAYES,
        "0.6900 0.7116 0.7589 0.3800 0.3888 0.4125",
        "2.4e-3 1.7e-3 1.5e-3 2.5e-3 1.8e-3 1.1e-3",
    ),
    _table2(
        "Our Method (loss_IPW)",
        IPW,
        "0.6860 0.7079 0.7557 0.3784 0.3882 0.4119",
        "1.6e-3 1.3e-3 1.2e-3 1.4e-3 1.4e-3 1.5e-3",
    ),
    _table2(
        "DLA",
        "dla",
        "0.6892 0.7106 0.7578 0.3792 0.3870 0.4102",
        "2.1e-3 2.2e-3 1.6e-3 2.7e-3 2.4e-3 2.9e-3",
    ),
    _table2(
        "Regression EM",
        "regression-em",
        "0.6893 0.7108 0.7577 0.3707 0.3766 0.3977",
        "2.1e-3 2.1e-3 1.6e-3 3.9e-3 3.7e-3 3.6e-3",
    ),
    _table2(
        "Pairwise Debiasing",
        "pairwise-debias",
        "0.6600 0.6847 0.7365 0.3481 0.3623 0.3912",
        "3.5e-3 2.8e-3 2.0e-3 3.3e-3 2.8e-3 2.4e-3",
    ),
    _table2(
        "Lower Bound (LambdaRank)",
        "lambdarank",
        "0.6541 0.6790 0.7320 0.3433 0.3579 0.3874",
        "2.5e-3 2.2e-3 1.7e-3 2.2e-3 2.1e-3 1.7e-3",
    ),
)
BEYOND2 = (
    TableRow("opt-posterior", "pairwise-em:loss=opt-posterior"),
    TableRow("as released", "pairwise-em:variant=released"),
    TableRow("PAL-Click", "pal-click"),
    TableRow("listwise IPW", "ipw-listwise"),
    TableRow("IPW-LambdaLoss", "ipw-lambdaloss"),
    TableRow("PL-Rank", "pl-rank"),
    TableRow("PRPO", "prpo"),
    TableRow("exposure-based risk", "safe-ipw"),
    TableRow("direct", "direct"),
    TableRow("doubly robust", "doubly-robust"),
    TableRow("Sum-Click, weighted by the logging policy", "sum-click:sample_weights=logging"),
    TableRow("PAL-Click, gradient reversal", "pal-click:reversal=3"),
    TableRow("UPE", "upe"),
    TableRow("UBM", "ubm"),
    TableRow("DBN", "dbn"),
    TableRow("SDBN", "sdbn"),
    TableRow("cascade model", "cascade"),
    TableRow("CCM", "ccm"),
    TableRow("Regression EM as in ULTRA", "regression-em:variant=ultra"),
    TableRow("Pairwise Debiasing as in ULTRA", "pairwise-debias:variant=released"),
    TableRow("LambdaRank without position bias", "lambdarank:from=no-bias"),
)

LIVE_LIFT = 0.0208  # relative gain over PAL-Click in the paper's A/B test of seven days
FIGURE_METHODS = {
    "pairs and likelihood (the default)": DEFAULT,
    "Our Method (loss_opt)": OPT,
    "DLA": "dla",
    "Regression EM": "regression-em",
    "PAL-Click": "pal-click",
    "Lower Bound (LambdaRank)": "lambdarank",
}
ETAS = (0.0, 0.5, 1.0, 1.5, 2.0)
DELTAS = (1.0, 2.0, 3.0, 4.0, 5.0)
