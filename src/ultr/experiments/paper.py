"""Tables 1 and 2 as printed in *Unbiased Learning to Rank with Biased Continuous Feedback* (CIKM 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


OPT, BAYES, IPW = "pairwise-em:loss=opt", "pairwise-em:loss=bayes-ipw", "pairwise-em:loss=ipw"
UPPER = "lambdarank:from=truth"
DEFAULT = "pairwise-em"
NAMES = {  # of methods, by entry; those of the paper first
    OPT: "Our Method (loss_opt)",
    BAYES: "Our Method (loss_Bayes-IPW)",
    IPW: "Our Method (loss_IPW)",
    UPPER: "Upper Bound (LambdaRank, true labels)",
    "sum-synthesize": "Sum-Synthesize",
    "pal-synthesize": "PAL-Synthesize",
    "sum-click": "Sum-Click",
    "pal-click": "PAL-Click",
    "pal-click-dwell": "PAL-Click + PAL-DwellTime",
    "dla": "DLA",
    "regression-em": "Regression EM",
    "pairwise-debias": "Pairwise Debiasing",
    "pointwise": "Lower Bound (pointwise DNN)",
    "lambdarank": "Lower Bound (LambdaRank)",
    DEFAULT: "pairs and likelihood (the default)",
    "pairwise-em:final=pairs": "posterior pairs",
    "pairwise-em:scale=0.5": "the default, theta up to 0.5",
    "pairwise-em:scale=1": "the default, theta up to 1",
    "pairwise-em:loss=opt-posterior": "opt-posterior",
    "pairwise-em:loss=opt:weights=exact": "loss_opt, exact pair weights",
    "pairwise-em:loss=opt:em=joint": "loss_opt, joint EM",
    "pairwise-em:variant=released": "as released",
    "pal-click:rows=all": "PAL-Click, dwell from all rows",
    "pal-click:variant=released": "PAL-Click as released",
    "pal-click-dwell:rows=all": "PAL-Click + PAL-DwellTime, all rows",
    "pal-click:reversal=3": "PAL-Click, gradient reversal",
    "sum-click:sample_weights=logging": "Sum-Click, weighted by the logging policy",
    "direct": "direct",
    "direct:values=ordinal": "direct, values by ordinal regression",
    "doubly-robust": "doubly robust",
    "ipw-listwise": "listwise IPW",
    "ipw-lambdaloss": "IPW-LambdaLoss",
    "ipw-lambdaloss:labels=values": "IPW-LambdaLoss",
    "pl-rank": "PL-Rank",
    "pl-rank:labels=values": "PL-Rank",
    "prpo": "PRPO",
    "prpo:labels=values": "PRPO",
    "safe-ipw": "exposure-based risk",
    "safe-ipw:labels=values": "exposure-based risk",
    "upe": "UPE",
    "ubm": "UBM",
    "dbn": "DBN",
    "sdbn": "SDBN",
    "dcm": "DCM",
    "cascade": "cascade model",
    "ccm": "CCM",
    "regression-em:variant=ultra": "Regression EM as in ULTRA",
    "pairwise-debias:variant=released": "Pairwise Debiasing as in ULTRA",
    "pointwise:from=no-bias": "pointwise without position bias",
    "lambdarank:from=no-bias": "LambdaRank without position bias",
}


def rows_of(*entries: str) -> tuple[TableRow, ...]:
    """Return rows that are not in the paper."""
    return tuple(TableRow(NAMES[entry], entry) for entry in entries)


def _printed(sets: Sequence[str], table: str) -> tuple[TableRow, ...]:
    """Return the rows of a table in the paper.

    A line has an entry, then six means (three cutoffs of the first data set, three of the second), and six standard
    deviations in thousandths.
    """
    found = []
    for entry, *numbers in map(str.split, table.strip().splitlines()):
        pairs = [(float(mean), float(f"{d}e-3")) for mean, d in zip(numbers[:6], numbers[6:], strict=True)]
        found.append(TableRow(NAMES[entry], entry, {sets[0]: tuple(pairs[:3]), sets[1]: tuple(pairs[3:])}))
    return tuple(found)


(DEFAULT_ROW,) = rows_of(DEFAULT)
TABLE1 = _printed(
    ("yahoo", "ml-1m"),
    """
    pairwise-em:loss=opt       2.3319 2.7185 2.9735 5.8553 7.6690 9.1400  6.9 7.5 5.9 11 15 16
    pairwise-em:loss=bayes-ipw 2.3046 2.6864 2.9423 5.8415 7.6486 9.1217  8.5 7.5 8.0 14 7.8 9.7
    pairwise-em:loss=ipw       2.2447 2.6239 2.8828 5.8584 7.6635 9.1285  9.9 10 8.9 20 21 25
    sum-synthesize             2.2599 2.6380 2.8913 5.7863 7.5704 9.0289  5.0 8.1 8.7 25 31 35
    pal-synthesize             2.2612 2.6388 2.8914 5.7484 7.5271 8.9682  8.7 6.0 5.6 31 37 40
    sum-click                  2.2776 2.6590 2.9146 5.7283 7.5570 9.0264  12 9.7 8.9 21 23 28
    pal-click                  2.2907 2.6719 2.9274 5.7385 7.5838 9.0586  9.9 6.6 6.7 19 18 19
    pal-click-dwell            2.2707 2.6504 2.9058 5.7569 7.5491 9.0031  7.7 7.3 6.9 27 35 37
    pointwise                  2.2548 2.6353 2.8892 5.7106 7.5392 9.0113  4.4 6.5 5.3 13 16 19
    lambdarank                 2.1619 2.5370 2.7957 5.6800 7.4805 8.9387  12 8.5 8.4 21 29 47
    """,
)
BEYOND1 = rows_of(
    *("pairwise-em:final=pairs", "pairwise-em:scale=0.5", "pairwise-em:scale=1", "pairwise-em:loss=opt-posterior"),
    *("pairwise-em:loss=opt:weights=exact", "pairwise-em:loss=opt:em=joint", "pairwise-em:variant=released"),
    *("pal-click:rows=all", "pal-click:variant=released", "pal-click-dwell:rows=all"),
    *("direct", "direct:values=ordinal", "doubly-robust", "sum-click:sample_weights=logging", "pal-click:reversal=3"),
    *("ipw-lambdaloss:labels=values", "pl-rank:labels=values", "prpo:labels=values", "safe-ipw:labels=values"),
    *("pointwise:from=no-bias", "lambdarank:from=no-bias"),
)
TABLE2 = _printed(
    ("yahoo", "mslr-web30k"),
    """
    lambdarank:from=truth      0.6960 0.7175 0.7644 0.3960 0.4047 0.4286  1.4 1.3 1.0 2.3 1.8 1.8
    pairwise-em:loss=opt       0.6895 0.7115 0.7589 0.3811 0.3899 0.4132  2.5 2.1 1.4 2.6 1.7 1.0
    pairwise-em:loss=bayes-ipw 0.6900 0.7116 0.7589 0.3800 0.3888 0.4125  2.4 1.7 1.5 2.5 1.8 1.1
    pairwise-em:loss=ipw       0.6860 0.7079 0.7557 0.3784 0.3882 0.4119  1.6 1.3 1.2 1.4 1.4 1.5
    dla                        0.6892 0.7106 0.7578 0.3792 0.3870 0.4102  2.1 2.2 1.6 2.7 2.4 2.9
    regression-em              0.6893 0.7108 0.7577 0.3707 0.3766 0.3977  2.1 2.1 1.6 3.9 3.7 3.6
    pairwise-debias            0.6600 0.6847 0.7365 0.3481 0.3623 0.3912  3.5 2.8 2.0 3.3 2.8 2.4
    lambdarank                 0.6541 0.6790 0.7320 0.3433 0.3579 0.3874  2.5 2.2 1.7 2.2 2.1 1.7
    """,
)
BEYOND2 = rows_of(
    *("pairwise-em:loss=opt-posterior", "pairwise-em:variant=released", "pal-click", "ipw-listwise"),
    *("ipw-lambdaloss", "pl-rank", "prpo", "safe-ipw", "direct", "doubly-robust", "sum-click:sample_weights=logging"),
    *("pal-click:reversal=3", "upe", "ubm", "dbn", "sdbn", "cascade", "ccm", "regression-em:variant=ultra"),
    *("pairwise-debias:variant=released", "lambdarank:from=no-bias"),
)

LIVE_LIFT = 0.0208  # relative gain over PAL-Click in the paper's A/B test of seven days
FIGURE_METHODS = (DEFAULT, OPT, "dla", "regression-em", "pal-click", "lambdarank")
ETAS = (0.0, 0.5, 1.0, 1.5, 2.0)
DELTAS = (1.0, 2.0, 3.0, 4.0, 5.0)
