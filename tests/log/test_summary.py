from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from ultr.errors import DataError
from ultr.log import read_log
from ultr.log.table import by_position


def test_feedback_by_position_counts_requests_with_their_weights():
    log = read_log(
        pa.table(
            {
                "request": [1, 1, 2, 2],
                "position": [1, 7, 1, 7],
                "click": [1, 0, 0, 1],
                "dwell": [9.0, 0, 0, 4.0],
                "weight": [1, 1, 3, 3],
            }
        )
    )
    table = by_position(log)
    assert table.positions.tolist() == [1, 7]
    assert table.impressions.tolist() == [2, 2]
    np.testing.assert_allclose(table.rates["click"], [1 / 4, 3 / 4])
    np.testing.assert_allclose(table.means["dwell"], [9 / 4, 3 * 4 / 4])
    with pytest.raises(DataError, match="a summary needs positions"):
        by_position(replace(log, positions=None))
