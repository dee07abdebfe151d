from __future__ import annotations

from ultr.errors import ColumnError, MissingExtraError, OptionError, UltrError, nearest


def test_a_message_says_where_what_got_and_hint():
    error = ColumnError("no column 'pos'", where="log.csv", got="2 columns", hint="did you mean 'position'?")
    assert str(error) == "log.csv: no column 'pos', got 2 columns; did you mean 'position'?"


def test_a_wrong_call_exits_2_and_bad_data_exits_1():
    assert OptionError("x").exit_code == 2
    assert ColumnError("x").exit_code == UltrError("x").exit_code == 1


def test_a_missing_extra_names_its_install_command():
    assert "pip install 'ultr[movielens]'" in str(MissingExtraError("MovieLens", package="implicit", extra="movielens"))


def test_the_nearest_name_is_suggested_and_otherwise_the_choices():
    assert nearest("Positon", ["request", "position"]) == "did you mean 'position'?"
    assert nearest("zzz", ["request", "position"]) == "use one of position, request"
    assert nearest("zzz", []) == "there are no names to choose from"
    assert nearest("zzz", [f"column{i:02}" for i in range(30)]).endswith("and 10 more")
