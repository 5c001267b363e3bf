"""The slot allocator: plans within the budget, places that never overlap, budgets that shrink and return."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lesonnx.allocator import PAGE_BYTES, SLAB_BYTES, SizeClass, SlotAllocator, plan_slots
from lesonnx.errors import BudgetError

MIB = 1 << 20


@st.composite
def size_classes(draw: st.DrawFn) -> list[SizeClass]:
    sizes = sorted(draw(st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True)))
    counts = [(draw(st.integers(0, 30)), draw(st.integers(0, 5))) for _ in sizes]
    return [SizeClass(size * PAGE_BYTES, r, p or (r == 0)) for size, (r, p) in zip(sizes, counts, strict=True)]


@settings(max_examples=300, deadline=None)
@given(classes=size_classes(), at_once=st.integers(1, 8), spare=st.integers(0, 2000))
def test_a_plan_keeps_to_the_budget_and_serves_the_largest(classes: list[SizeClass], at_once: int, spare: int) -> None:
    budget = classes[-1].slot_bytes + spare * PAGE_BYTES
    slots = plan_slots(budget, classes, at_once)
    assert sum(n * c.slot_bytes for n, c in zip(slots, classes, strict=True)) <= budget
    assert slots[-1] >= 1
    if budget >= sum((c.routed + c.pinned) * c.slot_bytes for c in classes):
        assert slots == [c.routed + c.pinned for c in classes]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), classes=size_classes(), at_once=st.integers(1, 8))
def test_slots_never_overlap_and_budgets_are_kept(data: st.DataObject, classes: list[SizeClass], at_once: int) -> None:
    largest = classes[-1].slot_bytes + data.draw(st.integers(0, 300)) * PAGE_BYTES
    slab_bytes = classes[-1].slot_bytes * data.draw(st.integers(1, 6))
    allocator = SlotAllocator(classes, at_once, largest, slab_bytes)
    budget = largest
    taken: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["take", "take", "take", "release", "resize"]))
        if what == "take":
            size_class = data.draw(st.integers(0, len(classes) - 1))
            had = allocator.has_free(size_class)
            slot = allocator.take(size_class)
            assert had == (slot >= 0)
            if slot >= 0:
                assert slot not in taken
                assert not allocator.retired(slot)
                assert allocator.class_of[slot] >= size_class
                taken[slot] = size_class
        elif what == "release" and taken:
            slot = data.draw(st.sampled_from(sorted(taken)))
            del taken[slot]
            allocator.release(slot)
        elif what == "resize":
            budget = data.draw(st.integers(classes[-1].slot_bytes, largest + 10 * PAGE_BYTES))
            beyond = allocator.resize(budget)
            assert beyond == sorted(slot for slot in taken if allocator.retired(slot))
        spans = sorted((*allocator.place[slot], classes[allocator.class_of[slot]].slot_bytes) for slot in taken)
        slabs = allocator.slabs()
        for slab, offset, length in spans:
            assert offset + length <= slabs[slab].length_bytes <= slab_bytes
        for (slab, offset, length), (next_slab, next_offset, _) in itertools.pairwise(spans):
            assert slab != next_slab or offset + length <= next_offset
        late = sum(classes[allocator.class_of[slot]].slot_bytes for slot in taken if allocator.retired(slot))
        assert allocator.committed_bytes() <= budget + late


def test_one_size_is_a_list_of_slots() -> None:
    allocator = SlotAllocator([SizeClass(3 * PAGE_BYTES, 100, 0)], 2, 31 * PAGE_BYTES)
    slots = [allocator.take(0) for _ in range(11)]
    assert slots == [*range(10), -1]
    assert [allocator.place[slot] for slot in slots[:2]] == [(0, 0), (0, 3 * PAGE_BYTES)]
    allocator.release(4)
    allocator.release(2)
    assert allocator.take(0) == 2
    assert allocator.slabs()[0].length_bytes == 30 * PAGE_BYTES


def test_slabs_hold_whole_slots_and_end_at_one_gibibyte() -> None:
    allocator = SlotAllocator([SizeClass(300 * MIB, 8, 0)], 2, 8 * 300 * MIB)
    assert [slab.length_bytes for slab in allocator.slabs()] == [900 * MIB, 900 * MIB, 600 * MIB]
    assert allocator.place[3] == (1, 0)
    with pytest.raises(BudgetError, match="does not fit a slab"):
        SlotAllocator([SizeClass(SLAB_BYTES + PAGE_BYTES, 8, 0)], 1, 1 << 40)


def test_every_layer_can_hold_the_same_share() -> None:
    # 100 small experts and 100 twice as large, half the bytes that all need: half of each, within a slot.
    classes = [SizeClass(2 * PAGE_BYTES, 100, 0), SizeClass(4 * PAGE_BYTES, 100, 0)]
    small, large = plan_slots(300 * PAGE_BYTES, classes, 4)
    assert abs(small - 49) <= 1
    assert abs(large - 51) <= 1


def test_pinned_experts_have_their_own_slots_unless_the_budget_is_too_small() -> None:
    classes = [SizeClass(PAGE_BYTES, 64, 0), SizeClass(4 * PAGE_BYTES, 0, 8)]
    assert plan_slots(60 * PAGE_BYTES, classes, 4) == [28, 8]
    assert plan_slots(12 * PAGE_BYTES, classes, 4)[1] >= 1
    assert plan_slots(7 * PAGE_BYTES, classes, 4) == [0, 1]
    with pytest.raises(BudgetError, match="one expert takes 16384 bytes"):
        plan_slots(3 * PAGE_BYTES, classes, 4)


def test_a_smaller_budget_frees_the_ends_and_a_larger_one_returns_them() -> None:
    allocator = SlotAllocator([SizeClass(PAGE_BYTES, 10, 0)], 2, 4 * PAGE_BYTES)
    slots = [allocator.take(0) for _ in range(4)]
    assert allocator.resize(2 * PAGE_BYTES) == [2, 3]
    assert allocator.slabs()[0].length_bytes == 4 * PAGE_BYTES
    for slot in slots:
        allocator.release(slot)
    assert allocator.slabs()[0].length_bytes == 2 * PAGE_BYTES
    assert allocator.committed_bytes() == 2 * PAGE_BYTES
    assert [allocator.take(0) for _ in range(3)] == [1, 0, -1]
    allocator.resize(1 << 40)
    assert [allocator.take(0) for _ in range(3)] == [2, 3, -1]
    assert allocator.slabs()[0].length_bytes == 4 * PAGE_BYTES


@pytest.mark.parametrize("sizes", [[], [0], [PAGE_BYTES + 1], [2 * PAGE_BYTES, PAGE_BYTES], [PAGE_BYTES, PAGE_BYTES]])
def test_sizes_are_whole_pages_and_ascend(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must ascend|whole number of pages"):
        SlotAllocator([SizeClass(size, 1, 0) for size in sizes], 1, 1 << 30)
