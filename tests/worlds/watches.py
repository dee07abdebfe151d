"""A feed of videos with the truth about cut watches, durations and late purchases.

Each request shows ten videos of 10 to 300 seconds. A viewer who looks at a video starts it if it attracts, and wants to
watch it for a log-normal time, which is longer for long videos and for those that suit the viewer. The end of the video
and the end of the session cut this time; a column marks the second cut. What is in the video can be bought: the
purchase comes hours or days later, up to seven, and the log ends after 14 days. Videos that came out in the last five
days are bought more often, and their impressions are the youngest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from scipy.special import ndtr

from worlds.world import positions, ranked, sigmoid

SHOWN, DAYS, DAY = 10, 14, 86_400
SPREAD, LIKED = 0.8, 0.5  # deviation of the log watch time, and how much it rises with what suits
SESSION = 90.0  # mean seconds until the end of the session, from the start of a video
MEDIAN_DELAY, DELAY_SPREAD, LONGEST_DELAY = 1.5, 1.0, 7.0  # days; of a log-normal delay, cut off at the longest
FEATURES = ("suits", "quality", "duration", "new")


@dataclass(frozen=True)
class Watches:
    """A log, and what is true of its rows."""

    log: pa.Table
    lengths: np.ndarray
    seconds: np.ndarray  # expected watch time of a row that is seen, until the end of the video
    preference: np.ndarray  # the same for the quantile of the time among videos of its duration
    purchases: np.ndarray  # the same for purchases
    median: np.ndarray  # of the time that a viewer who starts wants to watch
    uncut: np.ndarray  # the watch time of the row, if sessions did not end

    def of(self, truth: str, scores: np.ndarray, k: int = 10) -> tuple[float, float]:
        """Return the NDCG@k of a ranking by its truth, and the mean truth of its first three places by request."""
        gain = getattr(self, truth)
        request = np.repeat(np.arange(len(self.lengths)), self.lengths)
        place = positions(self.lengths) - 1
        discount = np.where(place < k, 1 / np.log2(place + 2), 0)
        order, best = ranked(request, scores), ranked(request, gain)
        found, most = (np.bincount(request, gain[rows] * discount) for rows in (order, best))
        first = np.bincount(request, gain[order] * (place < 3))
        return float((found / most).mean()), float(first.mean())


def arrived(days: np.ndarray) -> np.ndarray:
    """Return the share of the purchases that have arrived after some days."""
    logs = np.log(np.minimum(np.maximum(days, 1e-12), LONGEST_DELAY) / MEDIAN_DELAY)
    return ndtr(logs / DELAY_SPREAD) / ndtr(np.log(LONGEST_DELAY / MEDIAN_DELAY) / DELAY_SPREAD)


def watches(requests: int, *, seed: int = 0, cut: bool = True, late: bool = True) -> Watches:
    """Make the world; without `cut`, sessions do not end during a video, without `late`, purchases come at once."""
    rng = np.random.default_rng([23, seed])
    videos = 400
    logs = rng.uniform(np.log(10), np.log(300), videos)
    standard = (logs - logs.mean()) / logs.std()
    quality = 0.3 * standard + rng.normal(size=videos)  # long videos are a bit better, and much longer watched
    launched = np.where(rng.random(videos) < 0.7, 0.0, rng.uniform(DAYS - 5, DAYS - 0.5, videos))

    time = np.sort(rng.uniform(0, DAYS, requests))
    request = np.repeat(np.arange(requests), SHOWN)
    wait = np.where(launched > time[:, None], 2.0, rng.random((requests, videos), np.float32))
    video = wait.argpartition(SHOWN, axis=1)[:, :SHOWN].ravel()
    suits = rng.normal(size=len(request))
    new = (launched[video] > 0).astype(float)
    noisy = quality[video] + rng.normal(0, 0.5, len(request))
    liking = 0.7 * suits + 0.5 * quality[video]
    score = 0.5 * suits + 0.3 * standard[video] + rng.normal(size=len(request))
    score = np.where((rng.random(requests) < 0.05)[request], rng.normal(size=len(request)), score)
    order = ranked(request, score)
    video, suits, new, noisy, liking = (each[order] for each in (video, suits, new, noisy, liking))
    place = positions(np.full(requests, SHOWN))

    attraction = sigmoid(-0.5 + liking)
    median = 6 * np.exp(0.45 * logs[video] + LIKED * liking)
    starts = (rng.random(len(request)) < place**-0.7) & (rng.random(len(request)) < attraction)
    wanted = median * np.exp(SPREAD * rng.normal(size=len(request)))
    duration = np.exp(logs[video])
    uncut = np.minimum(wanted, duration)
    left = rng.exponential(SESSION, len(request)) if cut else np.full(len(request), np.inf)
    bought = sigmoid(-1.5 + 0.6 * suits - 0.5 * noisy + 1.0 * new)
    buys = starts & (rng.random(len(request)) < bought)
    quantile = rng.random(len(request))
    table = np.linspace(0, LONGEST_DELAY, 20_001)
    delay = np.interp(quantile, arrived(table), table) if late else np.zeros(len(request))
    at = time[request] + delay
    known = buys & (at <= DAYS)

    moment = np.datetime64("2026-05-01", "us")

    def times(days: np.ndarray) -> np.ndarray:
        return moment + (days * DAY * 1e6).astype("timedelta64[us]")

    log = {
        "request": request,
        "position": place,
        "item": video,
        "time": times(time)[request],
        "click": starts.astype(np.int64),
        "watch": np.where(starts, np.minimum(uncut, left), 0.0),
        "cut": (starts & (left < uncut)).astype(np.int64),
        "purchase": known.astype(np.int64),
        "bought_at": pa.array(times(at), mask=~known),
        "suits": suits,
        "quality": noisy,
        "duration": duration,
        "new": new,
    }
    z = (np.log(duration) - np.log(median)) / SPREAD
    seconds = median * np.exp(SPREAD**2 / 2) * ndtr(z - SPREAD) + duration * ndtr(-z)
    liked = LIKED * (liking - 0.5 * 0.3 * standard[video])  # without what is the same for all videos of the duration
    total = np.sqrt(2 * SPREAD**2 + LIKED**2 * (0.7**2 + 0.5**2))  # deviation of the difference to another video
    return Watches(
        log=pa.table(log),
        lengths=np.full(requests, SHOWN),
        seconds=attraction * seconds,
        preference=attraction * ndtr(liked / total),
        purchases=attraction * bought,
        median=np.where(starts, median, np.nan),
        uncut=np.where(starts, uncut, 0.0),
    )
