from __future__ import annotations

import builtins
import io
import zipfile

import numpy as np
import pytest

from ultr.datasets import SPLITS, ranking_svm
from ultr.datasets.base import fitted_arrays
from ultr.datasets.movielens import bpr_vectors, parse_ratings, read_movielens, time_split
from ultr.datasets.users import User
from ultr.errors import DataError, MissingExtraError
from ultr.evaluation.scores import evaluate_scores


def test_ratings_are_parsed_and_split_by_each_users_own_time():
    raw = b"".join(b"%d::%d::%d::%d\n" % (u, m, 1 + m % 5, 100 - m) for u in (1, 2) for m in range(1, 9))
    ratings = parse_ratings(raw)
    assert ratings.shape == (16, 4)
    assert ratings[0].tolist() == [1, 1, 2, 99]
    # Time runs against the movie number here: movies 8 7 6 5 come first.
    assert time_split(ratings).tolist() == [2, 2, 1, 1, 0, 0, 0, 0] * 2


def test_ratings_given_at_the_same_second_are_split_by_movie():
    ratings = np.array([[1, movie, 3, 50] for movie in (4, 2, 3, 1)])
    assert time_split(ratings).tolist() == [2, 0, 1, 0]


def test_other_files_than_movielens_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"not found.*ml-1m\.zip"):
        read_movielens(tmp_path)
    (tmp_path / "ml-1m.zip").write_bytes(b"not a zip")
    with pytest.raises(DataError, match="not found"):
        read_movielens(tmp_path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("ml-1m/ratings.dat", "1::1::5::1\n")
    (tmp_path / "ml-1m.zip").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="not the file of MovieLens-1M, got SHA-256"):
        read_movielens(tmp_path)
    (tmp_path / "ml-1m.zip").unlink()
    (tmp_path / "ratings.dat").write_text("1::1::5::1\n")
    with pytest.raises(DataError, match="SHA-256"):
        read_movielens(tmp_path)


def test_vectors_repeat_with_their_seed_and_hold_no_bias_column():
    pytest.importorskip("implicit")
    rng = np.random.default_rng(0)
    users, movies = rng.integers(0, 30, 400), rng.integers(0, 20, 400)
    first, again, other = (bpr_vectors(users, movies, (30, 20), seed=s) for s in (1, 1, 2))
    for vectors, rows in zip(first, (30, 20), strict=True):
        assert vectors.shape == (rows, 60)
        assert not (vectors == vectors[0]).all(axis=0).any()  # the bias of users is one for all of them
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[0], other[0])


def test_vectors_are_kept_and_made_again_when_damaged(own_cache):
    made = []

    def compute():
        made.append(1)
        return np.ones((2, 60)), np.zeros((4, 60))

    path, shapes = own_cache / "toy.npz", {"users": (2, 60), "movies": (4, 60)}
    for _ in range(2):
        users, movies = fitted_arrays(path, shapes, compute)
        assert (users.shape, movies.shape) == ((2, 60), (4, 60))
    assert len(made) == 1
    path.write_bytes(b"damaged")
    fitted_arrays(path, shapes, compute)
    assert len(made) == 2


def test_a_missing_library_names_its_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("implicit"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"ultr\[movielens\]"):
        bpr_vectors(np.array([0]), np.array([0]), (1, 1), seed=0)


@pytest.mark.long
def test_movielens_becomes_rankable_lists(real_data):
    pytest.importorskip("implicit")
    data = read_movielens(real_data("ml-1m"))
    assert sum(data[split].rows for split in SPLITS) == 1_000_209
    assert [len(data[split]) for split in SPLITS] == [6040] * 3
    assert data.train.features.shape[1] == 180
    assert set(np.unique(data.test.relevance)) == {0, 1, 2, 3, 4}
    user, movie, product = np.split(data.test.features[:1000], 3, axis=1)
    np.testing.assert_allclose(product, user * movie, rtol=1e-6)
    initial = evaluate_scores(data.test, ranking_svm(data.train)(data.test.features), ["reward@10"], user=User())
    chance = evaluate_scores(data.test, np.zeros(data.test.rows), ["reward@10"], user=User())
    assert initial["reward@10"].mean() > chance["reward@10"].mean() + 1
    again = read_movielens(real_data("ml-1m"))
    assert (again.train.features == data.train.features).all()
