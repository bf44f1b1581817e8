"""Seed, relative and row against the naive formulas in float64, whole tensors and experts; and what cancels."""

import pytest
import torch

from qdeepseek.compensate.history import observe_, update_
from qdeepseek.compensate.relative import Relative
from qdeepseek.compensate.row import Row
from qdeepseek.compensate.seed import Seed
from qdeepseek.compensate.tokens import PerExpert, Whole
from tests.compensate import naive

E, S, C = 5, 40, 8
POINTS = ["embedding", "down", "up"]


def gradient(*shape, scale=1.0, seed=0):
    g = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return g * scale + 0.3 * scale


def rows_of_experts(seed=0, sort=False):
    """Experts 0, 1, 2, 4 with unequal numbers of rows, 3 with none, and different sizes of gradient."""
    expert = torch.multinomial(
        torch.tensor([0.5, 0.2, 0.2, 0.0, 0.1]), S, True, generator=torch.Generator().manual_seed(1)
    )
    expert = expert.sort().values if sort else expert
    return gradient(S, C, seed=seed) * (0.05 * 4.0 ** expert[:, None]), expert


def nothing(groups):
    return torch.full((groups, 2), torch.nan, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(2, 7, C), (9, C)])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("size", [1e-3, 0.02, 1.0])
def test_whole_tensors_equal_the_formulas(point, shape, size):
    g = gradient(*shape, scale=size)
    cases = [
        (Seed(), nothing(1), naive.seed(point, g)),
        (Relative(), nothing(1), naive.relative(point, g, None)),
        (Relative(), torch.tensor([[0.03, 0.0004]]).double(), naive.relative(point, g, (0.03, 0.0004))),
        (Row(), nothing(1), naive.row(point, g)),
        (Row(width=4), nothing(1), naive.row(point, g, 4)),
    ]
    for rule, usual, (expected, fired, factor) in cases:
        found = rule(point, g, Whole(), usual)
        torch.testing.assert_close(found.grad, expected, rtol=1e-12, atol=1e-15)
        assert found.fired.tolist() == pytest.approx([fired]) and found.factor.tolist() == pytest.approx([factor])


def test_both_sides_of_each_condition_were_seen():
    for rule, kwargs in ((naive.seed, {}), (naive.relative, {"usual": (0.03, 0.0004)})):
        for point in ("down", "up"):
            fired = {rule(point, gradient(2, 7, C, scale=s), **kwargs)[1] for s in (1e-3, 0.02, 1.0)}
            assert fired == {0.0, 1.0}, (rule, point)


@pytest.mark.parametrize("sort", [True, False], ids=["sorted by expert", "by token"])
@pytest.mark.parametrize("point", POINTS)
def test_experts_equal_a_loop_over_experts(point, sort):
    g, expert = rows_of_experts(sort=sort)
    tokens = PerExpert(expert, E)
    usual = torch.stack([torch.linspace(0.02, 4, E), torch.linspace(0.001, 9, E)], -1).double()
    cases = [
        (Seed(), naive.per_expert(naive.seed, point, g, expert, E)),
        (Relative(), naive.per_expert(naive.relative, point, g, expert, E, usual)),
        (Row(), naive.per_expert(naive.row, point, g, expert, E)),
    ]
    for rule, (expected, fired, factor) in cases:
        found = rule(point, g, tokens, usual)
        torch.testing.assert_close(found.grad, expected, rtol=1e-12, atol=1e-15)
        assert set(fired) == {0, 1, 2, 4}
        assert {e: float(found.fired[e]) for e in fired} == pytest.approx(fired)
        assert {e: float(found.factor[e]) for e in factor} == pytest.approx(factor)
        assert found.grad.isfinite().all() and found.factor.isfinite().all()


def test_rows_of_another_rank_reach_no_sum():
    """Expert parallelism: ids >= E, whose gradient is uninitialised memory."""
    g, expert = rows_of_experts()
    mine = expert != 4
    poisoned = torch.where(mine[:, None], g, torch.nan)
    usual = torch.tensor([[0.02, 9.0]] * E).double()
    for rule in (Seed(), Relative(), Row()):
        for point in POINTS:
            found = rule(point, poisoned, PerExpert(torch.where(mine, expert, E + 3), E), usual)
            expected = rule(point, g[mine], PerExpert(expert[mine], E), usual)
            torch.testing.assert_close(found.grad[mine], expected.grad, rtol=1e-12, atol=0)
            torch.testing.assert_close(found.observed, expected.observed)


def test_zero_gradients_stay_zero_and_finite():
    zero = torch.zeros(2, 3, C)
    for rule in (Seed(), Relative(), Row(), Row(width=2)):
        for point in POINTS:
            found = rule(point, zero, Whole(), torch.zeros(1, 2))
            assert torch.equal(found.grad, zero) and found.factor.isfinite().all()


@pytest.mark.parametrize("rule", [Relative(), Row(), Row(width=2)], ids=str)
def test_the_size_of_the_loss_changes_nothing(rule):
    g = gradient(2, 7, C)
    usual = torch.tensor([[0.5, 3.0]]).double()
    for point in POINTS:
        scaled = rule(point, g * 2.0**-9, Whole(), usual * torch.tensor([2.0**-9, 2.0**-18]))
        assert torch.equal(scaled.grad, rule(point, g, Whole(), usual).grad * 2.0**-9)


def test_row_turns_the_gradient_and_keeps_its_length():
    g, expert = rows_of_experts()
    weight = torch.randn(S, 3, dtype=torch.float64)
    for tokens in (Whole(), PerExpert(expert, E)):
        found = Row(down=0.5)("down", g, tokens, nothing(1)).grad
        torch.testing.assert_close(tokens.sum(found.square().sum(-1)), tokens.sum(g.square().sum(-1)))
        assert torch.cosine_similarity((found.T @ weight).flatten(), (g.T @ weight).flatten(), 0) < 0.999
    even = torch.ones(4, C, dtype=torch.float64)
    torch.testing.assert_close(Row()("down", even, Whole(), nothing(1)).grad, even, rtol=1e-15, atol=0)


def test_a_constant_factor_is_cancelled_by_adam():
    """The claim of seed.py: eps 0, any positive factor per element."""
    torch.manual_seed(0)
    grads, factor = torch.randn(20, 3, 4, dtype=torch.float64), 1 + 0.12 * torch.randn(3, 4, dtype=torch.float64).tanh()
    ends = []
    for c in (1.0, factor):
        w = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
        adam = torch.optim.AdamW([w], lr=0.1, eps=0.0, weight_decay=0.0)
        for g in grads:
            w.grad = g * c
            adam.step()
        ends.append(w.detach())
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def test_seed_factor_is_bounded_by_the_gradient():
    g = gradient(2, 7, C, scale=1e-5)
    for point, alpha in naive.ALPHA.items():
        change = (Seed()(point, g, Whole(), nothing(1)).grad - g).abs()
        assert bool((change <= alpha * g.mean(-2).abs().max() * g.abs() * (1 + 1e-9)).all())


def test_history_is_the_mean_of_a_step_then_an_exponential_mean():
    usual = torch.full((3, 2), torch.nan)
    steps = [[(1.0, 2.0), (3.0, 4.0)], [(5.0, 6.0)], []]
    for observed in steps:
        total = torch.zeros(3, 3)
        for o in observed:  # group 2 never has rows, group 1 sees a NaN as well
            observe_(total, torch.tensor([o, o, (9.0, 9.0)]), torch.tensor([1.0, 1.0, 0.0]))
            observe_(total, torch.tensor([o, (torch.nan, 1.0), o]), torch.tensor([1.0, 1.0, 0.0]))
        update_(usual, total, 0.9)
    expected = torch.tensor([0.9 * 2 + 0.1 * 5, 0.9 * 3 + 0.1 * 6])
    torch.testing.assert_close(usual[0], expected)
    torch.testing.assert_close(usual[1], expected)
    assert usual[2].isnan().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Relative(ratio=0), "ratio 0 must be positive"),
        (lambda: Row(up=1.0), r"up 1.0 must lie in \(-1, 1\)"),
        (lambda: Row(width=0), "width 0 must be at least 1"),
        (lambda: Row(width=3)("up", torch.ones(2, C), Whole(), nothing(1)), "width 3 does not divide the 8 channels"),
    ],
)
def test_wrong_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()
