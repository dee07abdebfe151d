"""Compare the click models of ultr with those of clax-models: held-out log-likelihood and seconds per epoch on a CPU.

    python benchmarks/click_models.py [LOG] [--models pbm,ubm,dbn,sdbn,cascade,ccm] [--batch 128] [--seed 0]
        [--clax-python PATH]

Both libraries fit the same models to the same requests, with one attraction (and satisfaction) for each item under its
query: 70% of the requests fit a model, 10% stop its training, and the log-likelihood is that of an impression in the
rest. PATH is the Python of an environment with `pip install clax-models==0.1.1 jax==0.7.2`; without it only ultr runs.
ultr does not depend on clax. Both use batches of the same size (`--batch`), one after the other. An epoch is timed
without validation, and the median counts, so that the first epoch of clax, which compiles, does not.

clax predicts a click of its cascade model as a Π(1 - a) over all items above, even if it is known that none of them was
clicked, so this is not the likelihood of a cascade. Its row therefore has the exact likelihood of the attractions that
it learned.

The default log is `yandex-clicks/impressions.csv.gz` under ULTR_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ultr.bias.click_models import ClickLists, checked_names, fit_and_evaluate, make_click_model, split_requests
from ultr.bias.counts import impressions
from ultr.log.labels import Label
from ultr.log.sampling import read_for_audit

TOLERANCE = 1e-3  # the largest relative amount by which the likelihood of ultr may be below that of clax
DRIVER = Path(__file__).with_name("clax_models.py")


def write_lists(path: Path, lists: ClickLists, parts: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write all lists, padded, with the part of each, in the format of clax: ids and positions count from 1."""
    part = np.zeros(sum(map(len, parts)), np.int64)
    for i, requests in enumerate(parts):
        part[requests.numpy()] = i
    batch = lists.batch(torch.arange(len(part)))
    columns = {"positions": batch.place + 1, "query_doc_ids": batch.inputs + 1, "clicks": batch.clicked}
    arrays: dict[str, Any] = {
        name: torch.where(batch.where, values, 0).int().numpy() for name, values in columns.items()
    }
    np.savez(path, mask=batch.where.numpy(), part=part, **arrays)


def of_clax(python: Path, path: Path, model: str, options: argparse.Namespace) -> dict[str, Any]:
    arguments = [path, model, "--batch", options.batch, "--seed", options.seed]
    done = subprocess.run([python, DRIVER, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("ULTR_DATA", ".")) / "yandex-clicks" / "impressions.csv.gz"
    parser.add_argument("log", nargs="?", type=Path, default=default, help="with request, query, item, position, click")
    parser.add_argument("--models", default="pbm,ubm,dbn,sdbn,cascade,ccm")
    parser.add_argument("--batch", type=int, default=128, help="lists per step, for both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of ultr; clax uses those that it likes")
    parser.add_argument("--clax-python", type=Path, help="the Python of an environment with clax-models")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    log, _ = read_for_audit(options.log)
    seen = impressions(log, np.asarray(Label("click")(log.actions)) > 0, seed=options.seed)
    lists, parts = ClickLists(seen, None), split_requests(seen, None, seed=options.seed)
    print(json.dumps({"fitted": len(parts[0]), "stopping": len(parts[1]), "held_out": len(parts[2])}), flush=True)
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lists.npz"
        write_lists(path, lists, parts)
        for name in checked_names(options.models):
            model = make_click_model(name, len(seen.positions))
            ours, _ = fit_and_evaluate(model, lists, log, parts, name=name, seed=options.seed, batch=options.batch)
            keys = ("log_likelihood", "seconds_per_epoch", "epochs")
            row: dict[str, Any] = {"model": name, "ultr": {key: getattr(ours, key) for key in keys}}
            if options.clax_python is not None:
                clax = of_clax(options.clax_python, path, name, options)
                above = (ours.log_likelihood - clax["log_likelihood"]) / abs(clax["log_likelihood"])
                faster = clax["seconds_per_epoch"] / ours.seconds_per_epoch
                row |= {"clax": clax, "likelihood above clax": above, "times as fast": faster}
                passed &= above >= -TOLERANCE and faster >= 1
            print(json.dumps(row, default=float), flush=True)
    if options.clax_python is not None:
        print(json.dumps({"passed": passed}))
        sys.exit(not passed)


if __name__ == "__main__":
    main()
