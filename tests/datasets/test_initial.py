"""The ranker that was in production, and its cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ultr.datasets import initial, initial_ranker, ranking_svm
from ultr.datasets.cache import cache_folder
from ultr.datasets.synthetic import make_synthetic

DATA = make_synthetic(requests=(60, 5, 5))


def same(a, b) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("mean", "scale", "weights"))


def test_the_initial_ranker_is_fitted_once(monkeypatch):
    fitted = initial_ranker(DATA, share=0.5, seed=3)
    assert same(fitted, ranking_svm(DATA.train, share=0.5, seed=3))
    with monkeypatch.context() as patch:
        patch.setattr(initial, "ranking_svm", lambda *_, **__: pytest.fail("it was fitted again"))
        assert same(initial_ranker(DATA, share=0.5, seed=3), fitted)
    for other in ({"share": 0.4, "seed": 3}, {"share": 0.5, "seed": 4}):
        assert not same(initial_ranker(DATA, **other), fitted)
    assert not same(initial_ranker(replace(DATA, fingerprint="other", train=DATA.test), share=0.5, seed=3), fitted)


def test_a_damaged_or_unwritable_cache_is_not_an_error(monkeypatch, tmp_path):
    fitted = initial_ranker(DATA, share=0.5, seed=5)
    for path in cache_folder().glob("initial-*.npz"):
        path.write_bytes(b"damaged")
    assert same(initial_ranker(DATA, share=0.5, seed=5), fitted)
    for path in cache_folder().glob("initial-*.npz"):
        with path.open("wb") as handle:
            np.savez(handle, mean=np.zeros(3), scale=np.zeros(3), weights=np.zeros(3))
    assert same(initial_ranker(DATA, share=0.5, seed=5), fitted)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ULTR_CACHE", str(tmp_path / "file"))
    assert same(initial_ranker(DATA, share=0.5, seed=5), fitted)
