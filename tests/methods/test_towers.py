"""Shallow towers: losses against explicit sums, scores, options, and runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_shown_log
from ultr.datasets.users import User, simulate_log
from ultr.errors import LabelError, OptionError
from ultr.lists import Lists
from ultr.log import Log, read_log, write_log
from ultr.log.labels import Label
from ultr.methods import METHODS, MethodInputs, make_method, parse_options
from ultr.methods.anchor import anchor_of_log
from ultr.methods.base import POSITION_SPEED
from ultr.methods.losses import product_logistic_loss
from ultr.methods.towers import Tower
from ultr.rankers import Synthesised, fit_encoders, score_rows
from ultr.rankers.model import load_model
from ultr.training import run as runs
from ultr.training.combining import combine
from ultr.training.config import Config, TrainingOptions, make_config
from ultr.training.data import Data
from ultr.training.loop import Listeners, start, take_step
from ultr.training.run import run_training

FEATURES = 4
POSITIONS = tuple(range(1, 13))
FOUR = "click + dwell / 20 + 2 * like + 3 * share"
BINARY = ("click", "like", "share")
HIDDEN = 77.0  # output of the tower for a hidden position
SYNTHESIZE = ("sum-synthesize", "pal-synthesize")
TASKS = ("sum-click", "pal-click", "pal-click-dwell")


def test_the_released_variant_learns_each_action_by_a_network_of_its_own_from_all_rows(tmp_path):
    given = inputs(ranker="mlp", ranker_options={"hidden": (8, 4), "dropout": 0.3})
    released = make_method("pal-click", given, variant="released")
    assert released.accumulator == 0.1
    assert not released.after_click
    assert make_method("pal-click", given, variant="released", rows="clicked").after_click
    lists = Lists.from_log(feedback_log())
    clicks, dwell = released.ranker.outputs(lists.features).unbind(-1)
    layers = list(released.ranker.ranker.layers)
    assert [type(module).__name__ for module in layers[0]] == ["Linear", "LayerNorm", "ELU"] * 2 + ["Linear"]
    for output, network in ((clicks, layers[0]), (dwell, layers[1])):
        own = torch.autograd.grad(output.sum(), list(network.parameters()), retain_graph=True)
        assert any(slope.abs().sum() > 0 for slope in own)
    other = torch.autograd.grad(clicks.sum(), list(layers[1].parameters()))
    assert all((slope == 0).all() for slope in other)
    write_log(feedback_log(), tmp_path / "log.parquet")
    options = {"hidden": (8,), "dropout": 0.3, "columns": {}, "method_options": {"variant": "released"}}
    model = load_model(run_training(config(tmp_path / "log.parquet", **options), tmp_path / "run"))
    assert model.ranker.ranker.layers[0][1].__class__.__name__ == "LayerNorm"


def inputs(**changes) -> MethodInputs:
    given = {
        "label": Label(),
        "features": FEATURES,
        "positions": POSITIONS,
        "ranker": "linear",
        "feature_names": ("f0", "f1", "f2", "device"),
        "binary": BINARY,
    }
    return MethodInputs(**{**given, **changes})


def feedback_log(seed: int = 0, requests: int = 40) -> Log:
    user = User(eta=0.3, further={"like": (0.1, 0.3, 0.5, 0.7, 0.9), "share": (0.5, 0.4, 0.3, 0.2, 0.1)})
    return simulate_log(make_shown_log(requests=requests, seed=seed, features=FEATURES), user, seed=seed)[0]


@pytest.fixture(scope="module")
def log() -> Log:
    return feedback_log()


@pytest.fixture(scope="module")
def lists(log) -> Lists:
    lists = Lists.from_log(log)
    assert not lists.where.all()
    return replace(lists, weights=torch.linspace(0.2, 3.0, len(lists)))


def towers_of(method) -> dict[str, Tower]:
    return (
        {"label": method.tower}
        if hasattr(method, "tower")
        else {name.removeprefix("on "): tower for name, tower in method.towers.items()}
    )


def set_values(tower: Tower, values: torch.Tensor) -> None:
    """Set the outputs of a tower at its positions; the last is for a hidden position."""
    with torch.no_grad():
        tower.table.weight.copy_(values / POSITION_SPEED)


def ready(name: str, log: Log, *, label: str | None = None, **options):
    """Make a method in evaluation mode, with scales of actions and arbitrary values in its towers."""
    torch.manual_seed(0)
    method = make_method(name, inputs(label=Label() if label is None else Label(label)), **options).eval()
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    for i, tower in enumerate(towers_of(method).values()):
        values = torch.randn(len(POSITIONS) + 1, generator=torch.Generator().manual_seed(i))
        values[-1] = HIDDEN
        set_values(tower, values)
    return method


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def outputs_of(method, features: np.ndarray) -> np.ndarray:
    """Return the outputs of a linear ranker for rows of features, in float64."""
    layer = getattr(method.ranker, "ranker", method.ranker).output
    weight, bias = (p.detach().numpy().astype(np.float64) for p in (layer.weight, layer.bias))
    return features.astype(np.float64) @ weight.T + bias


def learned(method, log: Log, action: str) -> np.ndarray:
    """Return the rows that an action is learned from: clicked rows if the label uses clicks."""
    follows = method.after_click and action != "click" and "click" in method.inputs.label.actions
    return log.actions["click"] > 0 if follows else np.ones(log.rows, dtype=bool)


def scale_of(method, log: Log, action: str) -> float:
    return math.sqrt(np.mean(log.actions[action][learned(method, log, action)].astype(np.float64) ** 2))


def item_loss(method, log: Log, row: int, outputs: np.ndarray) -> float:
    """Compute the loss of one item from the definitions."""
    multiplies = not type(method).__name__.startswith("Sum")
    place = int(log.positions[row]) - 1
    at = {action: tower.table.values[place].item() for action, tower in towers_of(method).items()}
    actions = {name: float(values[row]) for name, values in log.actions.items()}
    if "label" in at:
        predicted = outputs[0] * sigmoid(at["label"]) if multiplies else outputs[0] + at["label"]
        return (predicted - (actions["click"] + actions["dwell"] / math.e**3)) ** 2
    total = 0.0
    for name, output in zip(method.inputs.label.actions, outputs, strict=True):
        if not learned(method, log, name)[row]:
            continue
        if name in BINARY:
            p = sigmoid(output)
            if name in at:
                p = p * sigmoid(at[name]) if multiplies else sigmoid(output + at[name])
            total -= math.log(p) if actions[name] else math.log(1 - p)
        else:
            predicted = softplus(output)
            if name in at:
                predicted = predicted * sigmoid(at[name]) if multiplies else predicted + at[name]
            scale = scale_of(method, log, name)
            total += (predicted - actions[name] / scale) ** 2
    return total


def written_out(method, log: Log, weights: np.ndarray) -> float:
    outputs = outputs_of(method, log.features)
    per_request = [
        sum(item_loss(method, log, row, outputs[row]) for row in range(first, last))
        for first, last in zip(log.offsets[:-1], log.offsets[1:], strict=True)
    ]
    return float(np.average(per_request, weights=weights))


@pytest.mark.parametrize(
    ("name", "options", "towers"),
    [
        ("sum-synthesize", {}, ["label"]),
        ("pal-synthesize", {}, ["label"]),
        ("sum-click", {}, ["click"]),
        ("pal-click", {}, ["click"]),
        ("pal-click-dwell", {}, ["click", "dwell"]),
        ("sum-click", {"towers": "all"}, ["click", "dwell"]),
        ("pal-click", {"towers": "dwell"}, ["dwell"]),
        ("pal-click", {"label": "click"}, ["click"]),
        ("sum-click", {"label": "dwell"}, ["dwell"]),
        ("pal-click", {"label": "dwell"}, ["dwell"]),
        ("pal-click", {"label": FOUR}, ["click"]),
        ("pal-click-dwell", {"label": FOUR}, ["click", "dwell", "like", "share"]),
        ("pal-click-dwell", {"label": FOUR, "rows": "all"}, ["click", "dwell", "like", "share"]),
        ("sum-click", {"rows": "all"}, ["click"]),
    ],
)
def test_losses_equal_explicit_sums(name, options, towers, log, lists):
    method = ready(name, log, **options)
    assert list(towers_of(method)) == towers
    expected = written_out(method, log, lists.weights.numpy().astype(np.float64))
    assert method.loss(lists).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("name", "label"), [("pal-click", "click"), ("sum-click", None), ("pal-click-dwell", None)])
def test_with_an_anchor_two_networks_learn_side_by_side(name, label, log, lists):
    """The loss is the sum of the losses of each network alone, and the score is that of their mean outputs."""
    label = Label() if label is None else Label(label)
    torch.manual_seed(0)
    method = make_method(name, inputs(label=label, ranker="mlp", ranker_options={"hidden": (8, 6)}), anchor="linear")
    method.eval().estimate_bias(log, user=None, sessions=0, seed=0)
    fit_encoders(method, log.features)
    network = method.ranker.ranker
    assert [layers[0].out_features for layers in network.layers] == [4, 4]
    actions, whole = len(label.actions), method.loss(lists)
    outputs = network(lists.features)
    alone = []
    for number in range(2):
        one = outputs[..., number * actions : (number + 1) * actions]
        method.ranker.ranker = Fixed(torch.cat([one, one], -1))
        alone.append(method.loss(lists) / 2)
    assert whole.item() == pytest.approx(sum(alone).item(), rel=1e-6)
    method.ranker.ranker = network
    mean = outputs.unflatten(-1, (2, actions)).mean(-2)
    expected = Synthesised(Fixed(mean if actions > 1 else mean.squeeze(-1)), label, BINARY)
    expected.scale.copy_(method.ranker.scale)
    torch.testing.assert_close(method.score(lists.features), expected(lists.features))


def test_an_anchor_starts_the_tower_s_actions_at_the_linear_model_of_the_log(log):
    method = make_method("pal-click", inputs(ranker="mlp", ranker_options={"hidden": (8,)}), anchor="linear")
    fit_encoders(method, log.features)
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    assert towers_of(method)["click"].table.values.abs().max() == 0  # towers start at zero without start=theta
    method.start_ranker(log, seed=0)
    network = method.ranker.ranker
    anchor = anchor_of_log(network.encoder, log, Label(), method.start, seed=0)
    x = network.encoder(torch.from_numpy(log.features)).double().numpy()
    click = x @ anchor.slopes + math.log(anchor.beta / (1 - anchor.beta))
    outputs = method.ranker.outputs(torch.from_numpy(log.features)).detach().numpy()
    for number in range(2):
        np.testing.assert_allclose(outputs[:, number, 0], click, rtol=1e-3, atol=1e-4)
        assert not outputs[:, number, 1].any()  # dwell has no tower


@pytest.mark.parametrize("changes", [{"variant": "released"}, {"ranker": "linear"}])
def test_an_anchor_needs_a_network_of_its_own(changes):
    ranker = changes.get("ranker", "mlp")
    options = {name: value for name, value in changes.items() if name != "ranker"}
    with pytest.raises(OptionError, match="anchor=linear cannot be used"):
        make_method("pal-click", inputs(ranker=ranker), anchor="linear", **options)


class Fixed(torch.nn.Module):
    """A ranker with these outputs."""

    def __init__(self, outputs: torch.Tensor) -> None:
        super().__init__()
        self.values = outputs

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.values


@pytest.mark.parametrize("name", [*SYNTHESIZE, *TASKS])
def test_scores_do_not_depend_on_the_tower(name, log, lists):
    method = ready(name, log)
    scores, loss = method.score(lists.features), method.loss(lists)
    for tower in towers_of(method).values():
        set_values(tower, torch.linspace(-1, 1, len(POSITIONS) + 1))
    assert not torch.equal(method.loss(lists), loss)
    assert torch.equal(method.score(lists.features), scores)
    assert torch.equal(method.serving()(lists.features), scores)
    assert not [key for key in method.serving().state_dict() if "tower" in key or "table" in key]


@pytest.mark.parametrize("label", ["click + dwell / exp(3)", FOUR, "click", "dwell"])
@pytest.mark.parametrize("name", TASKS)
def test_scores_are_the_label_of_the_predicted_actions(name, label, log):
    method = ready(name, log, label=label)
    actions = method.inputs.label.actions
    outputs = outputs_of(method, log.features)
    scale = scale_of(method, log, "dwell")
    predicted = {
        action: np.array([sigmoid(x) if action in BINARY else scale * softplus(x) for x in outputs[:, i]])
        for i, action in enumerate(actions)
    }
    click, dwell = predicted.get("click"), predicted.get("dwell")
    expected = {
        "click": lambda: click,
        "dwell": lambda: dwell,
        "click + dwell / exp(3)": lambda: click + dwell / math.e**3,
        FOUR: lambda: click + dwell / 20 + 2 * predicted["like"] + 3 * predicted["share"],
    }[label]()
    scores = method.score(torch.from_numpy(log.features)).detach().numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_every_action_of_the_label_is_predicted_and_learned(log, lists):
    method = ready("pal-click", log, label=FOUR)
    method.loss(lists).backward()
    learned = method.ranker.ranker.output.weight.grad.abs().sum(1)
    assert learned.shape == (4,)
    assert (learned > 0).all()
    before = method.score(lists.features)
    for i in range(4):
        with torch.no_grad():
            method.ranker.ranker.output.bias[i] += 1
        raised = method.score(lists.features)
        assert (raised > before).all()
        before = raised


def test_options_say_which_actions_have_a_tower():
    for name, options, towers in [
        ("sum-click", {}, {"click"}),
        ("pal-click", {"towers": "all"}, {"click", "dwell"}),
        ("pal-click", {"towers": "click+dwell"}, {"click", "dwell"}),
        ("pal-click", {"towers": "dwell"}, {"dwell"}),
        ("pal-click-dwell", {}, {"click", "dwell"}),
        ("pal-click-dwell", {"towers": "click"}, {"click"}),
    ]:
        assert set(towers_of(make_method(name, inputs(), **options))) == towers


@pytest.mark.parametrize("name", TASKS)
def test_an_action_can_have_any_name(name):
    label = Label("click + 2 * apply")
    method = make_method(name, inputs(label=label, binary=("click", "apply")), towers="all")
    assert set(towers_of(method)) == {"click", "apply"}


@pytest.mark.parametrize("name", [*SYNTHESIZE, *TASKS])
def test_context_can_be_numbers_and_categories(name):
    method = make_method(name, inputs(categories={3: 5}), context="f0+f1+device")
    for tower in towers_of(method).values():
        assert tower.context.numeric.tolist() == [0, 1]
        assert tower.context.categories == {3: 5}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sum-synthesize", "context=f0+device"),
        ("pal-click", "context=f1"),
        ("pal-click", "towers=all"),
        ("sum-click", "towers=click+dwell"),
        ("pal-click-dwell", "position_dropout=0.3"),
    ],
)
def test_options_read_from_text_make_the_same_method(name, text):
    key, _, value = text.partition("=")
    read = make_method(name, inputs(), **parse_options(name, {key: value}))
    assert str(read) == str(make_method(name, inputs(), **{key: value}))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sum-synthesize", {"context": "devise"}, "context 'devise' is not a feature.*did you mean 'device'"),
        ("pal-click", {"context": "f0+devise"}, "context 'devise' is not a feature.*did you mean 'device'"),
        ("pal-click", {"context": "f0,device"}, "context 'f0,device' is not a feature"),
        ("pal-click", {"towers": "dwel"}, "tower 'dwel' is not an action.*did you mean 'dwell'"),
        ("sum-click", {"towers": "click+dwel"}, "tower 'dwel' is not an action.*did you mean 'dwell'"),
        ("pal-click", {"towers": "share"}, "tower 'share' is not an action of the label; use one of click, dwell"),
        ("pal-click", {"tower": "all"}, "no option 'tower'; did you mean 'towers'"),
        ("sum-click", {"contexts": "f0"}, "no option 'contexts'; did you mean 'context'"),
        ("pal-synthesize", {"contxt": "f0"}, "no option 'contxt'; did you mean 'context'"),
        ("pal-click-dwell", {"position_droput": 0.1}, "did you mean 'position_dropout'"),
        ("sum-synthesize", {"towers": "all"}, "no option 'towers'; use one of context, position_dropout"),
    ],
)
def test_misspelt_names_are_rejected(name, options, message):
    with pytest.raises(OptionError, match=message):
        make_method(name, inputs(), **options)


@pytest.mark.parametrize("name", [*SYNTHESIZE, *TASKS])
def test_position_dropout_is_a_share_below_one(name):
    for value, message in [
        (1.0, "below 1"),
        (1.5, "below 1"),
        (-0.1, "at least 0"),
        ("nan", "below 1"),
        ("half", "a number"),
    ]:
        with pytest.raises(OptionError, match=f"'position_dropout' must be {message}"):
            make_method(name, inputs(), position_dropout=value)
    shares = {tower.hide.p for tower in towers_of(make_method(name, inputs())).values()}
    assert shares == {0.1 if name.startswith("sum") else 0.0}
    shares = {tower.hide.p for tower in towers_of(make_method(name, inputs(), position_dropout=0.4)).values()}
    assert shares == {0.4}


def shown_at(positions: torch.Tensor, features: torch.Tensor | None = None) -> Lists:
    features = torch.zeros(*positions.shape, FEATURES) if features is None else features
    return Lists(features, torch.ones_like(positions, dtype=torch.bool), torch.ones(len(positions)), positions)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5])
def test_dropout_hides_positions_only_in_training(dropout):
    torch.manual_seed(0)
    tower = Tower(inputs(), context=(), dropout=dropout)
    lists = shown_at(torch.arange(1, 13).repeat(400, 1))
    set_values(tower, torch.tensor([0.0] * 12 + [1.0]))
    hidden = tower.train()(lists)
    assert set(hidden.unique().tolist()) <= {0.0, 1.0}
    assert hidden.mean().item() == pytest.approx(dropout, abs=0.03)
    hidden.sum().backward()
    gradient = tower.table.weight.grad / POSITION_SPEED
    assert gradient[-1] == hidden.sum()
    assert gradient.sum() == hidden.numel()
    tower.zero_grad()
    served = tower.eval()(lists)
    assert not served.any()
    served.sum().backward()
    assert (tower.table.weight.grad / POSITION_SPEED).tolist() == [400.0] * 12 + [0.0]


@pytest.mark.parametrize("name", [*SYNTHESIZE, *TASKS])
def test_the_hidden_position_is_learned_only_in_training(name, log, lists):
    for training in (True, False):
        torch.manual_seed(0)
        method = make_method(name, inputs(), position_dropout=0.5).train(training)
        method.loss(lists).backward()
        for tower in towers_of(method).values():
            assert bool(tower.table.weight.grad[-1].any()) == training
            assert tower.table.weight.grad[:-1].any()


def test_towers_start_at_zero_and_context_distinguishes_devices():
    features = torch.zeros(1, 4, FEATURES)
    features[0, :, 3] = torch.tensor([1.0, 2.0, 1.0, 1.0])
    features[0, 2, 1] = 5.0
    lists = shown_at(torch.tensor([[3, 3, 3, 7]]), features)
    for context in ((), ("device",)):
        torch.manual_seed(0)
        tower = Tower(inputs(categories={3: 4}), context=context, dropout=0.0).eval()
        assert not tower(lists).any()
        torch.nn.init.normal_((tower.output if context else tower.table).weight)
        first, other_device, other_feature, other_position = tower(lists)[0].tolist()
        assert (first != other_device) == bool(context)
        assert first == pytest.approx(other_feature, rel=1e-6)
        assert first != other_position


def test_positions_never_seen_count_as_the_nearest():
    tower = Tower(inputs(positions=(3, 70, 500)), context=(), dropout=0.0)
    set_values(tower, torch.tensor([1.0, 2.0, 3.0, HIDDEN]))
    assert tower(shown_at(torch.tensor([[0, 3, 60, 400, 9999]]))).tolist() == [[1.0, 1.0, 2.0, 3.0, 3.0]]


@pytest.mark.parametrize("name", [*SYNTHESIZE, *TASKS])
def test_the_report_has_the_towers_by_position(name, log, lists):
    method = ready(name, log)
    report = method.bias([lists])
    assert report["positions"] == list(POSITIONS)
    assert report["tower"] == ("adds" if name.startswith("sum") else "multiplies")
    assert set(report["towers"]) == set(towers_of(method))
    for action, tower in towers_of(method).items():
        values = tower.table.values[:-1]
        values = values if name.startswith("sum") else values.sigmoid()
        assert report["towers"][action] == pytest.approx(values.tolist(), abs=1e-5)


def test_the_report_averages_a_tower_with_context_over_the_rows_shown(log, lists):
    torch.manual_seed(0)
    method = make_method("sum-click", inputs(), context="f0").eval()
    tower = towers_of(method)["click"]
    torch.nn.init.normal_(tower.output.weight)
    found, places = tower(lists).detach()[lists.where], lists.positions[lists.where]
    expected = [float(found[places == k].double().mean()) for k in POSITIONS]
    assert method.bias([lists])["towers"]["click"] == pytest.approx(expected, abs=2e-5)


def test_the_scale_of_actions_is_the_root_of_their_mean_square(log):
    method = make_method("pal-click", inputs(label=Label(FOUR)))
    assert method.ranker.scale.tolist() == [1.0] * 4
    method.estimate_bias(log, user=None, sessions=0, seed=0)
    scale = scale_of(method, log, "dwell")
    assert method.ranker.scale.tolist() == pytest.approx([1.0, scale, 1.0, 1.0])
    shown, user = make_shown_log(requests=200, features=FEATURES), User()
    method = make_method("pal-click", inputs())
    method.estimate_bias(shown, user=user, sessions=0, seed=0)
    drawn = simulate_log(shown, user, sessions=10_000, seed=3)[0].actions["dwell"].astype(np.float64)
    assert method.ranker.scale.tolist() == pytest.approx([1.0, math.sqrt(np.mean(drawn[drawn > 0] ** 2))], rel=0.2)


@pytest.mark.parametrize("name", TASKS)
def test_a_label_of_missing_actions_is_rejected(name, log):
    shown = make_shown_log(features=FEATURES)
    method = make_method(name, inputs(label=Label("click + 2 * like"), binary=("click",)))
    with pytest.raises(LabelError, match="needs the action 'like'"):
        method.estimate_bias(shown, user=User(), sessions=0, seed=0)
    method = make_method(name, inputs(label=Label("click + 2 * save"), binary=("click",)))
    with pytest.raises(LabelError, match="needs the action 'save'"):
        method.estimate_bias(log, user=None, sessions=0, seed=0)


def test_towers_need_feedback():
    for name in (*SYNTHESIZE, *TASKS):
        with pytest.raises(OptionError, match="true labels have none"):
            make_method(name, inputs(truth=True))


@pytest.fixture
def log_path(tmp_path):
    """Write a log with the device as a category."""
    log, _ = simulate_log(make_shown_log(requests=60), User())
    devices = np.random.default_rng(0).choice(["phone", "desk", "tv"], log.rows)
    table = log.to_table().drop(["relevance"])
    pq.write_table(table.append_column("device", pa.array(devices)), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


def config(path, **changes) -> Config:
    given = {
        "method": "pal-click",
        "method_options": {"context": "device+f0", "towers": "all", "position_dropout": 0.2},
        "columns": {"categorical": "device"},
        "ranker": "mlp",
        "hidden": (8,),
        "steps": 10,
        "batch": 16,
        "evaluate_every": 5,
        "device": "cpu",
    }
    return make_config(str(path), **{**given, **changes})


@pytest.mark.parametrize("anchor", ["none", "linear"])
@pytest.mark.parametrize(("label", "categorical"), [("click + dwell / exp(3)", True), ("click", False)])
def test_a_run_is_loaded_with_the_scores_it_had(label, categorical, anchor, log_path, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(runs, "combine", lambda *args: kept.append(combine(*args)) or kept[0])
    changes = {"method_options": {"context": "device+f0", "towers": "all", "position_dropout": 0.2, "anchor": anchor}}
    if not categorical:
        changes = {"columns": {}, "method_options": {"context": "f0", "anchor": anchor}}
    run = run_training(config(log_path, label=label, **changes), tmp_path / "run")
    log = read_log(log_path, **({"categorical": "device"} if categorical else {}))
    assert bool(log.vocabularies) == categorical
    scores = load_model(run).score(log)
    np.testing.assert_array_equal(scores, score_rows(kept[0].ranker, log.features, device="cpu"))
    assert np.unique(scores).size > 10
    assert (scores > 0).all()


def test_a_run_can_start_from_itself(log_path, tmp_path):
    first = run_training(config(log_path), tmp_path / "one")
    barely = config(log_path, steps=1, evaluate_every=1, lr=1e-9, warm_start=str(first))
    second = run_training(barely, tmp_path / "two")
    log = read_log(log_path, categorical="device")
    np.testing.assert_allclose(load_model(second).score(log), load_model(first).score(log), rtol=1e-4, atol=1e-5)


def test_a_stopped_run_resumes_to_the_same_bits(log_path, tmp_path):
    class StoppedError(Exception):
        pass

    def stop(progress):
        if progress.step == 5:
            raise StoppedError

    whole = run_training(config(log_path), tmp_path / "whole")
    with pytest.raises(StoppedError):
        listeners = Listeners(on_progress=stop, checkpoint_seconds=0)
        run_training(config(log_path), tmp_path / "run", listeners=listeners)
    resumed = run_training(config(log_path), tmp_path / "run", resume=True)
    for name in ("model/weights.safetensors", "bias.json", "metrics.jsonl"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_a_label_that_users_do_not_have_leaves_no_run(tmp_path, monkeypatch):
    shown = make_shown_log()
    data = Data(shown, shown, "tiny", User(), User(), "click + share")
    monkeypatch.setattr(runs, "load_run_data", lambda *_, **__: data)
    users = config("tiny", users="pbm", label="click + share", select="ndcg@10", method_options={}, columns={})
    with pytest.raises(LabelError, match="needs the action 'share'"):
        run_training(users, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_multiplying_tower_learns_how_often_positions_are_examined():
    user = User(examination=(0.8, *[0.2] * 11), dwell=None, attraction=(0.5,))
    log, _ = simulate_log(make_shown_log(requests=600, seed=1), user)
    torch.manual_seed(0)
    given = inputs(label=Label("click"), features=3, feature_names=log.feature_names)
    options = TrainingOptions(lr=0.5, device="cpu")
    state = start(make_method("pal-click", given), log, options)
    everything = Lists.from_log(log)
    for _ in range(60):
        take_step(state, everything, options)
    first, *others = state.method.bias([everything])["towers"]["click"]
    assert first / np.mean(others) == pytest.approx(4, rel=0.2)


SMALL = st.floats(-8, 8)
LARGE = st.floats(-80, 80, width=32)


@given(st.lists(st.tuples(SMALL, SMALL, st.floats(0, 1)), min_size=1, max_size=5))
def test_the_product_loss_is_the_naive_one_if_that_is_stable(rows):
    a, b, target = (torch.tensor([column], dtype=torch.float64) for column in zip(*rows, strict=True))
    expected = 0.0
    for x, y, t in rows:
        p = sigmoid(x) * sigmoid(y)
        expected -= t * math.log(p) + (1 - t) * math.log(1 - p)
    where = torch.ones_like(a, dtype=torch.bool)
    assert product_logistic_loss(a, b, target, where=where).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.lists(st.tuples(LARGE, LARGE, st.sampled_from([0.0, 0.3, 1.0])), min_size=1, max_size=5))
def test_the_product_loss_is_finite_at_large_logits(rows):
    a, b, target = (torch.tensor([column]) for column in zip(*rows, strict=True))
    a.requires_grad_()
    b.requires_grad_()
    loss = product_logistic_loss(a, b, target, where=torch.ones_like(a, dtype=torch.bool))
    gradients = torch.autograd.grad(loss, (a, b))
    assert torch.isfinite(loss)
    assert loss >= 0
    assert all(torch.isfinite(g).all() and (g.abs() <= 1 + 1e-6).all() for g in gradients)


@pytest.mark.parametrize("x", [20.0, 40.0, 80.0])
def test_nothing_cancels_if_both_are_near_one(x):
    """1 - sigmoid(x)² is 2 exp(-x) for large x."""
    a = torch.tensor([[x]], requires_grad=True)
    loss = product_logistic_loss(a, torch.tensor([[x]]), torch.zeros(1, 1), where=torch.ones(1, 1, dtype=torch.bool))
    assert loss.item() == pytest.approx(x - math.log(2), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, a)
    assert gradient.item() == pytest.approx(0.5, rel=1e-5)


def test_all_methods_of_towers_are_tested_here():
    assert {name for name, method in METHODS.items() if hasattr(method, "MULTIPLIES")} == {*SYNTHESIZE, *TASKS}
