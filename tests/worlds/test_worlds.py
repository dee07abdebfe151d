"""The worlds are as they say: the truth ranks best, and clicks fall with examination where the order is random."""

from __future__ import annotations

import numpy as np
import pytest

from worlds.feed import feed
from worlds.shop import shop
from worlds.world import positions


@pytest.mark.parametrize("make", [shop, feed])
def test_the_truth_ranks_best_and_the_log_better_than_chance(make):
    world = make(1500, seed=1)
    shown = world.ndcg(-positions(world.lengths).astype(float))
    chance = world.ndcg(np.random.default_rng(0).random(len(world.truth)))
    assert world.ndcg(world.truth) == pytest.approx(1)
    assert chance + 0.1 < shown < 0.9
    assert set(world.features) | set(world.categorical) <= set(world.log.schema.names)
    assert world.log.num_rows == world.lengths.sum() == len(world.truth) == len(world.examination)
    again = make(1500, seed=1)
    np.testing.assert_array_equal(again.truth, world.truth)
    assert again.log["click"].equals(world.log["click"])


def test_in_random_order_clicks_of_the_shop_are_examination_times_attraction():
    world = shop(4000, seed=2, random_share=1.0, bots=0.0)
    clicks = np.asarray(world.log["click"])
    expected = world.examination * world.truth
    deviation = np.sqrt((expected * (1 - expected)).sum())
    assert abs(clicks.sum() - expected.sum()) < 4 * deviation
    place = positions(world.lengths)
    attraction = [world.truth[place == k].mean() for k in (1, 3)]
    assert attraction[0] == pytest.approx(attraction[1], rel=0.1)  # chance put the products there
    rates = [clicks[place == k].mean() for k in (1, 3)]
    seen = [world.examination[place == k].mean() for k in (1, 3)]
    assert rates[1] / rates[0] == pytest.approx(seen[1] / seen[0], rel=0.15)


def test_viewers_of_the_feed_watch_only_what_they_see():
    world = feed(1500, seed=3)
    opened, ratio = (np.asarray(world.log[name]) for name in ("click", "watch_ratio"))
    assert ((ratio > 0) == (opened > 0)).all()
    place = positions(world.lengths)
    assert (world.examination[place == 1] == 1).all()
    assert (np.diff([world.examination[place == k].mean() for k in range(1, 6)]) < 0).all()


@pytest.mark.parametrize(("make", "label"), [(shop, "click"), (feed, "watch_ratio")])
def test_the_reward_of_the_logged_order_is_the_mean_feedback(make, label):
    world = make(20_000, seed=4, **({"bots": 0.0} if make is shop else {}))
    place = positions(world.lengths)
    request = np.repeat(np.arange(len(world.lengths)), world.lengths)
    feedback = np.bincount(request, np.asarray(world.log[label]) * (place <= 10))
    error = feedback.std() / np.sqrt(len(feedback))
    assert abs(world.reward(-place.astype(float)) - feedback.mean()) < 4 * error
    assert world.reward(world.truth) > world.reward(-place.astype(float))
