"""The allocator: never above the bytes, and as good as trying everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lesonnx.errors import InputError
from lesonnx_export.allocate import Option, allocate

OPTIONS = st.lists(st.builds(Option, st.integers(0, 40), st.integers(0, 1000).map(float)), min_size=1, max_size=5)
GROUPS = st.lists(OPTIONS, min_size=1, max_size=5)


def total(groups: list[list[Option]], numbers: tuple[int, ...] | list[int]) -> tuple[float, int]:
    """Loss and bytes of a choice."""
    chosen = [options[number] for options, number in zip(groups, numbers, strict=True)]
    return sum(option.loss for option in chosen), sum(option.cost_bytes for option in chosen)


def by_trying(groups: list[list[Option]], most_bytes: int) -> tuple[float, int]:
    """The least loss that fits, and the fewest bytes that reach it."""
    every = itertools.product(*(range(len(options)) for options in groups))
    return min(pair for numbers in every if (pair := total(groups, numbers))[1] <= most_bytes)


@given(GROUPS, st.integers(0, 100), st.sampled_from([1, 3, 4096]))
@settings(max_examples=300, deadline=None)
def test_as_good_as_trying_everything(groups: list[list[Option]], spare: int, page: int) -> None:
    groups = [[Option(option.cost_bytes * page, option.loss) for option in options] for options in groups]
    most = sum(min(option.cost_bytes for option in options) for options in groups) + spare * page // 2
    assert total(groups, allocate(groups, most)) == by_trying(groups, most)


@given(GROUPS, st.integers(0, 100), st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_coarse_steps_keep_the_bytes_and_leave_none_that_help(
    groups: list[list[Option]], spare: int, units: int
) -> None:
    most = sum(min(option.cost_bytes for option in options) for options in groups) + spare
    numbers = allocate(groups, most, units)
    loss, cost = total(groups, numbers)
    assert cost <= most
    for place, options in enumerate(groups):
        for number in range(len(options)):
            other = total(groups, [*numbers[:place], number, *numbers[place + 1 :]])
            assert other[1] > most or other[0] >= loss


def test_many_steps_come_close() -> None:
    """Costs that share no unit, more of them than steps: within the loss of a few steps of the exact choice."""
    groups = [
        [Option(1_000_003 * bits + 17 * place, (place % 7 + 1) * 4.0**-bits) for bits in (2, 4, 8)]
        for place in range(48)
    ]
    most = sum(options[1].cost_bytes for options in groups) * 3 // 4
    fine, coarse = (total(groups, allocate(groups, most, units)) for units in (1 << 16, 1 << 10))
    assert max(fine[1], coarse[1]) <= most
    assert fine[0] <= coarse[0] <= fine[0] * 1.02


def test_more_bytes_never_cost_more() -> None:
    groups = [[Option(3, 9.0), Option(5, 4.0), Option(9, 1.0)], [Option(2, 7.0), Option(4, 6.5), Option(8, 0.0)]]
    losses = [total(groups, allocate(groups, most))[0] for most in range(5, 20)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == 16.0
    assert losses[-1] == 1.0


def test_what_does_not_fit_names_the_least() -> None:
    with pytest.raises(InputError, match="1,023 bytes of experts are asked for, they take at least 1,024"):
        allocate([[Option(1024, 1.0), Option(2048, 0.0)]], 1023)


@pytest.mark.parametrize("groups", [[], [[]], [[Option(1, float("nan"))]], [[Option(1, 0.0), Option(2, float("inf"))]]])
def test_what_is_no_input(groups: list[list[Option]]) -> None:
    with pytest.raises(ValueError, match=r"option|finite"):
        allocate(groups, 10)
