"""What tests with Spark share; the fixture `spark` is in conftest.py."""

from __future__ import annotations

import pytest

ON_SPARK = [
    pytest.mark.long,
    pytest.mark.usefixtures("spark"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
