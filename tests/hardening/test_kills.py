"""Kill work at every access to the disk or at random moments, or fill its disk: complete outputs stay complete.

The same command again then gives the same files as without the fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to start work quickly")

CASES = ("both", "stream", "overwrite", "compare", "prepare", "score", "write_log", "export", "report")
CASES += ("bias", "cache")
KILLS = {"long network": 40, "long trees": 30, "long stream": 30, "long prepare": 50, "long score": 50}  # 200 in total


def disturb(plan: dict[str, dict[str, int]], folder: Path) -> list[dict[str, int]]:
    """Run a plan of faults; return the number of outcomes of each case."""
    command = [sys.executable, "-W", "ignore", "-m", "hardening.faults", json.dumps(plan), str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [json.loads(line) for line in done.stdout.splitlines()]
    if "ULTR_COUNTS" in os.environ:
        with Path(os.environ["ULTR_COUNTS"]).open("a") as file:
            file.writelines(json.dumps({"test": "faults", **line}) + "\n" for line in counts)
    return counts


def test_work_with_a_few_faults_gives_the_same_files(tmp_path):
    plan = {
        "kill": {"network": 2, "prepare": 1, "score": 2, "cache": 2},
        "full": {"network": 1, "score": 1},
        "random": {"network": 1, "score": 2},
    }
    counts = disturb(plan, tmp_path)
    assert [line["case"] for line in counts] == [name for cases in plan.values() for name in cases]
    assert sum(line.get("killed", 0) for line in counts) == 2 + 1 + 2 + 2 + 1 + 2
    assert sum(line.get("error", 0) for line in counts) == 1 + 1


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_killed_at_every_touch_of_the_disk(case, tmp_path):
    (counts,) = disturb({"kill": {case: 0}}, tmp_path)
    assert counts["killed"] >= 5


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_disk_is_full_from_every_write_on(case, tmp_path):
    (counts,) = disturb({"full": {case: 0}}, tmp_path)
    assert counts.get("error", 0) >= 3 or case == "cache"  # which is optional


@pytest.mark.long
@pytest.mark.parametrize("case", KILLS)
def test_killed_at_random_moments(case, tmp_path):
    (counts,) = disturb({"random": {case: KILLS[case]}}, tmp_path)
    assert counts["killed"] == KILLS[case]
