import pytest

from vlarl.proportions import Paired, Rate, mean_rate


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_has_the_published_values(k, n, low, high):
    assert Rate(k, n).interval == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_is_exact_at_the_ends():
    # k = 0: the upper limit is z^2 / (n + z^2), z = 1.959964.
    assert Rate(0, 10).interval == (0.0, pytest.approx(3.841459 / 13.841459, abs=1e-6))
    assert Rate(10, 10).interval == (pytest.approx(10 / 13.841459, abs=1e-6), 1.0)


@pytest.mark.parametrize(("k", "n"), [(1, 0), (0, 0), (-1, 3), (4, 3)])
def test_a_rate_is_k_of_n(k, n):
    with pytest.raises(AssertionError):
        Rate(k, n)


def test_mean_of_one_rate_is_the_rate():
    mean, interval = mean_rate([Rate(3, 10)])
    assert mean == pytest.approx(0.3)
    assert interval == pytest.approx(Rate(3, 10).interval)


def test_mean_of_four_equal_rates_is_twice_as_sharp():
    rate = Rate(5, 10)
    mean, (low, high) = mean_rate([rate] * 4)
    assert mean == 0.5
    assert mean - low == pytest.approx((0.5 - rate.interval[0]) / 2)
    assert high - mean == pytest.approx((rate.interval[1] - 0.5) / 2)


@pytest.mark.parametrize(
    ("counts", "difference", "low", "high"),
    [
        # (both, only A, only B, neither). First: Newcombe, Statistics in Medicine 17 (1998)
        # 2635-2650, table III, method 10. Others: Fagerland, Lydersen, Laake, Statistical Analysis
        # of Contingency Tables (2017), chapter 8, the examples of Bentur 2009 and Cavo 2012.
        ((36, 2, 12, 0), 0.2, 0.0569, 0.3404),
        ((1, 7, 1, 12), -6 / 21, -0.5069, -0.0256),
        ((59, 16, 6, 80), -0.0621, -0.1186, -0.0046),
    ],
)
def test_paired_interval_has_the_published_values(counts, difference, low, high):
    both, only_a, only_b, neither = counts
    paired = Paired(both=both, only_a=only_a, only_b=only_b, neither=neither)
    assert paired.difference == pytest.approx(difference, abs=5e-5)
    assert paired.interval == pytest.approx((low, high), abs=5e-5)


def test_mcnemar_p_value_by_hand():
    # 9 of 10 discordant pairs on one side: 2 * (C(10,0) + C(10,1)) / 2^10 = 22 / 1024.
    assert Paired(both=5, only_a=1, only_b=9, neither=5).p_value == pytest.approx(22 / 1024)
    # 2 of 2: 2 * 1 / 4; concordant pairs do not matter.
    assert Paired(both=0, only_a=0, only_b=2, neither=90).p_value == pytest.approx(0.5)
    assert Paired(both=3, only_a=0, only_b=0, neither=4).p_value == 1.0
    # An even split cannot be more equal.
    assert Paired(both=0, only_a=4, only_b=4, neither=0).p_value == pytest.approx(1.0)


def test_difference_is_b_minus_a():
    paired = Paired(both=2, only_a=1, only_b=5, neither=2)
    assert paired.a == Rate(3, 10)
    assert paired.b == Rate(7, 10)
    assert paired.difference == pytest.approx(0.4)
