"""Simulated users against their closed forms: every frequency within its 99.9% interval."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from conftest import make_shown_log
from ultr.datasets import randomise
from ultr.datasets.users import (
    EYE_TRACKING,
    USERS,
    CarouselUser,
    CascadeUser,
    DependentUser,
    Dwell,
    GridUser,
    TrustUser,
    User,
    WatchUser,
    clickbait_user,
    draw_sessions,
    make_user,
    read_dwell_times,
    simulate_log,
)
from ultr.errors import DataError, OptionError
from ultr.log.labels import Label
from ultr.log.table import grid_ids, rows_and_columns

LABEL = Label("click + dwell / exp(3)")


def grid(repeats: int = 20_000, positions: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """Every grade at every position, many times: [repeats, grade and position]."""
    grades, places = torch.meshgrid(torch.arange(5), torch.arange(1, positions + 1), indexing="ij")
    return grades.float().reshape(1, -1).expand(repeats, -1), places.reshape(1, -1).expand(repeats, -1)


def assert_frequency(draws: torch.Tensor, probability: torch.Tensor) -> None:
    """Column frequencies against their probabilities: 99.9% over all columns together (Bonferroni)."""
    n, cells = draws.shape
    z = torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - 0.001 / 2 / cells, dtype=torch.float64))
    frequency, p = draws.double().mean(0), probability.double()
    margin = z * (p * (1 - p) / n).sqrt() + 1e-12
    assert ((frequency - p).abs() <= margin).all(), (frequency - p).abs().max()


def test_position_based_clicks_have_the_probability_of_the_paper():
    grades, places = grid()
    feedback = User(eta=1.5).sample(grades, places, torch.Generator().manual_seed(0))
    theta = torch.tensor(EYE_TRACKING)[places[0] - 1] ** 1.5
    attraction = 0.1 + 0.9 * (2 ** grades[0] - 1) / 15
    assert_frequency(feedback.examined, theta)
    assert_frequency(feedback.relevant, attraction)
    assert_frequency(feedback.actions["click"], theta * attraction)
    assert torch.equal(feedback.actions["click"].bool(), feedback.examined & feedback.relevant)


def test_trust_biased_clicks_depend_on_position_even_when_examined():
    grades, places = grid()
    user = TrustUser()
    feedback = user.sample(grades, places, torch.Generator().manual_seed(1))
    k, rho = places[0].float(), (2 ** grades[0] - 1) / 15
    trust, mistrust = 1 - (k + 1) / 100, 0.65 / k
    click = torch.tensor(EYE_TRACKING)[places[0] - 1] * (trust * rho + mistrust * (1 - rho))
    assert_frequency(feedback.actions["click"], click)
    torch.testing.assert_close(user.click_probability(grades[0], places[0]), click)
    wrong = feedback.actions["click"].bool() & ~feedback.relevant
    assert_frequency(wrong, torch.tensor(EYE_TRACKING)[places[0] - 1] * mistrust * (1 - rho))


def cascade_by_hand(user: CascadeUser, grades: list[float]) -> list[float]:
    """P(click) of each item in reading order, by enumeration of who is relevant and where reading ends."""
    n = len(grades)
    attraction = [0.1 + 0.9 * (2**y - 1) / 15 for y in grades]
    stop = [user.stop[int(y)] for y in grades]
    if isinstance(user, DependentUser):
        stop = [1 - (user.go_on / k) ** user.eta for k in range(1, n + 1)]
    clicks = [0.0] * n
    for outcome in product(range(4), repeat=n):  # per item: bit 0 relevant, bit 1 goes on reading
        chance, reading = 1.0, True
        for i, o in enumerate(outcome):
            relevant, on = bool(o & 1), bool(o & 2)
            continues = user.patience * (1 - stop[i]) if relevant else user.patience
            chance *= (attraction[i] if relevant else 1 - attraction[i]) * (continues if on else 1 - continues)
        for i, o in enumerate(outcome):
            clicks[i] += chance * (reading and bool(o & 1))
            reading = reading and bool(o & 2)
    return clicks


@given(st.lists(st.integers(0, 4).map(float), min_size=1, max_size=4), st.integers(0, 100))
def test_cascade_click_probability_equals_enumeration_in_reading_order(grades, seed):
    user = CascadeUser()
    order = torch.randperm(len(grades), generator=torch.Generator().manual_seed(seed))
    positions = 10 * (order + 1)  # ids with gaps, slots in any order
    y = torch.tensor(grades, dtype=torch.float64)
    by_reading = [grades[i] for i in positions.argsort().tolist()]
    expected = torch.tensor(cascade_by_hand(user, by_reading), dtype=torch.float64)[order]
    torch.testing.assert_close(user.click_probability(y[None], positions[None])[0], expected, rtol=1e-9, atol=1e-12)


@given(
    st.lists(st.integers(0, 4).map(float), min_size=1, max_size=4),
    st.integers(0, 100),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_dependent_click_probability_equals_enumeration_in_reading_order(grades, seed, eta):
    user = DependentUser(eta=eta, go_on=0.7)
    positions = 1 + torch.randperm(len(grades), generator=torch.Generator().manual_seed(seed))
    y = torch.tensor(grades, dtype=torch.float64)
    by_reading = [grades[i] for i in positions.argsort().tolist()]
    expected = torch.tensor(cascade_by_hand(user, by_reading), dtype=torch.float64)[positions - 1]
    torch.testing.assert_close(user.click_probability(y[None], positions[None])[0], expected, rtol=1e-9, atol=1e-12)


def test_dependent_users_stop_only_after_clicks_with_a_probability_by_position():
    n = 100_000
    grades, positions = torch.full((n, 4), 2.0), torch.arange(1, 5).expand(n, 4)
    user = DependentUser()
    feedback = user.sample(grades, positions, torch.Generator().manual_seed(2))
    assert_frequency(feedback.actions["click"], user.click_probability(grades[:1], positions[:1])[0])
    clicked, examined = feedback.actions["click"].bool(), feedback.examined
    after_none = examined[:, :-1] & ~clicked[:, :-1]
    assert bool(examined[:, 1:][after_none].all())
    for k in range(3):
        continued = examined[:, k + 1][clicked[:, k]].float()
        expected = 0.6 / (k + 1)
        margin = 4 * (expected * (1 - expected) / len(continued)) ** 0.5
        assert abs(float(continued.mean()) - expected) < margin
    assert bool(user.unbiased().sample(grades, positions, torch.Generator().manual_seed(3)).examined.all())


def test_cascade_frequencies_match_and_unbiased_readers_read_everything():
    n = 50_000
    grades = torch.tensor([[0.0, 4.0, 2.0, 1.0, 3.0, 0.0]]).expand(n, 6)
    positions = torch.tensor([[1, 2, 3, 4, 5, 0]]).expand(n, 6)
    where = torch.tensor([[True] * 5 + [False]]).expand(n, 6)
    user = CascadeUser()
    feedback = user.sample(grades, positions, torch.Generator().manual_seed(2), where=where)
    assert_frequency(feedback.actions["click"], user.click_probability(grades[:1], positions[:1], where=where[:1])[0])
    assert bool((feedback.examined.int().diff(dim=1) <= 0).all())  # nobody skips an item and reads on
    everything = user.unbiased().sample(grades, positions, torch.Generator().manual_seed(3), where=where)
    assert torch.equal(everything.examined, where)


@pytest.mark.parametrize("name", USERS)
def test_padded_slots_never_receive_feedback(name):
    generator = torch.Generator().manual_seed(4)
    user = make_user(name, further={"like": [1.0]})
    relevance = torch.full((500, 8), 4.0)
    where = torch.rand((500, 8), generator=generator) < 0.5
    positions = torch.arange(1, 9).expand(500, 8)
    feedback = user.sample(relevance, positions, generator, where=where)
    for values in (*feedback.actions.values(), feedback.examined, feedback.relevant):
        assert not values[~where].any()
        assert values[where].any()
    assert not user.expected(relevance, positions, LABEL, where=where)[~where].any()


@pytest.mark.parametrize("name", USERS)
def test_the_expected_label_is_the_mean_of_drawn_ones(name):
    n = 100_000
    user = make_user(name, dwell=Dwell(decay=0.3), further={"like": (0.0, 0.1, 0.2, 0.5, 0.9)})
    label = Label("click + dwell / exp(3) + 2 * like")
    grades = torch.tensor([[4.0, 0.0, 2.0, 1.0, 3.0]]).double().expand(n, 5)
    positions = torch.tensor([[1, 2, 3, 7, 12]]).expand(n, 5)
    draws = label(user.sample(grades, positions, torch.Generator().manual_seed(5)).actions)
    exact = user.expected(grades[:1], positions[:1], label)[0]
    margin = 3.9 * draws.std(0) / n**0.5  # 99.9% over five
    assert ((draws.mean(0) - exact).abs() < margin).all()


def test_the_value_of_a_click_is_that_of_the_log_normal_mean():
    grades = torch.arange(5.0, dtype=torch.float64)
    user = User(further={"like": (0.0, 0.1, 0.2, 0.5, 0.9)}, dwell=Dwell(decay=0.5))
    positions = torch.tensor([1, 4, 9, 16, 25])
    mean_dwell = np.exp(np.array(user.dwell.mu) + np.array(user.dwell.sigma) ** 2 / 2) / np.arange(1, 6)
    expected = 1 + mean_dwell / np.exp(3) + 2 * np.array(user.further["like"])
    value = user.value_of_click(grades, positions, "click + dwell / exp(3) + 2 * like")
    np.testing.assert_allclose(value, expected, rtol=1e-9)


def test_the_value_of_a_click_with_a_threshold_is_a_normal_tail():
    value = User().value_of_click(torch.tensor([2.0], dtype=torch.float64), torch.tensor([1]), "dwell > 30")
    tail = 1 - torch.distributions.Normal(3.0, 0.7).cdf(torch.tensor(30.0, dtype=torch.float64).log())
    assert value.item() == pytest.approx(tail.item(), abs=5e-4)


def test_a_label_that_is_not_zero_without_actions_counts_it():
    grades, positions = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    expected = 0.5 + 0.68 * 0.1
    assert User().expected(grades, positions, "click + 0.5").item() == pytest.approx(expected)


def test_dwell_is_log_normal_by_grade_and_scaled_by_position():
    grades, places = grid(repeats=4000)
    user = User(eta=0, epsilon=1.0, dwell=Dwell(decay=0.7))
    dwell = user.sample(grades, places, torch.Generator().manual_seed(6)).actions["dwell"]
    log = dwell.double().log() + 0.7 * places.double().log()
    mu, sigma = (torch.tensor(values)[grades[0].long()] for values in (user.dwell.mu, user.dwell.sigma))
    assert ((log.mean(0) - mu).abs() < 4.3 * sigma / 4000**0.5).all()  # 99.9% over fifty cells
    assert ((log.std(0) / sigma - 1).abs() < 4.3 / 8000**0.5).all()


def test_dwell_interpolates_between_grades_when_there_are_fewer():
    mu, _ = Dwell().parameters(torch.tensor([0.0, 1.0, 2.0]), max_grade=2)
    assert mu.tolist() == pytest.approx([1.2, 3.0, 4.3])
    mu, _ = Dwell(mu=[2.0], sigma=[0.5]).parameters(torch.tensor([0.0, 3.0]), max_grade=4)
    assert mu.tolist() == [2.0, 2.0]


def test_further_actions_follow_clicks_only_and_by_grade():
    grades, places = grid()
    user = User(eta=0, epsilon=1.0, further={"share": (0.0, 0.1, 0.2, 0.4, 0.8)})
    feedback = user.sample(grades, places, torch.Generator().manual_seed(7))
    assert_frequency(feedback.actions["share"], torch.tensor(user.further["share"])[grades[0].long()])
    feedback = User(further={"share": [1.0]}).sample(grades, places, torch.Generator().manual_seed(8))
    assert torch.equal(feedback.actions["share"], feedback.actions["click"])


def test_in_the_clickbait_world_clicks_fall_with_the_grade_while_the_label_rises():
    user = clickbait_user()
    grades, positions = torch.arange(5.0), torch.ones(5, dtype=torch.int64)
    assert (user.click_probability(grades, positions).diff() < 0).all()
    assert (user.expected(grades, positions, LABEL).diff() > 0).all()


def test_whole_grades_are_taken_like_floating_ones():
    grades, positions = torch.tensor([[4, 0]]), torch.tensor([[1, 2]])
    torch.testing.assert_close(
        User().expected(grades, positions, LABEL), User().expected(grades.float(), positions, LABEL)
    )
    assert set(User().sample(grades, positions).actions) == {"click", "dwell"}


def test_positions_beyond_the_last_known_fall_as_one_over_k():
    positions = torch.tensor([0, 1, 10, 20, 1000])
    expected = [0.68, 0.68, 0.06, 0.03, 0.0006]
    assert User().theta(positions, torch.float64).tolist() == pytest.approx(expected)
    assert User().unbiased().theta(positions).tolist() == [1.0] * 5


def test_probabilities_by_grade_follow_the_highest_grade_there_is():
    grades, positions = torch.tensor([0.0, 1.0, 2.0]), torch.ones(3, dtype=torch.int64)
    user = User(max_grade=2, epsilon=0.2, further={"like": (0.0, 1.0)}, eta=0)
    torch.testing.assert_close(user.attracted(grades), 0.2 + 0.8 * torch.tensor([0, 1 / 3, 1.0]))
    likes = user.expected(grades, positions, "like") / user.attracted(grades)
    torch.testing.assert_close(likes, torch.tensor([0.0, 0.5, 1.0]))


def test_trust_stops_falling_at_twenty_and_mistrust_at_ten():
    user = TrustUser(eta=0)
    positions = torch.tensor([5, 10, 15, 20, 30])
    torch.testing.assert_close(
        user.click_probability(torch.full((5,), 4.0), positions), torch.tensor([0.94, 0.89, 0.84, 0.79, 0.79])
    )
    torch.testing.assert_close(
        user.click_probability(torch.zeros(5), positions), torch.tensor([0.13, 0.065, 0.065, 0.065, 0.065])
    )


def test_a_generator_repeats_its_draws():
    grades, places = grid(repeats=50)
    one, two, other = (User().sample(grades, places, torch.Generator().manual_seed(s)).actions for s in (1, 1, 2))
    assert torch.equal(one["dwell"], two["dwell"])
    assert not torch.equal(one["dwell"], other["dwell"])


def test_a_fitted_mixture_finds_the_components_of_dwell_times(tmp_path):
    rng = np.random.default_rng(0)
    mu, sigma = np.array([0.0, 3.0, 6.0]), np.array([0.4, 0.5, 0.3])
    grade = rng.integers(0, 3, 30_000)
    seconds = np.exp(rng.normal(mu[grade], sigma[grade]))
    (tmp_path / "dwell.csv").write_text("seconds\n" + "\n".join(f"{s:.6g}" for s in seconds))
    dwell = Dwell.fit(read_dwell_times(tmp_path / "dwell.csv"), components=3)
    np.testing.assert_allclose(dwell.mu, mu, atol=0.03)
    np.testing.assert_allclose(dwell.sigma, sigma, atol=0.03)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_user("cascada"), OptionError, "did you mean 'cascade'"),
        (lambda: User(eta=-1), OptionError, "'eta' must be finite numbers from 0"),
        (lambda: User(eta=float("nan")), OptionError, "'eta'"),
        (lambda: User(eta="1x"), OptionError, "'eta' must be a number"),
        (lambda: User(attraction=()), OptionError, "'attraction'"),
        (lambda: User(max_grade=2000), OptionError, "'max_grade'"),
        (lambda: User(further={"click": [0.5]}), OptionError, "a Python identifier that is not yet"),
        (lambda: User(further={"": [0.5]}), OptionError, "a Python identifier that is not yet"),
        (lambda: User(examination=0.5), OptionError, "'examination' must be a list of numbers"),
        (lambda: CascadeUser(stop=(2.0,)), OptionError, "'stop'"),
        (lambda: CascadeUser(patience=-1), OptionError, "'patience'"),
        (lambda: DependentUser(go_on=1.5), OptionError, "'go_on'"),
        (lambda: TrustUser(trust=lambda k: 5 + 0 * k), OptionError, "'trust'"),
        (lambda: TrustUser(trust=0.5), OptionError, "'trust' must be a function"),
        (lambda: Dwell(decay=float("nan")), OptionError, "'decay'"),
        (lambda: make_user("pbm", severity=1), OptionError, "does not have these options"),
        (lambda: simulate_log(make_shown_log(), User(), sessions=0), OptionError, "'sessions' must be at least 1"),
        (lambda: User(epsilon=1.5), OptionError, "epsilon"),
        (lambda: User(examination=[0.5, 1.2]), OptionError, "'examination' must be finite numbers from 0 to 1"),
        (lambda: User(further={"like": []}), OptionError, "'like' must be finite numbers"),
        (lambda: Dwell(mu=[1.0], sigma=[1.0, 2.0]), OptionError, "'mu' and 'sigma' must have the same length"),
        (lambda: Dwell.fit(np.array([1.0, 0.0])), DataError, r"positive, got 0\.0"),
        (lambda: Dwell.fit(np.ones(10)), DataError, "at least 50 dwell times"),
        (lambda: User().sample(torch.tensor([5.0]), torch.tensor([1])), DataError, "grades must be 0 to 4"),
        (lambda: User().expected(torch.tensor([-1.0]), torch.tensor([1]), LABEL), DataError, "grades must be"),
        (lambda: simulate_log(replace(make_shown_log(), positions=None), User()), DataError, "positions and true"),
    ],
)
def test_wrong_arguments_of_users_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_bad_dwell_file_is_an_error(tmp_path):
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(DataError, match="at least 50 dwell times, got 0"):
        Dwell.fit(read_dwell_times(tmp_path / "blank.txt"))
    (tmp_path / "dwell.txt").write_text("1.5\nten\n")
    with pytest.raises(DataError, match="one number per line"):
        read_dwell_times(tmp_path / "dwell.txt")


@pytest.mark.parametrize("name", USERS)
def test_a_simulated_log_keeps_rows_and_draws_by_their_own_grade_and_position(name, shown_log):
    user = make_user(name)
    log, truth = simulate_log(shown_log, user, seed=3, sessions=20_000)
    assert len(log) == 20_000
    assert log.request_ids.to_pylist()[:3] == [0, 1, 2]
    clicks = log.actions["click"]
    assert set(np.unique(clicks)) == {0.0, 1.0}
    assert ((log.actions["dwell"] > 0) == (clicks > 0)).all()
    assert (truth.examined.numpy() >= clicks).all()
    assert abs(truth.relevant.numpy().mean() - user.attracted(torch.from_numpy(log.relevance)).mean().item()) < 0.01
    assert len(np.unique(np.diff(log.offsets)[:200])) > 3  # requests are drawn at random
    for position, grade in product((1, 3), (0, 4)):
        cell = (log.positions == position) & (log.relevance == grade)
        if user.by_own_position and cell.sum() > 100:
            p = float(user.click_probability(torch.tensor([float(grade)]), torch.tensor([position])))
            assert abs(clicks[cell].mean() - p) < 4 * (p * (1 - p) / cell.sum()) ** 0.5
    again, _ = simulate_log(shown_log, user, seed=3, sessions=20_000)
    assert (again.actions["dwell"] == log.actions["dwell"]).all()


def test_without_sessions_each_request_is_used_once_under_its_own_id(shown_log):
    log, _ = simulate_log(shown_log, User())
    assert log.request_ids.equals(shown_log.request_ids)
    assert (log.features == shown_log.features).all()


def test_sessions_have_the_query_they_repeat(shown_log):
    drawn = draw_sessions(shown_log.select(np.arange(5)), 20, seed=0)
    assert len(drawn) == len(drawn.request_ids.unique()) == 20
    assert len(drawn.context["query"].unique()) <= 5


def test_a_share_of_requests_is_shown_in_random_order_and_marked():
    log = make_shown_log(requests=400, longest=10)
    log = replace(log, relevance=np.clip(5 - log.positions, 0, 4).astype(np.float32))  # the best first
    found = randomise(log, 0.5, seed=1)
    marked = found.context["randomised"].to_numpy(zero_copy_only=False)
    assert 0.4 < marked.mean() < 0.6
    np.testing.assert_array_equal(found.positions, log.positions)
    rows = np.repeat(marked, log.lengths)
    np.testing.assert_array_equal(found.features[~rows], log.features[~rows])
    long = rows & np.repeat(log.lengths == 10, log.lengths)
    first, last = (found.relevance[long & (found.positions == k)].mean() for k in (1, 10))
    assert abs(first - last) < 1.5  # not 4, as in the logged order
    with pytest.raises(OptionError, match="between 0 and 1"):
        randomise(log, 2.0)


def test_watch_users_have_the_dwell_of_the_released_simulator():
    """Click (1 + w W) with w ~ N(2, 0.4) / √(k+1) and W ~ N(0.1 + 0.9 ρ, (√ρ + 0.1) / √6), at least 0.01."""
    user, n = WatchUser(), 200_000
    grades, positions = torch.tensor([[0.0, 2.0, 4.0, 4.0]]).double(), torch.tensor([[1, 1, 1, 8]])
    rho = np.array([0.0, 3 / 15, 1.0, 1.0])
    mean, spread = 0.1 + 0.9 * rho, (np.sqrt(rho) + 0.1) / np.sqrt(6)
    z = (0.01 - mean) / spread
    watched = 0.01 * norm.cdf(z) + mean * norm.sf(z) + spread * norm.pdf(z)  # the mean of a normal cut at 0.01
    exact = user.value_of_click(grades, positions, "click + dwell")[0]
    np.testing.assert_allclose(exact, 1 + 2 / np.sqrt([2, 2, 2, 9]) * watched, rtol=1e-5)
    sure = replace(user, eta=0.0, attraction=(1.0,))
    drawn = sure.sample(grades.expand(n, 4), positions.expand(n, 4), torch.Generator().manual_seed(0)).actions
    dwell = drawn["dwell"].numpy()
    assert (dwell > 0).all()
    np.testing.assert_allclose(dwell.mean(0), exact - 1, atol=4 * dwell.std(0).max() / n**0.5)


# --- Grids and carousels ----------------------------------------------------------------------------------------------


def slots_by_hand(rows: int, columns: int) -> torch.Tensor:
    return torch.tensor([[grid_ids(r, c) for r in range(1, rows + 1) for c in range(1, columns + 1)]])


def test_users_of_a_grid_look_in_the_shape_of_an_f():
    user = GridUser(columns=4, scroll=0.8, skip=0.1, decay=0.5, narrowing=0.6, eta=2.0)
    theta = user.theta(slots_by_hand(3, 4), torch.float64)[0].reshape(3, 4)
    by_hand = [
        [(0.8 ** (r - 1) * (0.9 if r > 1 else 1.0) * c ** -(0.5 * (1 + 0.6 * (1 - 1 / r)))) ** 2 for c in range(1, 5)]
        for r in range(1, 4)
    ]
    torch.testing.assert_close(theta, torch.tensor(by_hand, dtype=torch.float64))
    ratios = theta / theta[:, :1]
    assert (ratios[1:, 1:] < ratios[:-1, 1:]).all()  # lower rows are read less broadly
    middle = GridUser(columns=5, middle=1.0).theta(slots_by_hand(1, 5))[0]
    assert middle.argmax() == 2
    torch.testing.assert_close(middle, middle.flip(0))


def test_users_see_further_columns_of_a_carousel_only_after_a_swipe():
    user = CarouselUser(columns=7, visible=3, swipe=0.3, decay=0.2, scroll=0.8, skip=0.1)
    theta = user.theta(slots_by_hand(2, 7), torch.float64)[0].reshape(2, 7)
    places, swipes = [1, 2, 3, 1, 2, 3, 1], [0, 0, 0, 1, 1, 1, 2]
    first = [k**-0.2 * 0.3**s for k, s in zip(places, swipes, strict=True)]
    torch.testing.assert_close(theta[0], torch.tensor(first, dtype=torch.float64))
    torch.testing.assert_close(theta[1], 0.8 * 0.9 * theta[0])


@pytest.mark.parametrize("user", [GridUser(columns=3, middle=0.4), CarouselUser(columns=4, visible=2, decay=0.0)])
def test_users_of_a_grid_look_as_often_as_they_say_and_stop_and_swipe_once_for_a_row(user):
    n, slots = 20_000, slots_by_hand(3, user.columns)
    examined = user.sample(
        torch.full((n, slots.shape[1]), 4.0), slots.expand(n, -1), torch.Generator().manual_seed(3)
    ).examined
    assert_frequency(examined, user.theta(slots, torch.float64)[0])
    of_row = examined.reshape(n, 3, user.columns)
    if isinstance(user, CarouselUser):  # without decay, users see all columns of a screen or none
        assert (of_row[..., 0] == of_row[..., 1]).all()
        assert (of_row[..., 2] == of_row[..., 3]).all()
        assert not (of_row[..., 2] & ~of_row[..., 0]).any()
    both = (of_row[:, 1, 0] & of_row[:, 2, 0]).double().mean()
    apart = of_row[:, 1, 0].double().mean() * of_row[:, 2, 0].double().mean()
    assert both > apart + 0.05  # who stops after a row sees no later row


def test_a_list_is_the_grid_with_one_column():
    grid, ranks = GridUser(columns=1, scroll=0.8, skip=0.1), torch.arange(1, 30)
    theta = [1.0, *(0.8 ** (k - 1) * 0.9 for k in range(2, 30))]
    torch.testing.assert_close(grid.theta(ranks, torch.float64), torch.tensor(theta, dtype=torch.float64))
    as_pbm = User(examination=theta)
    torch.testing.assert_close(grid.theta(ranks), as_pbm.theta(ranks))


@given(st.integers(1, 20), st.integers(1, 200))
def test_ranks_fill_the_grid_in_reading_order(columns, items):
    user, ranks = GridUser(columns=columns), np.arange(1, items + 1)
    slots = user.placed(ranks)
    assert (np.diff(slots) > 0).all()
    rows, places = rows_and_columns(slots)
    np.testing.assert_array_equal((rows - 1) * columns + places, ranks)
    torch.testing.assert_close(user.theta(torch.from_numpy(slots)), user.theta(torch.from_numpy(ranks)))
    np.testing.assert_array_equal(user.placed(slots), slots)


def test_a_simulated_log_of_a_grid_has_rows_and_columns(shown_log):
    log, feedback = simulate_log(shown_log, GridUser(columns=3), seed=3, sessions=4000)
    table = log.to_table()
    assert {"row", "column"} < {*table.column_names}
    assert table["column"].to_numpy().max() <= 3
    slots = torch.from_numpy(log.positions)
    for k in np.unique(log.positions)[:4].tolist():
        p, seen = float(GridUser(columns=3).theta(torch.tensor(k))), feedback.examined[slots == k].double()
        assert abs(float(seen.mean()) - p) < 4 * (p * (1 - p) / len(seen)) ** 0.5 + 1e-9
    with pytest.raises(OptionError, match="these users see a list, and the log has a grid"):
        simulate_log(log, User())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grid", {"columns": 0}, "'columns' must be"),
        ("grid", {"columns": 512}, "'columns' must be"),
        ("grid", {"skip": 1.5}, "'scroll, skip and middle' must be"),
        ("carousel", {"swipe": -0.1}, "'swipe' must be"),
        ("carousel", {"visible": 0}, "'visible' must be"),
        ("pbm", {"columns": 3}, "user 'pbm' does not have these options"),
    ],
)
def test_wrong_options_of_users_of_a_grid_are_errors(name, options, message):
    with pytest.raises(OptionError, match=message):
        make_user(name, **options)


def test_more_items_than_a_grid_has_are_an_error():
    with pytest.raises(OptionError, match="a grid has at most 1,023 items, got 1024; lower --items"):
        GridUser(columns=1).placed(np.arange(1, 1025))
