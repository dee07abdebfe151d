"""An app with short clips on three surfaces: seconds watched, with a heavy tail, with trust and cut lists.

The home page is a grid with two clips in a row, related clips are a list below the clip just watched, and a search has
a list of results. Each has an examination curve and list lengths of its own. On all of them a session ends at some
place, and nothing below it is seen; in some lists it ends at the latest at a cut, after a place that depends on the
surface (such as a page that never loaded the rest), although the log has all rows of the list.

A clip that is seen is started if it attracts the viewer, and then watched for a time that is lognormal: clips repeat
until the viewer goes on, so no length bounds it. Near the top of a list, viewers trust the list: they start a clip a
bit more often than it attracts them, and watch it for a bit longer. The truth, the expected seconds of a clip that is
seen, is without this trust; the expected feedback is with it. The craft of a clip is in no feature.

One of two rankers ordered the list, drawn for each request; a few requests were in random order, as a column says.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from worlds.world import World, positions, ranked, sigmoid

FEATURES = ("taste_match", "context_match", "views", "age_days", "duration", "completion", "follows", "same_language")
GENRES = ("comedy", "music", "sport", "news", "beauty", "gaming", "cooking", "animals")
TIMELY = np.array([0.0, 0.0, 0.4, 0.6, 0.0, 0.1, 0.0, 0.0])  # how fast the clips of a genre get stale
SPREAD = 1.2  # standard deviation of the logarithm of the seconds
# By surface:
SURFACES = ("home", "related", "search")
SHARE = (0.5, 0.3, 0.2)  # of the requests
SHORTEST, LONGEST = np.array([8, 4, 5]), np.array([20, 12, 20])
STAYS = np.array([0.88, 0.82, 0.97])  # who goes on to the next row (of two clips on the home page)
CUT, CUT_SHARE = np.array([10, 5, 8]), np.array([0.2, 0.3, 0.25])  # the last place of lists that are cut
TRUSTED = np.array([0.06, 0.08, 0.12])  # of the clips that do not attract, those started in the first place
LONGER = 0.15  # the share by which clips in the first place are watched for longer
CONTEXT = np.array([0.0, 0.5, 1.0])  # how much the video just watched, or the query, matters


def clips(requests: int, *, seed: int = 0, random_share: float = 0.03) -> World:  # noqa: PLR0915 - a recipe, as in feed
    rng = np.random.default_rng([17, seed])
    viewers, number, shelves, pool = 3000, 5000, 600, 60
    taste = rng.normal(size=(viewers, 5))
    style = rng.normal(size=(number, 5))
    craft = rng.normal(size=number)
    genre = rng.choice(len(GENRES), number, p=np.array([5, 4, 3, 2, 2, 2, 1, 1]) / 20)
    liking = rng.normal(0, 0.5, (viewers, len(GENRES)))
    speaks, spoken = rng.random(viewers) < 0.1, rng.random(number) < 0.1  # the second of two languages
    old = rng.exponential(8, number)  # days, when the log starts
    length = np.round(np.clip(rng.lognormal(3.3, 0.6, number), 5, 180))
    views = np.round(rng.lognormal(7 + 0.5 * craft, 1.5))
    completion = np.round(sigmoid(0.6 * craft - 0.5 * (np.log(length) - 3.3) + rng.normal(0, 0.4, number)), 3)
    completion[rng.random(number) < 0.12] = np.nan
    wait = rng.exponential(size=(shelves, number)) / (1 + np.log1p(views))
    candidates = wait.argpartition(pool, axis=1)[:, :pool]  # clips that may be shown together, by shelf
    fit = rng.normal(size=(shelves, pool))  # to the clip just watched, or to the query

    surface = rng.choice(len(SURFACES), requests, p=SHARE)
    viewer, shelf = rng.integers(0, viewers, requests), rng.integers(0, shelves, requests)
    time = np.sort(rng.uniform(0, 14, requests))  # days since the log started
    lengths = rng.integers(SHORTEST[surface], LONGEST[surface] + 1)
    cut = np.where(rng.random(requests) < CUT_SHARE[surface], CUT[surface], lengths)
    request = np.repeat(np.arange(requests), lengths)
    on, of = surface[request], viewer[request]
    place = rng.random((requests, pool)).argsort(1)[request, positions(lengths) - 1]
    clip = candidates[shelf[request], place]
    shared = (taste[of] * style[clip]).sum(1) / np.sqrt(5)
    suits = fit[shelf[request], place]
    age = old[clip] + time[request]
    follows = rng.random(len(request)) < sigmoid(-2.5 + 0.6 * shared)
    language = speaks[of] == spoken[clip]
    match = shared + rng.normal(0, 0.5, len(request))
    context = np.where(on == 0, np.nan, suits + rng.normal(0, 0.4, len(request)))

    attraction = sigmoid(
        -1.6
        + 0.7 * shared
        + CONTEXT[on] * suits
        + liking[of, genre[clip]]
        + 0.12 * (np.log1p(views[clip]) - 7)
        - TIMELY[genre[clip]] * np.log1p(age)
        + 0.8 * follows
        - 0.9 * ~language
    )
    longer = np.log(length[clip]) - 3.3
    median = 8 * np.exp(0.3 * shared + 0.35 * craft[clip] + 0.5 * longer + 0.3 * shared * longer)  # seconds
    seconds = median * np.exp(SPREAD**2 / 2)  # their mean

    ranker = np.where(rng.random(requests) < random_share, 2, rng.integers(0, 2, requests))[request]
    noise = rng.normal(size=len(request))
    searched = CONTEXT[on] * np.nan_to_num(context)
    score = np.choose(
        ranker,
        [
            0.4 * np.log1p(views[clip]) + 1.5 * np.nan_to_num(completion[clip], nan=0.5) + searched + 0.5 * noise,
            0.5 * match + follows + searched - 0.03 * age + 0.5 * noise,
            noise,
        ],
    )
    order = ranked(request, score)
    clip, attraction, median, seconds = clip[order], attraction[order], median[order], seconds[order]
    match, context, age = match[order], context[order], age[order]
    follows, language = follows[order], language[order]
    position = positions(lengths)

    def noticed(position: np.ndarray) -> np.ndarray:
        """Return the probability that a viewer who is still there notices a clip."""
        right = np.where(position % 2 == 0, 0.85, 1.0)
        return np.choose(on, [right, np.ones(len(on)), 1 / (1 + 0.5 * (position - 1))])

    def looks(position: np.ndarray) -> np.ndarray:
        return noticed(position) * STAYS[on] ** _steps(on, position) * (position <= cut[request])

    def starts(position: np.ndarray) -> np.ndarray:
        return attraction + (1 - attraction) * TRUSTED[on] * _trust(position)

    rows = rng.geometric(1 - STAYS[surface])  # until the session ends
    there = (_steps(on, position) < rows[request]) & (position <= cut[request])
    seen = there & (rng.random(len(request)) < noticed(position))
    started = seen & (rng.random(len(request)) < starts(position))
    watched = median * (1 + LONGER * _trust(position)) * np.exp(SPREAD * rng.normal(size=len(request)))
    table = {
        "list_id": request,
        "viewer": viewer[request],
        "clip": clip,
        "slot": position,
        "surface": np.array(SURFACES)[on],
        "randomised": (ranker == 2).astype(np.int64),
        "watch_seconds": np.where(started, watched, 0.0),
        "taste_match": match,
        "context_match": context,
        "views": views[clip],
        "age_days": age,
        "duration": length[clip],
        "completion": completion[clip],
        "follows": follows.astype(float),
        "same_language": language.astype(float),
        "genre": np.array(GENRES)[genre[clip]],
    }

    def expected(position: np.ndarray) -> np.ndarray:
        return looks(position) * starts(position) * seconds * (1 + LONGER * _trust(position))

    return World(pa.table(table), FEATURES, ("genre",), attraction * seconds, looks(position), lengths, expected)


def _steps(on: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return how often a viewer must go on to come to a position, from 1: on the home page two clips are in a row."""
    return np.where(on == 0, (position - 1) // 2, position - 1)


def _trust(position: np.ndarray) -> np.ndarray:
    """Return the trust in a position, from 1, relative to the first one."""
    return np.asarray(np.exp(-(position - 1) / 2))
