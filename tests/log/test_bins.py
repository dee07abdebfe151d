"""Bins of numbers as segments."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultr.log.bins import BINS, MOST_VALUES, binned, equal_edges, names_of, split_edges, with_edges

WHOLE = st.integers(-(10**9), 10**9)
NUMBERS = st.floats(-1e6, 1e6).map(lambda value: float(f"{value:.3g}"))
EDGES = st.one_of(*(st.sets(kind, min_size=1, max_size=5) for kind in (WHOLE, NUMBERS))).map(lambda s: tuple(sorted(s)))


@given(EDGES)
def test_a_name_with_edges_is_read_as_it_was_written(edges):
    assert split_edges(with_edges("words", edges)) == ("words", edges)
    assert len(set(names_of(edges))) == len(edges) + 1


@given(EDGES, st.lists(st.one_of(WHOLE.map(float), NUMBERS, st.none()), min_size=1))
def test_each_number_is_in_the_one_bin_that_has_it(edges, values):
    names = names_of(edges)
    for value, name in zip(values, binned(pa.array(values, pa.float64()), edges).to_pylist(), strict=True):
        if value is None:
            assert name is None
        else:
            assert name == names[sum(value >= edge for edge in edges)]


@given(st.lists(st.one_of(WHOLE, st.integers(0, 20)), min_size=1, max_size=200))
def test_many_numbers_have_a_few_bins_with_some_of_them_each(values):
    edges = equal_edges(pa.array(values))
    if len(set(values)) <= MOST_VALUES:
        assert edges == ()
    elif edges:
        assert all(isinstance(edge, int) for edge in edges)
        assert len(edges) < BINS
        assert len(set(binned(pa.array(values), edges).to_pylist())) == len(edges) + 1


def test_numbers_that_are_equally_often_have_equal_bins():
    assert equal_edges(pa.array([*range(1, 13)] * 5)) == (5, 9)
    assert names_of((5, 9)) == ["below 5", "5-8", "9+"]
    assert names_of((2, 3)) == ["below 2", "2", "3+"]
    assert names_of((-5, 0)) == ["below -5", "-5 to -1", "0+"]


def test_prices_have_bins_with_short_names():
    prices = np.random.default_rng(0).uniform(0, 3, 3000)
    edges = equal_edges(pa.array([*prices, None, np.nan]))
    assert np.allclose(edges, (1, 2), atol=0.1)
    assert names_of((1.0, 2.25)) == ["below 1.0", "1.0 to 2.25", "2.25+"]


@pytest.mark.parametrize("values", [["a"] * 9 + [*"bcdefghijk"], [True, False], [None] * 3])
def test_other_columns_have_no_bins(values):
    assert equal_edges(pa.array(values)) == ()


def test_a_column_with_such_a_name_has_no_edges():
    assert split_edges("time:12", ["time:12"]) == ("time:12", ())
    assert split_edges("a:b") == ("a:b", ())
