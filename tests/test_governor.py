"""The governor keeps lookahead where it is faster, drops it where it is not, and looks again."""

from __future__ import annotations

import pytest

from lesonnx.governor import HOLD_STEPS, MARGIN, TRIAL_STEPS, Governor

ROUND = 2 * TRIAL_STEPS + HOLD_STEPS


def steps(governor: Governor, count: int, with_it: float, without: float) -> list[bool]:
    """Run steps of which each takes what its side takes; which of them looked ahead."""
    looked = []
    for _ in range(count):
        looked.append(governor.wants())
        governor.took(with_it if looked[-1] else without)
    return looked


@pytest.mark.parametrize(("with_it", "without", "expected"), [(1.0, 1.2, True), (1.2, 1.0, False)])
def test_holds_what_is_faster(with_it: float, without: float, expected: bool) -> None:
    looked = steps(Governor(), ROUND, with_it, without)
    assert looked[: 2 * TRIAL_STEPS] == [True, False] * TRIAL_STEPS
    assert looked[2 * TRIAL_STEPS :] == [expected] * HOLD_STEPS


def test_near_ties_change_nothing() -> None:
    assert all(steps(Governor(), ROUND, 1.0 + MARGIN / 2, 1.0)[2 * TRIAL_STEPS :])


def test_looks_again() -> None:
    governor = Governor()
    assert not steps(governor, ROUND, 1.3, 1.0)[-1]
    assert steps(governor, ROUND, 1.0, 1.3)[-1]


def test_an_outlier_does_not_decide() -> None:
    governor = Governor()
    for step in range(2 * TRIAL_STEPS):
        governor.took(50.0 if step == 0 else 1.0 if governor.wants() else 1.1)
    assert governor.wants()


def test_losing_side_costs_little() -> None:
    """Where lookahead loses by 12 %, a long run is within 2 % of going without."""
    looked = steps(Governor(), 10 * ROUND, 1.12, 1.0)
    assert sum(1.12 if ahead else 1.0 for ahead in looked) < 1.02 * len(looked)
