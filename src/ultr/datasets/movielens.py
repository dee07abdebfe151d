"""MovieLens-1M as a ranking data set: each user is a request, the movies they rated are its items, ratings its grades.

Per user and by time, half of the ratings are for training, the next quarter for validation, the last quarter for test.
Matrix factorisation with the BPR (Bayesian personalised ranking) loss on the training half gives each user and each
movie a vector of 60 numbers. The features of a rating are the user's vector, the movie's vector and their elementwise
product, 180 in all. Ratings 1-5 become grades 0-4.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from ultr.datasets.base import Dataset, cache_folder, cached, fitted_arrays
from ultr.errors import DataError, MissingExtraError
from ultr.log import Log

# The SHA-256 of ratings.dat in the ml-1m.zip of GroupLens.
RATINGS_SHA256 = "506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f"
MAX_BYTES = 100 << 20  # limit of ratings.dat, which has 25 million bytes
BAD_ZIP = (zipfile.BadZipFile, zlib.error)
FACTORS = 60  # numbers in the vector of a user or a movie
WHERE_TO_GET = "download ml-1m.zip from GroupLens (grouplens.org/datasets/movielens/1m) and put it at this path"


def read_movielens(path: str | Path, *, seed: int = 0) -> Dataset:
    """Read MovieLens-1M from `ml-1m.zip` or its unpacked folder; later calls read it from a cache."""
    raw = _ratings_file(Path(path))
    digest = hashlib.sha256(raw).hexdigest()
    if digest != RATINGS_SHA256:
        got = f"SHA-256 {digest[:12]}..."
        raise DataError("ratings.dat is not the file of MovieLens-1M", where=path, got=got, hint=WHERE_TO_GET)
    return cached("ml-1m", f"{digest[:16]}-{FACTORS}-{seed}", lambda: _build(raw, digest, seed))


def _ratings_file(path: Path) -> bytes:
    try:
        if path.is_dir():
            inner = path / "ml-1m.zip"
            if inner.is_file():
                return _ratings_file(inner)
            file = next(f for f in (path / "ratings.dat", path / "ml-1m" / "ratings.dat") if f.is_file())
            return _bounded(file.stat().st_size, file.read_bytes, file)
        with zipfile.ZipFile(path) as archive:  # one file is read into memory, and nothing is written to disk
            member = archive.getinfo("ml-1m/ratings.dat")
            return _bounded(member.file_size, lambda: archive.read(member), path)
    except (StopIteration, OSError, KeyError, ValueError, EOFError, RuntimeError, *BAD_ZIP) as error:
        raise DataError("MovieLens-1M was not found", where=path, hint=WHERE_TO_GET) from error


def _bounded(size: int, read: Callable[[], bytes], where: Path) -> bytes:
    if size > MAX_BYTES:
        what, hint = "ratings.dat is too large for the file of MovieLens-1M", "download ml-1m.zip again"
        raise DataError(what, where=where, got=f"{size:,} bytes", hint=hint)
    return read()


def parse_ratings(raw: bytes) -> np.ndarray:
    """Return lines of `user::movie::rating::time` as an integer array [ratings, 4]."""
    numbers = np.array(raw.replace(b"::", b" ").split(), dtype=np.int64)
    return numbers.reshape(-1, 4)


def time_split(ratings: np.ndarray) -> np.ndarray:
    """Return the split of each rating, by its place in time among its user's ratings.

    The first half is 0 (training), the next quarter 1 (validation), the last 2 (test). Movie ids break ties in time.
    """
    order = np.lexsort((ratings[:, 1], ratings[:, 3], ratings[:, 0]))
    _, starts, counts = np.unique(ratings[order, 0], return_index=True, return_counts=True)
    place = (np.arange(len(ratings)) - np.repeat(starts, counts)) / np.repeat(counts, counts)
    split = np.empty(len(ratings), np.int64)
    split[order] = np.where(place < 0.5, 0, np.where(place < 0.75, 1, 2))
    return split


def bpr_vectors(
    users: np.ndarray, movies: np.ndarray, shape: tuple[int, int], *, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return user and movie vectors, [ids, FACTORS] each, fitted with the BPR loss in one thread to be repeatable."""
    try:
        from implicit.bpr import BayesianPersonalizedRanking
    except ImportError as error:
        raise MissingExtraError("MovieLens", package="implicit", extra="movielens") from error
    from scipy.sparse import csr_matrix

    rated = csr_matrix((np.ones(len(users), np.float32), (users, movies)), shape=shape)
    model = BayesianPersonalizedRanking(factors=FACTORS, random_state=seed, num_threads=1, use_gpu=False)
    model.fit(rated, show_progress=False)
    return model.user_factors[:, :FACTORS], model.item_factors[:, :FACTORS]  # the last column is a bias


def _build(raw: bytes, digest: str, seed: int) -> Dataset:
    ratings = parse_ratings(raw)
    split = time_split(ratings)
    users, movies = ratings[:, 0], ratings[:, 1]
    train = split == 0
    shape = (int(users.max()) + 1, int(movies.max()) + 1)
    # The vectors have their own cache file, because fitting them takes half a minute and needs an optional package.
    user_vectors, movie_vectors = fitted_arrays(
        cache_folder() / f"ml-1m-bpr{FACTORS}-seed{seed}-{digest[:16]}.npz",
        {"users": (shape[0], FACTORS), "movies": (shape[1], FACTORS)},
        lambda: bpr_vectors(users[train], movies[train], shape, seed=seed),
    )

    def log(number: int) -> Log:
        rows = np.flatnonzero(split == number)
        rows = rows[np.lexsort((movies[rows], users[rows]))]
        ids, starts = np.unique(users[rows], return_index=True)
        of_user, of_movie = user_vectors[users[rows]], movie_vectors[movies[rows]]
        return Log(
            features=np.concatenate([of_user, of_movie, of_user * of_movie], axis=1, dtype=np.float32),
            offsets=np.append(starts, len(rows)).astype(np.int64),
            request_ids=pa.array(ids),
            feature_names=tuple(f"{part}_{i}" for part in ("user", "movie", "product") for i in range(FACTORS)),
            relevance=(ratings[rows, 2] - 1).astype(np.float32),
            item_ids=pa.array(movies[rows]),
        )

    return Dataset("ml-1m", log(0), log(1), log(2), max_grade=4, fingerprint=f"{digest[:16]}-bpr{FACTORS}-seed{seed}")
