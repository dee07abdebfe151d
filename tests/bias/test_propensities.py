"""Known examination: tables of propensities, and bias.json files."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ultr.bias.propensities import read_bias_theta, read_propensities, suggested, theta_by_id, write_bias_file
from ultr.errors import DataError
from ultr.log.table import SHIFT


def test_propensities_are_read_and_checked(tmp_path):
    path = tmp_path / "propensities.csv"
    path.write_text("position,propensity\n1,1.0\n2,0.5\n")
    assert read_propensities(path) == {"1": 1.0, "2": 0.5}
    pq.write_table(pa.table({"position": [1, 2], "propensity": [1.0, 0.5]}), tmp_path / "propensities.parquet")
    assert read_propensities(tmp_path / "propensities.parquet") == {"1": 1.0, "2": 0.5}
    path.write_text("position,propensity,segment\n1,1,phone\n1,0.5,desk\n")
    assert read_propensities(path) == {"1@phone": 1.0, "1@desk": 0.5}
    for text, match in {
        "position,theta\n1,1\n": "columns position, propensity",
        "position,propensity\n1,0\n": "from 1e-06",
        "position,propensity\n1,1.5\n": "to 1",
        "position,propensity\nfirst,0.5\n": "numbers",
        "position,propensity\n1,0.5\n1,0.6\n": "once",
        "position,propensity\n1,\n": "from 1e-06",
        "position,propensity\n": "no rows",
        "": "empty",
    }.items():
        path.write_text(text)
        with pytest.raises(DataError, match=match):
            read_propensities(path)
    path.write_bytes(b"\x80position,propensity\n1,1\n")
    with pytest.raises(DataError, match="cannot be read as a table"):
        read_propensities(path)


def test_theta_is_read_from_a_bias_file_and_its_segments(tmp_path):
    parts = {"phone": {"positions": [1, 2], "theta": [0.7, None]}, "desk": {"positions": [1], "theta": [0.6]}}
    write_bias_file(tmp_path, {"positions": [1, 2], "theta": [0.7, 0.35], "label": "click", "segments": parts})
    expected = {"1": 0.7, "2": 0.35, "1@phone": 0.7, "1@desk": 0.6}
    assert read_bias_theta(tmp_path) == expected
    assert read_bias_theta(tmp_path / "bias.json") == expected


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"positions": [1]}, "no examination by position"),
        ({"positions": [1], "theta": [0.5, 0.4]}, "no examination by position"),
        ({"positions": [1], "theta": ["high"]}, "no examination by position"),
        ({"positions": [1], "theta": [0.5], "segments": [1]}, "no examination by position"),
        ({"positions": [1], "theta": [1.5]}, "at most 1, got 1.5 at position 1"),
        ({"positions": [1], "theta": [0.0]}, "above 0"),
        ({"positions": [1, 2], "theta": [None, None]}, "could not be estimated.*train without --bias"),
    ],
)
def test_a_bias_file_without_usable_theta_is_rejected(content, match, tmp_path):
    write_bias_file(tmp_path, content)
    with pytest.raises(DataError, match=match):
        read_bias_theta(tmp_path)


def test_a_position_of_a_segment_uses_the_common_theta_if_it_has_none_of_its_own():
    phone, desk = 0, 1 << 20
    theta = theta_by_id({"1": 0.7, "1@desk": 0.6}, (phone + 1, desk + 1), ("phone", "desk"))
    assert theta == {phone + 1: 0.7, desk + 1: 0.6}
    with pytest.raises(DataError, match="2"):
        theta_by_id({"1": 0.7}, (1, 2))


SLOPES = {"phone": 1.2, "desk": 0.8, "search": 0.2, "home": -0.2}
CURVES = {
    f"{k}@{a} + {b}": k ** -(SLOPES[a] + SLOPES[b])
    for a, b in (("phone", "search"), ("phone", "home"), ("desk", "search"))
    for k in (1, 2, 3)
}


GRID = [(r, c) for r in (1, 2, 3) for c in (1, 2, 3)]


def test_an_unknown_segment_has_what_the_values_of_its_columns_suggest():
    assert suggested(CURVES, "3@desk + home") == pytest.approx(3**-0.6, rel=0.01)
    assert suggested(CURVES, "3@tablet + search") == pytest.approx(3**-1.2, rel=0.01)  # the mean of two devices
    assert suggested(CURVES, "9@desk + home") == pytest.approx(3**-0.6, rel=0.01)  # the nearest position
    assert suggested({"2@phone": 0.4, "2@desk": 0.9}, "2@tv") == pytest.approx(0.6, rel=0.01)  # the geometric mean
    assert suggested(CURVES, "3@desk + search") is None
    assert suggested(CURVES, "3") is None
    assert suggested({"3": 0.5}, "3@desk") is None


def test_in_a_grid_an_unknown_segment_has_that_at_the_nearest_slot():
    curves = {f"r{r}c{c}@{name}": r**-slope / c for name, slope in (("phone", 1.0), ("desk", 0.5)) for r, c in GRID}
    assert suggested(curves, "r2c3@tv") == pytest.approx(2**-0.75 / 3, rel=0.01)
    assert suggested(curves, "r2c9@tv") == pytest.approx(2**-0.75 / 3, rel=0.01)
    assert suggested(curves, "r9c1@tv") == pytest.approx(3**-0.75, rel=0.01)
    assert suggested(curves, "r2c3@phone") is None


def test_known_examination_by_id_has_unknown_segments_only_if_it_is_an_estimate():
    ids, segments = (1, (1 << SHIFT) + 3), ("phone + search", "desk + home")
    theta = {**CURVES, "1": 1.0, "3": 0.01}
    assert theta_by_id(theta, ids, segments, nearest=True)[ids[1]] == pytest.approx(3**-0.6, rel=0.01)
    assert theta_by_id(theta, ids, segments)[ids[1]] == 0.01
    with pytest.raises(DataError, match="position 3@desk"):
        theta_by_id(CURVES, ids, segments)
