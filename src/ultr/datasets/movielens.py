"""MovieLens-1M as a ranking data set: each user is a request, the movies they rated are its items, ratings its grades.

Per user and by time, the first half of the ratings is for training, the next quarter for validation, the last for test.
Matrix factorisation with the BPR loss on the training half gives each user and each movie a vector of 60; the features
of a rating are the user's vector, the movie's vector and their product, 180 in all. Ratings 1-5 become grades 0-4.
"""

from __future__ import annotations

import contextlib
import hashlib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from ultr.datasets.base import Dataset
from ultr.datasets.cache import cache_folder, cached, kept_arrays
from ultr.errors import DataError, MissingExtraError, OutputError
from ultr.files import atomic_path
from ultr.log import Log

# ratings.dat as GroupLens ships it.
RATINGS_SHA256 = "506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f"
MAX_BYTES = 100 << 20  # it has 25 million
BAD_ZIP = (zipfile.BadZipFile, zlib.error)
FACTORS = 60
WHERE_TO_GET = "get ml-1m.zip from GroupLens (grouplens.org/datasets/movielens/1m) and put it there"


def read_movielens(path: str | Path, *, seed: int = 0) -> Dataset:
    """MovieLens-1M from `ml-1m.zip` or the folder it unpacks to; computed once, then read from a cache."""
    raw = _ratings_file(Path(path))
    digest = hashlib.sha256(raw).hexdigest()
    if digest != RATINGS_SHA256:
        got = f"SHA-256 {digest[:12]}..."
        raise DataError("ratings.dat is not that of MovieLens-1M", where=path, got=got, mend=WHERE_TO_GET)
    return cached("ml-1m", f"{digest[:16]}-{FACTORS}-{seed}", lambda: _build(raw, digest, seed))


def _ratings_file(path: Path) -> bytes:
    try:
        if path.is_dir():
            inner = path / "ml-1m.zip"
            if inner.is_file():
                return _ratings_file(inner)
            file = next(f for f in (path / "ratings.dat", path / "ml-1m" / "ratings.dat") if f.is_file())
            return _bounded(file.stat().st_size, file.read_bytes, file)
        with zipfile.ZipFile(path) as archive:  # one member is read, into memory; nothing is unpacked
            member = archive.getinfo("ml-1m/ratings.dat")
            return _bounded(member.file_size, lambda: archive.read(member), path)
    except (StopIteration, OSError, KeyError, ValueError, EOFError, RuntimeError, *BAD_ZIP) as error:
        raise DataError("MovieLens-1M is not here", where=path, mend=WHERE_TO_GET) from error


def _bounded(size: int, read: Callable[[], bytes], where: Path) -> bytes:
    if size > MAX_BYTES:
        what, mend = "ratings.dat is too large to be that of MovieLens-1M", "download ml-1m.zip again"
        raise DataError(what, where=where, got=f"{size:,} bytes", mend=mend)
    return read()


def parse_ratings(raw: bytes) -> np.ndarray:
    """`user::movie::rating::time` lines as an integer array [ratings, 4]."""
    numbers = np.array(raw.replace(b"::", b" ").split(), dtype=np.int64)
    return numbers.reshape(-1, 4)


def time_split(ratings: np.ndarray) -> np.ndarray:
    """0, 1 or 2 for each rating: its user's first half by time, next quarter, last quarter. Ties go by movie."""
    order = np.lexsort((ratings[:, 1], ratings[:, 3], ratings[:, 0]))
    _, starts, counts = np.unique(ratings[order, 0], return_index=True, return_counts=True)
    place = (np.arange(len(ratings)) - np.repeat(starts, counts)) / np.repeat(counts, counts)
    split = np.empty(len(ratings), np.int64)
    split[order] = np.where(place < 0.5, 0, np.where(place < 0.75, 1, 2))
    return split


def bpr_vectors(
    users: np.ndarray, movies: np.ndarray, shape: tuple[int, int], *, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """User and movie vectors from the training half: what was rated is positive. One thread: a seed repeats."""
    try:
        from implicit.bpr import BayesianPersonalizedRanking
    except ImportError as error:
        raise MissingExtraError("MovieLens", package="implicit", extra="movielens") from error
    from scipy.sparse import csr_matrix

    rated = csr_matrix((np.ones(len(users), np.float32), (users, movies)), shape=shape)
    model = BayesianPersonalizedRanking(factors=FACTORS, random_state=seed, num_threads=1, use_gpu=False)
    model.fit(rated, show_progress=False)
    return model.user_factors[:, :FACTORS], model.item_factors[:, :FACTORS]  # the last column is a bias


def kept_vectors(
    name: str, shape: tuple[int, int], compute: Callable[[], tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """The vectors take half a minute and a library; they are small, and kept by themselves to be carried along."""
    path = cache_folder() / f"{name}.npz"
    kept = kept_arrays(path, {"users": (shape[0], FACTORS), "movies": (shape[1], FACTORS)})
    if kept is not None:
        return kept[0], kept[1]
    users, movies = compute()
    with contextlib.suppress(OutputError), atomic_path(path, overwrite=True) as temporary:
        np.savez(temporary, users=users, movies=movies)
    return users, movies


def _build(raw: bytes, digest: str, seed: int) -> Dataset:
    ratings = parse_ratings(raw)
    split = time_split(ratings)
    users, movies = ratings[:, 0], ratings[:, 1]
    train = split == 0
    shape = (int(users.max()) + 1, int(movies.max()) + 1)
    user_vectors, movie_vectors = kept_vectors(
        f"ml-1m-bpr{FACTORS}-seed{seed}-{digest[:16]}",
        shape,
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
