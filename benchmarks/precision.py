"""Compare the quality of rankers that are trained in single precision with tf32 and bf16, method by method.

    python benchmarks/precision.py --device cuda [--data ml-1m] [--seeds 10] [--rate 0.02] [--only NAME ...]

Every method is trained with the same seeds, learning rate and steps in each precision, on feedback of simulated users.
The table has the mean reward@10 on test requests, its standard deviation over seeds, and for tf32 and bf16 the relative
change with the p-value of a paired test over seeds. `benchmarks/training.py --precision` measures the speed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ultr.methods import METHODS
from ultr.training.comparing.plan import compare
from ultr.training.comparing.results import Comparison
from ultr.training.config import Precision, make_config

PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")
METRIC = "reward@10"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--data", default="synthetic", help="a data set with true labels")
    parser.add_argument("--data-dir", help="the folder of data sets")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--rate", type=float, default=0.02, help="the learning rate of all methods")
    parser.add_argument("--only", nargs="*", default=(), help="names of methods")
    options = parser.parse_args()
    methods = list(options.only) or [*METHODS, "pairwise-em:loss=opt"]
    found: dict[str, Comparison] = {}
    with TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            base = make_config(options.data, data_dir=options.data_dir, users="pbm", sessions=0, select=METRIC)
            base = base.with_options(dropout=0.3, steps=options.steps, device=options.device, precision=precision)
            begun, out, rates = time.perf_counter(), Path(folder) / precision, (options.rate,)
            found[precision] = compare(base, methods, out, seeds=options.seeds, rates=rates, metrics=[METRIC])
            print(f"{precision}: {len(methods)} methods in {time.perf_counter() - begun:.0f} s", flush=True)
    print(f"{'':<24}{METRIC} (float32)" + "".join(f"{name:>20}" for name in PRECISIONS[1:]))
    for rows in zip(*(found[precision].rows for precision in PRECISIONS), strict=True):
        values = rows[0].results[METRIC]
        text = f"{rows[0].entry:<24}{np.mean(values):9.4f} ± {np.std(values, ddof=1):.4f}  "
        for row in rows[1:]:
            test = row.tested(rows[0])[METRIC]
            text += f"{100 * test.difference / np.mean(values):+9.2f}% (p {test.p:.2f})"
        print(text)


if __name__ == "__main__":
    main()
