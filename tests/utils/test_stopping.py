"""Early stopping."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ultr.utils.optimisation import EarlyStopping


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), patience=st.integers(0, 5))
def test_the_best_evaluation_is_the_first_of_the_largest(values, patience):
    stopping = EarlyStopping()
    improved = [stopping.update(value, step) for step, value in enumerate(values)]
    best = max(values)
    assert (stopping.best, stopping.best_step) == (best, values.index(best))
    assert stopping.waited == len(values) - 1 - values.index(best)
    assert improved == [all(value > before for before in values[:i]) for i, value in enumerate(values)]
    assert stopping.is_over(patience) == (patience > 0 and stopping.waited >= patience)
    assert EarlyStopping.from_json(json.loads(json.dumps(stopping.to_json()))) == stopping


def test_small_gains_are_the_best_so_far_but_do_not_prolong_the_training():
    stopping = EarlyStopping(least=0.01)
    improved = [stopping.update(value, step) for step, value in enumerate([-10.0, -9.0, -8.95, -8.92, -8.94])]
    assert improved == [True, True, True, True, False]
    assert (stopping.best, stopping.best_step, stopping.waited) == (-8.92, 3, 3)
    stopping.update(-8.9, 5)  # 0.1 above the last gain, which is more than 1% of it
    assert stopping.waited == 0


def test_a_run_without_evaluations_survives_json():
    assert EarlyStopping.from_json(json.loads(json.dumps(EarlyStopping().to_json()))) == EarlyStopping()
