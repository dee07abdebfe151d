from __future__ import annotations

import pytest
import torch

from ultr.utils.distributed import SMALL_LOG, threads_for


@pytest.mark.parametrize(("rows", "expected"), [(10, 1), (SMALL_LOG, 2)])
def test_few_rows_have_one_thread(rows, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(rows):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
