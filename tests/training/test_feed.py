"""The lists of a step depend only on the seed and its number, not on the source or the number of processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ultr.training.feed
import ultr.training.stream
import ultr.utils.distributed
from conftest import make_shown_log
from lists_folder import write_lists
from ultr.datasets.users import User, simulate_log
from ultr.errors import DataError, OptionError
from ultr.lists import ListBatches, Lists, Part
from ultr.log import Log
from ultr.log.labels import Label
from ultr.log.shards import RowGroup, Shards
from ultr.methods import MethodInputs, make_method
from ultr.rankers import Dropout, FeatureEncoder, Masks, make_ranker
from ultr.training.feed import Feed, step_seed
from ultr.training.loop import seeded_step
from ultr.training.stream import Stream, divide

REQUESTS = 250
HELD_OUT = 50  # the other 200 are for training


def numbered_log(requests: int = REQUESTS) -> Log:
    """A log whose first feature is the number of the request."""
    log, _ = simulate_log(make_shown_log(requests=requests), User())
    features = log.features.copy()
    features[:, 0] = log.request_of_row
    return replace(log, features=features, weights=np.linspace(0.5, 2, requests, dtype=np.float32))


@pytest.fixture(scope="module")
def log() -> Log:
    return numbered_log()


@pytest.fixture(scope="module")
def folder(log, tmp_path_factory) -> Path:
    return write_lists(log, tmp_path_factory.mktemp("shards") / "lists", shards=4, group=5)  # 40 pieces, 5 a lane


@pytest.fixture
def shards(folder) -> Shards:
    return Shards(folder)


def numbers(lists: Lists) -> list[int]:
    """Return the numbers of the requests."""
    return lists.features[:, 0, 0].long().tolist()


def by_part(lists: Lists) -> dict[int, list[int]]:
    bounds = np.cumsum([0, *(part.requests for part in lists.parts)])
    assert bounds[-1] == len(lists)
    found = numbers(lists)
    return {part.number: found[a:b] for part, (a, b) in zip(lists.parts, pairwise(bounds), strict=True)}


def assert_same_lists(one: Lists, other: Lists) -> None:
    for name in ("features", "where", "weights", "positions", "relevance"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.actions.keys() == other.actions.keys()
    for name, values in one.actions.items():
        assert torch.equal(values, other.actions[name]), name
    assert one.parts == other.parts


def small_stream(shards: Shards, *, requests: float = 10, **options) -> Stream:
    """A stream with windows of up to `requests` requests."""
    row_bytes = shards.row_bytes * shards.rows / len(shards)
    return Stream(shards, **{"batch": 16, "seed": 0, "buffer_bytes": int(8 * requests * row_bytes) + 8, **options})


@contextmanager
def as_process(rank: int, size: int) -> Iterator[None]:
    """Make the block run as one of several processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ultr.utils.distributed, "rank", lambda: rank)
        patch.setattr(ultr.utils.distributed, "size", lambda: size)
        patch.setattr(ultr.training.feed, "size", lambda: size)
        patch.setattr(ultr.training.stream, "size", lambda: size)
        yield


def of_processes(size: int, make) -> list:
    made = []
    for rank in range(size):
        with as_process(rank, size):
            made.append(make())
    return made


# Batches follow from the seed and the number of the step.


@settings(max_examples=10)
@given(
    requests=st.integers(1, 30),
    batch=st.integers(1, 40),
    seed=st.integers(0, 5),
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=8),
    drawn=st.booleans(),
)
def test_a_feed_gives_a_step_the_same_lists_in_any_order(requests, batch, seed, steps, drawn):
    lists = ListBatches(numbered_log(requests))
    make = lambda: Feed(lists, batch=batch, seed=seed, user=User() if drawn else None)  # noqa: E731
    in_order, jumping = make(), make()
    sequence = [in_order(step) for step in range(13)]
    for step in steps:
        assert_same_lists(jumping(step), sequence[step])


@settings(max_examples=10)
@given(requests=st.integers(1, 30), batch=st.integers(1, 40), seed=st.integers(0, 5))
def test_a_feed_takes_each_request_once_before_any_again(requests, batch, seed):
    feed = Feed(ListBatches(numbered_log(requests)), batch=batch, seed=seed)
    found = [number for step in range(20) for number in numbers(feed(step))]
    passes = [found[first : first + requests] for first in range(0, len(found) - requests + 1, requests)]
    assert all(sorted(one) == list(range(requests)) for one in passes)
    if requests > 10:  # among 11! orders no two are equal
        assert len(set(map(tuple, passes))) == len(passes)


def test_a_feed_of_some_requests_takes_no_others(log):
    chosen = np.arange(3, 60, 4)
    feed = Feed(ListBatches(log), batch=10, seed=0, requests=chosen)
    assert {number for step in range(6) for number in numbers(feed(step))} == set(chosen.tolist())


def test_seeds_differ_by_step_and_purpose_and_repeat():
    found = {step_seed(*key): key for key in np.ndindex(4, 20, 5)}
    assert len(found) == 4 * 20 * 5
    assert step_seed(1, 2, 3) == step_seed(1, 2, 3)
    assert all(0 <= seed < 2**63 for seed in found)


@pytest.mark.parametrize("requests", [1000, 10, 1], ids=["one window", "a few windows", "a window a piece"])
def test_a_stream_gives_a_step_the_same_lists_in_any_order(requests, shards):
    in_order = small_stream(shards, requests=requests)
    sequence = [in_order(step) for step in range(27)]  # 2 passes
    jumping = small_stream(shards, requests=requests)
    for step in (20, 3, 26, 7, 8, 8, 0, 13, 12):
        assert_same_lists(jumping(step), sequence[step])


def test_a_stream_does_not_depend_on_its_workers_or_the_batches_made_in_advance(shards, monkeypatch):
    stream = small_stream(shards, workers=1)
    sequence = [stream(step) for step in range(15)]
    for workers, ahead in [(4, 4), (2, 1), (3, 11)]:
        monkeypatch.setattr(ultr.training.stream, "AHEAD", ahead)
        other = small_stream(shards, workers=workers)
        for step, lists in enumerate(sequence):
            assert_same_lists(other(step), lists)


@pytest.mark.parametrize("requests", [1000, 10, 1], ids=["one window", "a few windows", "a window a piece"])
def test_a_keyed_stream_has_the_same_requests_and_makes_many_steps_at_once(requests, shards, monkeypatch):
    plain, keyed = (small_stream(shards, requests=requests, batch=21, keyed=keyed) for keyed in (False, True))
    assert keyed._steps > 10
    for step in (*range(20), 3, 90, 4):
        lists, expected = keyed(step), plain(step)
        assert int(lists.key) == step_seed(0, step, 1)
        assert [(part.number, part.requests) for part in lists.parts] == [part[:2] for part in expected.parts]
        length = lists.where.shape[1]
        assert {part.longest for part in lists.parts} == {length}
        assert_same_lists(replace(lists, parts=(), key=None), expected.with_parts(()).padded_to(length))
    monkeypatch.setattr(ultr.training.stream, "BLOCK_BYTES", 1)
    one_by_one = small_stream(shards, requests=requests, batch=21, keyed=True)
    assert one_by_one._steps == 1
    assert numbers(one_by_one(7)) == numbers(plain(7))


def test_another_seed_gives_other_batches(shards, log):
    for make in (
        lambda seed: small_stream(shards, seed=seed),
        lambda seed: Feed(ListBatches(log), batch=16, seed=seed),
    ):
        assert numbers(make(0)(0)) != numbers(make(1)(0))


# Every request comes once before any comes again.


@pytest.mark.parametrize(("requests", "batch"), [(1000, 16), (10, 27), (10, 200), (1, 50)])
def test_a_lane_takes_each_of_its_requests_once_before_any_again(requests, batch, shards):
    stream = small_stream(shards, requests=requests, batch=batch)
    lanes: dict[int, list[int]] = {number: [] for number in range(8)}
    for step in range(math.ceil(3 * 200 / batch) + 8):
        for number, found in by_part(stream(step)).items():
            lanes[number] += found
    covered = Counter()
    for found in lanes.values():
        size = len(set(found))
        passes = [found[first : first + size] for first in range(0, 3 * size, size)]
        assert all(sorted(one) == sorted(set(found)) for one in passes)
        assert len(set(map(tuple, passes))) == 3  # in another order each time
        covered.update(set(found))
    assert covered == dict.fromkeys(range(HELD_OUT, REQUESTS), 1)  # lanes are disjoint and complete


def test_the_lists_of_a_stream_are_those_that_were_written(log, shards):
    whole = ListBatches(log)
    stream = small_stream(shards, batch=24)
    for step in range(12):
        lists = stream(step)
        assert_same_lists(lists.with_parts(()), whole[torch.tensor(numbers(lists))])


def test_a_batch_larger_than_the_data_takes_it_all(shards):
    assert sorted(numbers(Stream(shards, batch=10_000, seed=0)(0))) == list(range(HELD_OUT, REQUESTS))


def test_a_view_changes_the_lists(shards):
    stream = small_stream(shards, view=lambda log: replace(log, positions=log.positions + 100))
    lists = stream(0)
    assert int(lists.positions[lists.where].min()) == 101


# Lanes divide the pieces.


@dataclass
class Pieces:
    """Shards with nothing but row groups."""

    groups: list[RowGroup]

    def __len__(self) -> int:
        return sum(group.requests for group in self.groups)


def pieces_of(sizes: list[int]) -> Pieces:
    return Pieces([RowGroup(Path("part.parquet"), n, size, size) for n, size in enumerate(sizes)])


@given(sizes=st.lists(st.integers(16, 60), min_size=1, max_size=40), count=st.sampled_from([3, 5, 8, 16]))
def test_parts_are_disjoint_and_complete_and_similar_in_size(sizes, count):
    parts = divide(pieces_of(sizes), count)
    assert len(parts) == count
    taken = Counter(
        (piece.group.number, request)
        for part in parts
        for piece in part
        for request in range(piece.first, piece.group.requests, piece.of)
    )
    assert taken == {(number, request): 1 for number, size in enumerate(sizes) for request in range(size)}
    held = [sum(piece.requests for piece in part) for part in parts]
    assert max(held) - min(held) <= max(piece.requests for part in parts for piece in part)
    assert len({piece.group for part in parts for piece in part if piece.of > 1}) < count  # few are read more than once


@pytest.mark.parametrize("shards_and_group", [(1, 1000), (2, 1000), (3, 40)])
def test_fewer_row_groups_than_parts_are_sliced(shards_and_group, log, tmp_path):
    shards, group = shards_and_group
    stream = Stream(Shards(write_lists(log, tmp_path / "lists", shards=shards, group=group)), batch=24, seed=0)
    lanes: dict[int, Counter] = {number: Counter() for number in range(8)}
    for step in range(15):  # lanes of 20 to 34 requests
        for number, found in by_part(stream(step)).items():
            lanes[number].update(found)
    assert sorted(request for lane in lanes.values() for request in lane) == list(range(HELD_OUT, REQUESTS))


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=7))
def test_too_few_requests_for_the_parts_are_an_error(sizes):
    assume(sum(sizes) < 8)
    with pytest.raises(DataError, match=f"needs at least 8 training requests, got {sum(sizes)}"):
        divide(pieces_of(sizes), 8)


@pytest.mark.parametrize("sizes", [[256, 1], [1, 7], [3, 100, 1]])
def test_small_and_large_row_groups_can_be_divided(sizes):
    assert len(divide(pieces_of(sizes), 8)) == 8


@pytest.mark.parametrize("sizes", [[256, 8], [100, 2, 2, 2], [100] * 9, [100] * 15])
def test_all_requests_come_about_equally_often(sizes):
    held = [sum(piece.requests for piece in part) for part in divide(pieces_of(sizes), 8)]
    assert max(held) / min(held) < 1.5


def test_a_batch_from_shards_needs_a_list_for_each_part(shards):
    with pytest.raises(OptionError, match=r"at least 8 lists, got 7; raise network\.batch"):
        Stream(shards, batch=7, seed=0)
    assert len(Stream(shards, batch=8, seed=0)(0)) == 8


def test_shards_with_fewer_requests_than_parts_are_an_error(tmp_path):
    with pytest.raises((OptionError, DataError)):
        Stream(Shards(write_lists(numbered_log(9), tmp_path / "lists")), batch=64, seed=0)


def test_data_without_actions_are_an_error(log, tmp_path):
    silent = replace(log, actions={})
    with pytest.raises(DataError, match="no actions to learn from"):
        Stream(Shards(write_lists(silent, tmp_path / "lists")), batch=16, seed=0)
    with pytest.raises(DataError, match="no actions to learn from"):
        Feed(ListBatches(silent), batch=16, seed=0)


# Memory is bounded, and errors of the reading threads are raised.


@pytest.mark.parametrize(("batch", "most"), [(8, 2), (16, 3)], ids=["of one window", "now and then of two"])
def test_only_the_windows_of_a_step_and_the_next_one_are_in_memory(batch, most, shards):
    stream = small_stream(shards, requests=5, batch=batch)
    for step in [*range(25), 3, 200, 4]:
        stream(step)
        kept = Counter(lane for lane, _, _ in list(stream._windows))
        assert max(kept.values()) <= most


def test_a_window_has_at_most_the_requested_size(shards):
    stream = small_stream(shards, requests=10)
    for step in range(13):
        stream(step)
        kept = list(stream._windows.values())
        assert all(len(window.result().lists) <= 10 for window in kept if window.done() and not window.cancelled())


def test_a_shard_that_cannot_be_read_is_an_error_of_the_step(log, tmp_path):
    shards = Shards(write_lists(log, tmp_path / "lists", shards=4, group=5))
    path = tmp_path / "lists" / "train" / "part-00002.parquet"
    table = pq.read_table(path)
    rows = [[[math.inf] * 3] * len(items) for items in table["position"].to_pylist()]
    place = table.schema.get_field_index("features")
    changed = table.set_column(place, "features", pa.array(rows, table["features"].type))
    pq.write_table(changed, path, row_group_size=5)
    stream = small_stream(Shards(tmp_path / "lists"))
    with pytest.raises(DataError, match=r"part-00002\.parquet.*not finite"):
        for step in range(20):
            stream(step)
    for path in (tmp_path / "lists" / "train").iterdir():
        path.unlink()
    stream = small_stream(shards)
    for _ in range(2):  # a second call raises the error again
        with pytest.raises(DataError, match=r"part-0000\d\.parquet: cannot be read"):
            stream(0)


# Several processes take the steps that one would take.


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("batch", [8, 50])
@pytest.mark.parametrize("kind", ["feed", "users", "stream", "windows"])
def test_the_batches_of_processes_together_are_the_batch_of_one(kind, batch, size, log, folder):
    lists, shards = ListBatches(log), Shards(folder)

    def make():
        if kind in ("stream", "windows"):
            return small_stream(shards, batch=batch, requests=1000 if kind == "stream" else 10)
        return Feed(lists, batch=batch, seed=3, user=User() if kind == "users" else None)

    alone, several = make(), of_processes(size, make)
    for step in (0, 1, 11):
        assert_same_lists(Lists.together([feed(step) for feed in several]), alone(step))


@pytest.mark.parametrize("size", [3, 5])
def test_other_numbers_of_processes_also_divide_the_batch_of_a_feed(size, log):
    make = lambda: Feed(ListBatches(log), batch=32, seed=3, user=User())  # noqa: E731
    alone, several = make(), of_processes(size, make)
    for step in range(4):
        shares = [feed(step) for feed in several]
        assert [len(lists.parts) for lists in shares] == [1] * size
        assert [number for lists in shares for number in numbers(lists)] == numbers(alone(step))
        assert_same_lists(Lists.together(shares).with_parts(()), alone(step).with_parts(()))


@pytest.mark.parametrize("size", [3, 5])
def test_other_numbers_of_processes_divide_the_shards(size, shards):
    several = of_processes(size, lambda: small_stream(shards, batch=32))
    by_process: list[set[int]] = []
    for feed in several:
        batches = [numbers(feed(step)) for step in range(8)]
        assert {len(batch) for batch in batches} <= {32 // size, 32 // size + 1}
        by_process.append(set().union(*batches))
    assert sum(map(len, by_process)) == len(set().union(*by_process)) == 200


def test_more_processes_than_requests_in_a_batch_are_an_error(shards, log):
    with as_process(0, 9), pytest.raises(OptionError, match="one request per process, got 8 for 9 processes"):
        Stream(shards, batch=8, seed=0)
    with as_process(0, 3), pytest.raises(OptionError, match="one request per process, got 2 for 3 processes"):
        Feed(ListBatches(log), batch=2, seed=0)


@settings(max_examples=30)
@given(batch=st.integers(1, 300), size=st.integers(1, 20))
def test_parts_and_shares_cover_a_batch_without_overlap(batch, size):
    assume(batch >= size)
    shares = of_processes(size, lambda: ultr.utils.distributed.own_share(batch))
    assert [i for share in shares for i in range(batch)[share]] == list(range(batch))
    parts = of_processes(size, lambda: ultr.utils.distributed.parts_of(batch))
    assert [sum(requests for _, requests in own) for own in parts] == [len(range(batch)[share]) for share in shares]
    every = [number for own in parts for number, _ in own]
    assert every == sorted(set(every))
    assert all(requests > 0 for own in parts for _, requests in own)
    if 8 % size == 0:  # the parts of one process
        assert [part for own in parts for part in own] == ultr.utils.distributed.parts_of(batch)


# Dropout by parts.

WIDTH = 3


def masks(parts: list[Part], seeds: list[int]) -> Masks:
    """Return the masks of lists that are all as long as the longest of their part."""
    lengths = torch.tensor([part.longest for part in parts for _ in range(part.requests)])
    return Masks(parts, seeds, torch.arange(int(lengths.max())) < lengths[:, None])


@st.composite
def divisions(draw) -> tuple[list[Part], list[slice]]:
    """Parts of a batch, and how processes divide them."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=2, max_size=6))
    parts = [Part(number, *size) for number, size in enumerate(sizes)]
    cuts = sorted({0, len(parts), *draw(st.lists(st.integers(1, len(parts) - 1), max_size=3))})
    return parts, [slice(a, b) for a, b in pairwise(cuts)]


@settings(max_examples=15)
@given(division=divisions(), padding=st.integers(0, 3), p=st.sampled_from([0.1, 0.5, 0.9]))
def test_dropout_does_not_depend_on_the_division_or_on_padding(division, padding, p):
    parts, shares = division
    seeds = [100 + part.number for part in parts]

    def dropped(own: slice, pad: int) -> torch.Tensor:
        mine = parts[own]
        module = Dropout(p)
        module.masks = masks(mine, seeds[own])
        shape = sum(part.requests for part in mine), max(part.longest for part in mine) + pad, WIDTH
        return torch.stack([module(torch.ones(shape)) for _ in range(2)])  # two layers draw from one sequence

    whole, first = dropped(slice(None), 0), 0
    for own in shares:
        share = dropped(own, padding)
        for start, part in zip(
            np.cumsum([0, *(part.requests for part in parts[own])]).tolist(), parts[own], strict=False
        ):
            mine = share[:, start : start + part.requests, : part.longest]
            assert torch.equal(mine, whole[:, first : first + part.requests, : part.longest])
            first += part.requests
    values = whole[whole > 0]
    torch.testing.assert_close(values, torch.full_like(values, 1 / (1 - p)), rtol=2e-4, atol=0)  # p in 16 bits


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_share_of_dropped_values_is_p(p):
    module = Dropout(p)
    module.masks = masks([Part(0, 100, 10), Part(1, 100, 10)], [1, 2])
    kept = module(torch.ones(200, 10, 32)) > 0
    for share in (kept[:100], kept[100:]):
        assert abs(float(share.float().mean()) - (1 - p)) < 5 * (p * (1 - p) / share.numel()) ** 0.5
    same = (kept[:100] == kept[100:]).float().mean()  # parts are independent
    assert abs(float(same) - (p**2 + (1 - p) ** 2)) < 5 * 0.5 / kept[:100].numel() ** 0.5


def test_almost_all_may_be_dropped():
    module = Dropout(0.999999)
    module.masks = masks([Part(0, 4, 5)], [1])
    assert torch.isfinite(module(torch.ones(4, 5, 6))).all()


def test_without_parts_dropout_has_the_seed_of_torch():
    values, dropout = torch.ones(50, 40, 6), Dropout(0.4)
    torch.manual_seed(1)
    first, second = dropout(values), dropout(values)
    torch.manual_seed(1)
    assert torch.equal(dropout(values), first)
    assert not torch.equal(first, second)
    kept = first > 0
    assert abs(float(kept.float().mean()) - 0.6) < 5 * (0.4 * 0.6 / values.numel()) ** 0.5
    torch.testing.assert_close(first[kept], torch.full_like(first[kept], 1 / 0.6), rtol=2e-4, atol=0)
    assert torch.equal(dropout.eval()(values), values)
    masked = Dropout(0.4).eval()
    masked.masks = masks([Part(0, 50, 40)], [1])
    assert torch.equal(masked(values), values)  # in evaluation mode nothing is dropped


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_network_with_dropout_gives_an_item_the_same_score_in_any_process(size, log):
    torch.manual_seed(0)
    inputs = MethodInputs(Label(), features=3, positions=(1, 2), ranker_options={"hidden": (16, 8), "dropout": 0.5})
    method = make_method("pointwise", inputs).train()
    make = lambda: Feed(ListBatches(log), batch=32, seed=3)  # noqa: E731

    def scores(lists: Lists, step: int) -> list[torch.Tensor]:
        with seeded_step(method, lists, 0, step), torch.no_grad():
            found = method.score(lists.features)
        return [row[own] for row, own in zip(found, lists.where, strict=True)]

    alone, several = make(), of_processes(size, make)
    for step in range(3):
        together = [row for feed in several for row in scores(feed(step), step)]
        for mine, wanted in zip(together, scores(alone(step), step), strict=True):
            torch.testing.assert_close(mine, wanted)
    assert not torch.equal(scores(alone(0), 0)[0], scores(alone(0), 1)[0])  # each step has its own mask
    assert all(module.masks is None for module in method.modules() if isinstance(module, Dropout))


def test_rankers_use_this_dropout():
    kinds = [type(module) for module in make_ranker("mlp", FeatureEncoder(2), dropout=0.1).modules()]
    assert kinds.count(Dropout) == 3
    assert torch.nn.Dropout not in kinds


# Several lists as one.


def test_lists_put_together_are_padded_to_the_longest(log):
    batches = ListBatches(log)
    short = int(np.argmin(log.lengths))
    one, other = batches[torch.tensor([short])], batches[torch.arange(6)]
    assert one.where.shape[1] < other.where.shape[1]
    assert_same_lists(Lists.together([one, other]), batches[torch.tensor([short, *range(6)])])
    assert Lists.together([one]) is one


def test_lists_moved_to_a_device_are_equal(log):
    lists = ListBatches(log)[torch.arange(10)].with_parts((Part(0, 4, 5), Part(3, 6, 7)))
    assert_same_lists(lists.to("cpu"), lists)


@pytest.mark.parametrize("size", [1, 2])
def test_the_parts_of_a_batch_have_the_length_of_their_longest_list(size, log):
    for feed in of_processes(size, lambda: Feed(ListBatches(log), batch=19, seed=3)):
        lists = feed(2)
        rows = torch.split(lists.where.sum(-1), [part.requests for part in lists.parts])
        assert [part.longest for part in lists.parts] == [int(lengths.max()) for lengths in rows]


def test_without_features_all_other_fields_are_equal(log):
    batches = ListBatches(log)
    light, full = batches.without_features()[torch.arange(9)], batches[torch.arange(9)]
    assert light.features.shape == (*full.where.shape, 0)
    assert_same_lists(replace(light, features=full.features), full)
