"""The learning rate over a run, counted in updates."""

import pytest

from snugtune.config import TrainingSettings
from snugtune.training.schedule import learning_rate


def rates(total, **settings):
    values = TrainingSettings(**{"learning_rate": 1.0, **settings})
    return [learning_rate(values, applied=n, total=total) for n in range(total + 1)]


def test_linear_decay_ends_one_update_after_the_last():
    got = rates(6, warmup_fraction=0.0)
    assert got == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])


def test_warm_up_rises_from_the_first_update_to_the_full_rate():
    got = rates(100, warmup_fraction=0.06)
    assert got[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert max(got) == got[5] == got[6]
    assert got[99] > 0
    assert got[100] == 0


def test_a_cosine_is_half_way_down_in_the_middle_and_a_constant_stays():
    assert rates(10, warmup_fraction=0.0, schedule="cosine")[5] == pytest.approx(0.5)
    assert rates(10, warmup_fraction=0.0, schedule="constant")[:10] == [1.0] * 10


@pytest.mark.parametrize("total", [1, 2, 3])
def test_the_shortest_runs_have_rates_above_zero(total):
    assert all(rate > 0 for rate in rates(total)[:total])
