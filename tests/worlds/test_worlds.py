"""The worlds are as they say: the truth ranks best, and clicks fall with examination where the order is random."""

from __future__ import annotations

import numpy as np
import pytest

from worlds.actions import POSITIONS, actions
from worlds.clips import LONGER, LONGEST, SHORTEST, SURFACES, TRUSTED, clips
from worlds.feed import feed
from worlds.news import PICTURE, SCREEN, news
from worlds.shop import shop
from worlds.watches import watches
from worlds.world import positions


@pytest.mark.parametrize("make", [shop, feed, news, clips])
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
    for name in world.log.schema.names:
        np.testing.assert_array_equal(again.log[name], world.log[name])
    assert not np.array_equal(make(1500, seed=2).truth, world.truth)


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


@pytest.mark.parametrize(("make", "item"), [(news, "article_id"), (clips, "clip")])
def test_items_recur_but_not_within_a_request_and_few_requests_are_in_random_order(make, item):
    world = make(3000, seed=5)
    request = np.repeat(np.arange(len(world.lengths)), world.lengths)
    items, random = (np.asarray(world.log[name]) for name in (item, "randomised"))
    assert len(np.unique(np.stack([request, items]), axis=1).T) == len(items)
    assert np.median(np.bincount(items)[np.unique(items)]) > 3
    shown = np.bincount(request, random) / world.lengths
    assert set(shown) == {0, 1}
    assert 0.02 < shown.mean() < 0.04
    place = positions(world.lengths)
    for rows, correlated in ((random == 1, False), (random == 0, True)):
        assert (np.corrcoef(np.log(world.truth[rows]), place[rows])[0, 1] < -0.1) == correlated


@pytest.mark.parametrize("random_share", [0.03, 1.0])
@pytest.mark.parametrize(("make", "label"), [(news, "click"), (clips, "watch_seconds")])
def test_the_feedback_at_each_position_is_as_expected(make, label, random_share):
    world = make(10_000, seed=6, random_share=random_share)
    place = positions(world.lengths)
    feedback, expected = np.asarray(world.log[label], float), world.expected(place)
    found, wanted = np.bincount(place, feedback)[1:], np.bincount(place, expected)[1:]
    # Its variance is about proportional to its mean. That of the few large values at one position would be too rough.
    z = (found - wanted) / np.sqrt(wanted * (feedback**2).sum() / expected.sum())
    assert np.abs(z).max() < 4
    assert 0.4 < np.square(z).mean() < 2
    assert (feedback[world.examination == 0] == 0).all()


def test_readers_of_the_news_differ_in_activity_but_not_in_the_order_of_articles():
    world = news(3000, seed=7)
    place = positions(world.lengths)
    attraction = world.expected(place) / world.examination
    request = np.repeat(np.arange(len(world.lengths)), world.lengths)
    level = np.log(attraction / (1 - attraction)) - np.log(world.truth / (1 - world.truth))
    of_request = np.bincount(request, level) / world.lengths
    np.testing.assert_allclose(level, of_request[request], atol=1e-9)
    assert of_request.mean() == pytest.approx(0, abs=0.1)
    assert of_request.std() == pytest.approx(1.5, rel=0.05)
    assert {20, 40} <= set(world.lengths) <= set(range(20, 41))


def test_readers_of_the_news_look_at_the_first_screen_and_at_the_picture():
    world = news(8000, seed=8, random_share=1.0)
    place = positions(world.lengths)
    clicks = np.asarray(world.log["click"])
    rate = np.array([clicks[place == k].mean() for k in range(1, 21)])
    seen = np.array([world.examination[place == k].mean() for k in range(1, 21)])
    np.testing.assert_allclose(rate[:8] / rate[0], seen[:8] / seen[0], rtol=0.15)
    assert rate[PICTURE - 1] > 1.1 * max(rate[PICTURE - 2], rate[PICTURE])
    assert rate[len(SCREEN)] < 0.6 * rate[len(SCREEN) - 1]


def test_the_age_of_news_matters_most_for_the_topics_of_the_reader():
    world = news(3000, seed=9)
    age, match = (np.asarray(world.log[name]) for name in ("age_hours", "topic_match"))
    logit = np.log(world.truth / (1 - world.truth))
    loss = [logit[rows & (age < 2)].mean() - logit[rows & (age > 16)].mean() for rows in (match < 0.2, match > 0.6)]
    assert loss[1] > 2 * loss[0] > 0


def test_surfaces_of_clips_have_their_own_lengths_curves_cuts_and_trust():
    world = clips(4000, seed=10)
    place = positions(world.lengths)
    surface, seconds = (np.asarray(world.log[name]) for name in ("surface", "watch_seconds"))
    of_request = surface[place == 1]
    curves = []
    for k, name in enumerate(SURFACES):
        lengths, rows = world.lengths[of_request == name], surface == name
        assert (lengths.min(), lengths.max()) == (SHORTEST[k], LONGEST[k])
        assert world.examination[rows & (place == 1)].min() == 1
        assert 0.1 < (world.examination[rows & (place == lengths.max())] == 0).mean() < 0.4  # below a cut
        curves.append([world.examination[rows & (place == position)].mean() for position in range(1, 5)])
        trusted = world.expected(place)[rows & (place == 1)] / world.truth[rows & (place == 1)]
        assert trusted.min() > 1 + LONGER
        assert trusted.max() > (1 + LONGER) * (1 + TRUSTED[k])
    assert np.abs(np.subtract(*curves[:2])).max() > 0.1
    assert np.abs(np.subtract(*curves[1:])).max() > 0.1
    seen = world.examination > 0
    below = seen & (place > 12)
    np.testing.assert_allclose(world.expected(place)[below], (world.examination * world.truth)[below], 0.02, 0.01)
    log = np.log(seconds[seconds > 0])
    assert 1.2 < log.std() < 1.6
    assert seconds.max() > 30 * seconds[seconds > 0].mean()


@pytest.mark.parametrize(
    ("make", "label"), [(shop, "click"), (feed, "watch_ratio"), (news, "click"), (clips, "watch_seconds")]
)
def test_the_reward_of_the_logged_order_is_the_mean_feedback(make, label):
    world = make(20_000, seed=4, **({"bots": 0.0} if make is shop else {}))
    place = positions(world.lengths)
    request = np.repeat(np.arange(len(world.lengths)), world.lengths)
    feedback = np.bincount(request, np.asarray(world.log[label]) * (place <= 10))
    error = feedback.std() / np.sqrt(len(feedback))
    assert abs(world.reward(-place.astype(float)) - feedback.mean()) < 4 * error
    assert world.reward(world.truth) > world.reward(-place.astype(float))


def test_watches_and_purchases_are_as_their_truth_says():
    world = watches(6000, seed=6)
    started, uncut = (np.asarray(each) for each in (world.log["click"], world.uncut))
    watched, cut, duration = (np.asarray(world.log[name]) for name in ("watch", "cut", "duration"))
    assert ((watched > 0) == (started > 0)).all()
    assert (watched[cut == 0] == uncut[cut == 0]).all()
    assert (watched[cut == 1] < uncut[cut == 1]).all()
    assert (uncut <= duration).all()
    first = positions(world.lengths) == 1  # everybody looks there
    assert uncut[first].mean() == pytest.approx(world.seconds[first].mean(), rel=0.05)
    at_once = watches(6000, seed=6, late=False)
    bought, late = (np.asarray(each.log["purchase"]) for each in (at_once, world))
    assert bought[first].mean() == pytest.approx(world.purchases[first].mean(), rel=0.1)
    assert late.sum() < 0.95 * bought.sum()
    for truth in ("seconds", "preference", "purchases"):
        assert world.of(truth, getattr(world, truth))[0] == pytest.approx(1)
        assert 0.6 < world.of(truth, -positions(world.lengths).astype(float))[0] < 0.95


@pytest.mark.parametrize("trust", [0.0, 1.0])
def test_clicks_purchases_and_seconds_are_as_expected(trust):
    world = actions(20_000, seed=11, trust=trust, conflict=0.5)
    shown = -np.tile(np.arange(POSITIONS, dtype=float), 20_000)
    for name, expected in world.expected(shown).items():
        feedback = np.asarray(world.log[name], float).reshape(-1, POSITIONS).sum(1)
        assert abs(feedback.mean() - expected) < 4 * feedback.std() / np.sqrt(len(feedback))
    best = world.expected(world.clicks * world.purchases)
    assert best["purchase"] > 1.1 * world.expected(world.clicks)["purchase"]
    assert world.expected(world.clicks)["click"] > 1.1 * best["click"]
