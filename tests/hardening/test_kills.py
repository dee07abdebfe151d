"""Killed at every touch of the disk or at random moments, or with a disk that is full from one on: what was whole stays
so, and the same command again gives what it would have given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork to start work quickly")

LINEAR = ("network", "trees", "stream", "overwrite", "compare")
WHOLE = ("prepare", "score", "write_log", "export", "report", "bias", "cache")
KILLS = {"long network": 40, "long trees": 30, "long stream": 30, "long prepare": 50, "long score": 50}  # 200


def disturb(plan: dict[str, dict[str, int]], folder: Path) -> list[dict[str, int]]:
    """What came of each case, counted; a property that does not hold ends it."""
    command = [sys.executable, "-W", "ignore", "-m", "hardening.faults", json.dumps(plan), str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [json.loads(line) for line in done.stdout.splitlines()]
    if "ULTR_COUNTS" in os.environ:
        with Path(os.environ["ULTR_COUNTS"]).open("a") as file:
            file.writelines(json.dumps({"test": "faults", **line}) + "\n" for line in counts)
    return counts


def test_work_that_is_disturbed_now_and_then_comes_to_the_same(tmp_path):
    plan = {
        "kill": {"network": 2, "prepare": 1, "score": 2, "cache": 2},
        "full": {"network": 1, "score": 1},
        "random": {"network": 1, "score": 2},
    }
    counts = disturb(plan, tmp_path)
    assert [line["case"] for line in counts] == [name for cases in plan.values() for name in cases]
    assert sum(line.get("killed", 0) for line in counts) == 2 + 1 + 2 + 2 + 1 + 2
    assert sum(line.get("refused", 0) for line in counts) == 1 + 1


@pytest.mark.long
@pytest.mark.parametrize("case", [*LINEAR, *WHOLE])
def test_killed_at_every_touch_of_the_disk(case, tmp_path):
    (counts,) = disturb({"kill": {case: 0}}, tmp_path)
    assert counts["killed"] >= 5


@pytest.mark.long
@pytest.mark.parametrize("case", [*LINEAR, *WHOLE])
def test_the_disk_is_full_from_every_write_on(case, tmp_path):
    (counts,) = disturb({"full": {case: 0}}, tmp_path)
    assert counts.get("refused", 0) >= 3 or case == "cache"  # without which it does


@pytest.mark.long
@pytest.mark.parametrize("case", KILLS)
def test_killed_at_random_moments(case, tmp_path):
    (counts,) = disturb({"random": {case: KILLS[case]}}, tmp_path)
    assert counts["killed"] == KILLS[case]
