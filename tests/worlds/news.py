"""A front page of news: some 30 articles at a time, clicks, four features, readers of very different activity.

A reader looks at the articles of the first screen, above all at the one with the large picture in place 4, and seldom
at those below. An article that is seen is clicked if it is worth it, above all while it is new and if its topic is one
of the reader's; long articles age more slowly. What an article is worth is in no feature, but shows in how often it
was read so far. The same articles are on the page for a day or so, so that their ids recur while they grow old.

Some readers click on nearly nothing and others on much of what they see: their activity adds to the logit of all
articles of a request, and no feature knows it. The truth is for a reader and a visit of median activity. It has the
same order for all readers; the clicks, and the expected feedback, are those of the reader of the request.

One of two rankers ordered the page, drawn for each request; a few requests were in random order, as a column says.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from worlds.world import World, positions, ranked, sigmoid

FEATURES = ("age_hours", "popularity", "topic_match", "words")
PICTURE = 4  # the place of the large picture
SCREEN = np.array([0.95, 0.85, 0.75, 0.9, 0.65, 0.6])  # looked at, of the places of the first screen
BELOW = 0.26  # looked at in the first place below it


def news(requests: int, *, seed: int = 0, random_share: float = 0.03) -> World:
    rng = np.random.default_rng([13, seed])
    readers, topics, hours, pool = 4000, 12, 240, 120
    published = np.sort(np.concatenate([rng.uniform(-30, 0, pool), rng.uniform(0, hours, 1000)]))
    topic = rng.integers(0, topics, len(published))
    worth = rng.normal(size=len(published))
    words = np.round(np.clip(rng.lognormal(6.3, 0.6, len(published)), 80, 4000))
    reach = rng.lognormal(5 + 0.8 * worth, 0.6)  # how often it is read in the end
    wants = rng.beta(0.6, 1.6, (readers, topics))  # how much of a topic a reader wants, from 0 to 1
    activity = rng.normal(0, 1.3, readers)

    reader = rng.integers(0, readers, requests)
    level = activity[reader] + rng.normal(0, 0.75, requests)  # in all, a standard deviation of 1.5
    time = np.sort(rng.uniform(0, hours, requests))
    lengths = rng.integers(20, 41, requests)
    request = np.repeat(np.arange(requests), lengths)
    wait = rng.exponential(1 + np.arange(pool) / 60, (requests, pool))  # newer articles are on the page more often
    drawn = wait.argsort(1)[request, positions(lengths) - 1]
    article = np.searchsorted(published, time)[request] - 1 - drawn
    age = time[request] - published[article]
    popularity = np.round(reach[article] * (1 - np.exp2(-age / 6)))
    wanted = wants[reader[request], topic[article]]
    match = np.round(np.clip(wanted + rng.normal(0, 0.12, len(request)), 0, 1), 3)

    new = np.exp2(-age / (8 * np.sqrt(words[article] / 500)))
    logit = (
        -4.0
        + 0.7 * worth[article]
        + 0.5 * wanted
        + 0.6 * new
        + 3.0 * wanted * new
        + 0.8 * (wanted - 0.3) * np.log(words[article] / 500)
        + 0.15 * (np.log1p(popularity) - 4)
    )

    ranker = np.where(rng.random(requests) < random_share, 2, rng.integers(0, 2, requests))[request]
    noise = rng.normal(size=len(request))
    score = np.choose(
        ranker,
        [
            0.7 * np.log1p(popularity) - 0.08 * age + 0.6 * noise,
            2 * match + 0.3 * np.log1p(popularity) - 0.02 * age + 0.4 * noise,
            noise,
        ],
    )
    order = ranked(request, score)
    article, age, popularity, match, logit = (each[order] for each in (article, age, popularity, match, logit))
    position = positions(lengths)
    attraction = sigmoid(logit + level[request])
    seen = looks(position)
    click = (rng.random(len(request)) < seen) & (rng.random(len(request)) < attraction)
    table = {
        "impression_id": request,
        "reader": reader[request],
        "article_id": article,
        "position": position,
        "randomised": (ranker == 2).astype(np.int64),
        "click": click.astype(np.int64),
        "age_hours": age,
        "popularity": popularity,
        "topic_match": match,
        "words": words[article],
    }
    return World(pa.table(table), FEATURES, (), sigmoid(logit), seen, lengths, lambda shown: looks(shown) * attraction)


def looks(position: np.ndarray) -> np.ndarray:
    """Return the probability that a reader looks at a position, from 1."""
    first = SCREEN[np.minimum(position, len(SCREEN)) - 1]
    return np.where(position <= len(SCREEN), first, BELOW * (position / (len(SCREEN) + 1.0)) ** -0.7)
