"""A web shop: long lists of different length, clicks, two devices, three production rankers, some random traffic, bots.

Customers look down a list with a probability that depends on the device, and click a product that they see if it
attracts them. Queries recur; some features are missing for some products; one cause of attraction is in no feature.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from worlds.world import World, positions, ranked, sigmoid

FEATURES = ("text_match", "price_ratio", "rating", "popularity", "age_days", "discount", "shipping_days")


def shop(requests: int, *, seed: int = 0, random_share: float = 0.02, bots: float = 0.005) -> World:
    rng = np.random.default_rng([7, seed])
    products, queries, pool = 8000, 1500, 60
    price = rng.lognormal(3.2, 0.8, products)
    quality = rng.normal(size=products)  # what nobody measures
    rating = np.clip(3.8 + 0.5 * quality + rng.normal(0, 0.5, products), 1, 5)
    popularity = np.log1p(rng.gamma(0.7, 40, products) * np.exp(0.4 * quality))
    age = rng.exponential(400, products)
    discount = np.where(rng.random(products) < 0.3, rng.uniform(5, 60, products), 0)
    shipping = rng.integers(1, 9, products).astype(float)
    candidates = np.stack([rng.choice(products, pool, replace=False) for _ in range(queries)])
    fit = rng.normal(0, 1, (queries, pool)) + 0.5 * (rng.random((queries, pool)) < 0.4)  # how well it is what is meant
    usual = np.median(price[candidates], axis=1)

    weight = 1 / np.arange(1, queries + 1) ** 0.8
    query = rng.choice(queries, requests, p=weight / weight.sum())
    mobile = rng.random(requests) < 0.6
    lengths = np.clip(rng.poisson(np.where(mobile, 9, 18)), 3, 40)
    drawn = rng.random((requests, pool)).argsort(1)
    request = np.repeat(np.arange(requests), lengths)
    place = drawn[request, positions(lengths) - 1]
    product = candidates[query[request], place]
    meant = fit[query[request], place]
    ratio = price[product] / usual[query[request]]
    stars = np.where(rng.random(products) < 0.2, np.nan, rating)[product]
    days = np.where(rng.random(products) < 0.1, np.nan, shipping)[product]
    match = np.round(np.clip(5 + 2 * meant + rng.normal(0, 1.0, len(meant)), 0, None), 2)

    attraction = sigmoid(
        -2.2
        + 1.1 * meant
        - 0.9 * np.log(ratio) ** 2
        + 0.8 * (rating[product] - 3.8)
        + 0.35 * (popularity[product] - 2.5)
        + 0.02 * discount[product] * (ratio > 0.8)
        - 0.12 * np.maximum(0, shipping[product] - 3)
        + 0.5 * quality[product]
    )

    ranker = np.where(rng.random(requests) < random_share, 3, rng.choice(3, requests, p=[0.5, 0.3, 0.2]))[request]
    noise = rng.normal(size=len(request))
    score = np.choose(
        ranker,
        [
            match + 0.8 * popularity[product] + 0.5 * noise,
            popularity[product] - 0.4 * np.log(ratio) + 0.3 * noise,
            0.6 * match + 0.9 * np.nan_to_num(stars, nan=3.5) - 0.002 * age[product] + 0.3 * noise,
            noise,
        ],
    )
    order = ranked(request, score)
    request, product, attraction, ranker = request[order], product[order], attraction[order], ranker[order]
    of_row = {"text_match": match, "price_ratio": ratio, "rating": stars, "shipping_days": days}
    of_product = {"popularity": popularity, "age_days": age, "discount": discount}
    features = {name: values[order] for name, values in of_row.items()}
    features |= {name: values[product] for name, values in of_product.items()}
    position = positions(lengths)

    def looks(position: np.ndarray) -> np.ndarray:
        return np.where(mobile[request], position**-0.9, 1 / (1 + 0.1 * (position - 1)))

    seen = looks(position)
    click = (rng.random(len(request)) < seen) & (rng.random(len(request)) < attraction)
    bot = (rng.random(requests) < bots)[request]
    click = np.where(bot, rng.random(len(request)) < 0.6, click)
    table = {
        "request_id": request,
        "query": query[request],
        "item_id": product,
        "position": position,
        "device": np.where(mobile, "mobile", "desktop")[request],
        "randomised": (ranker == 3).astype(np.int64),
        "click": click.astype(np.int64),
        **{name: features[name] for name in FEATURES},
    }
    return World(pa.table(table), FEATURES, (), attraction, seen, lengths, lambda shown: looks(shown) * attraction)
