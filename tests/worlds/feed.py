"""A feed of videos: watch time, a categorical feature, users who scroll on until they have had enough.

A viewer looks at the next video with a probability that falls after each video that was watched for long. A video that
is seen is opened with a probability that rises with interest, a little more at the top of the feed, and then watched
for a share of its duration. Two rankers wrote the log, one after the other; videos recur in the feeds of many viewers.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from scipy.special import ndtr

from worlds.world import World, positions, ranked, sigmoid

FEATURES = ("affinity", "freshness", "creator_followers", "duration", "language_match", "watched_before")
TOPICS = ("news", "music", "sport", "games", "food", "travel", "science", "comedy", "film", "crafts")
LONG, STAYS, STAYS_AFTER_LONG = 0.6, 0.93, 0.82  # viewers go on less often after a video that they watched for long
SPREAD, LEAST, BY_MISTAKE = 0.12, 0.02, 0.05  # of the share of a video that is watched


def feed(requests: int, *, seed: int = 0) -> World:  # noqa: PLR0915 - a recipe, read from top to bottom
    rng = np.random.default_rng([11, seed])
    viewers, videos = 3000, 4000
    taste = rng.normal(size=(viewers, 6))
    style = rng.normal(size=(videos, 6))
    topic = rng.integers(0, len(TOPICS), videos)
    liking = rng.normal(0, 0.6, (viewers, len(TOPICS))) + np.linspace(-0.6, 0.6, len(TOPICS))
    followers = rng.lognormal(8, 2, videos)
    duration = np.clip(rng.lognormal(4, 0.8, videos), 5, 900)
    language = rng.random(videos) < 0.7

    viewer = rng.integers(0, viewers, requests)
    lengths = rng.integers(5, 26, requests)
    request = np.repeat(np.arange(requests), lengths)
    video = rng.integers(0, videos, len(request))
    of = viewer[request]
    shared = (taste[of] * style[video]).sum(1) / np.sqrt(6)
    affinity = shared + rng.normal(0, 0.7, len(request))
    affinity[rng.random(len(request)) < 0.1] = np.nan
    fresh = rng.exponential(2, len(request))
    before = (rng.random(len(request)) < 0.15).astype(float)
    interest = sigmoid(
        -0.8
        + 1.0 * shared
        + liking[of, topic[video]]
        + 0.15 * (np.log(followers[video]) - 8)
        - 0.25 * fresh
        + 0.8 * language[video]
        - 0.7 * before
    )
    share = sigmoid(0.4 + 1.2 * shared - 0.5 * (np.log(duration[video]) - 4))  # watched, of the duration

    second = (np.arange(requests) >= requests // 2)[request]
    noise = rng.normal(0, 0.4, len(request))
    guess = np.nan_to_num(affinity, nan=0.0)
    score = np.where(second, guess - 0.3 * fresh + noise, 0.3 * np.log(followers[video]) - 0.5 * fresh + noise)
    order = ranked(request, score)
    request, video, interest, share = request[order], video[order], interest[order], share[order]
    affinity, fresh, before = affinity[order], fresh[order], before[order]
    position = positions(lengths)
    watched = np.clip(share + rng.normal(0, SPREAD, len(request)), LEAST, 1)
    opens = rng.random(len(request)) < interest
    starts = np.cumsum(lengths) - lengths
    seen, opened, chance = np.zeros(len(request), bool), np.zeros(len(request), bool), np.zeros(len(request))
    going = np.ones(requests, bool)
    reached = np.ones(requests)  # the probability that a viewer comes this far, given what was watched above
    for k in range(lengths.max()):
        here = np.flatnonzero(lengths > k)
        rows = starts[here] + k
        seen[rows], chance[rows] = going[here], reached[here]
        by_mistake = rng.random(len(rows)) < _mistake(k)
        opened[rows] = seen[rows] & (opens[rows] | by_mistake)
        stays = np.where(opened[rows] & (watched[rows] > LONG), STAYS_AFTER_LONG, STAYS)
        going[here] &= rng.random(len(rows)) < stays
        reached[here] *= stays
    ratio = np.where(opened, np.where(opens, watched, BY_MISTAKE), 0.0)
    table = {
        "session": request,
        "viewer": viewer[request],
        "video": video,
        "rank": position,
        "click": opened.astype(np.int64),
        "watch_ratio": ratio,
        "affinity": affinity,
        "freshness": fresh,
        "creator_followers": followers[video],
        "duration": duration[video],
        "language_match": language[video].astype(float),
        "watched_before": before,
        "topic": np.array(TOPICS)[topic[video]],
    }

    def expected(position: np.ndarray) -> np.ndarray:
        """Return the expected watch ratio: whether viewers come to a video depends on those above it."""
        opened = interest + (1 - interest) * _mistake(position - 1)
        stays = STAYS - (STAYS - STAYS_AFTER_LONG) * opened * ndtr((share - LONG) / SPREAD)
        order = np.lexsort((position, request))
        reached = np.empty(len(request))
        logs = np.concatenate(([0.0], np.cumsum(np.log(stays[order]))))[:-1]
        reached[order] = np.exp(logs - np.repeat(logs[starts], lengths))
        return reached * (interest * _mean_watched(share) + (opened - interest) * BY_MISTAKE)

    return World(pa.table(table), FEATURES, ("topic",), interest * share, chance, lengths, expected)


def _mistake(k: np.ndarray | int) -> np.ndarray:
    """Return the probability that a viewer opens the video at place k, from 0, by mistake."""
    return np.asarray(0.06 * np.exp(-k / 3))


def _mean_watched(share: np.ndarray) -> np.ndarray:
    """Return the mean of a normal share, clipped to `LEAST` and 1."""
    low, high = (LEAST - share) / SPREAD, (1 - share) / SPREAD
    below, above = ndtr(low), ndtr(-high)
    density = np.exp(-(low**2) / 2) - np.exp(-(high**2) / 2)
    inside = share * (1 - below - above) + SPREAD * density / np.sqrt(2 * np.pi)
    return np.asarray(LEAST * below + above + inside)
