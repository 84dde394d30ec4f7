"""Flat buffers: where tensors lie, that they are the same memory, and how lists are cut in buckets."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rankloom.shard.flat import ALIGN, FlatBuffer, by_dtype, cut_into_buckets, lay_out, move_into

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(torch.Size), min_size=1, max_size=6)


@given(SHAPES, st.sampled_from([1, 2, 4, 8, 16]))
def test_slots_follow_each_other_aligned_and_without_overlap(shapes, itemsize):
    slots, total = lay_out({str(n): shape for n, shape in enumerate(shapes)}, itemsize)
    assert [slot.name for slot in slots] == [str(n) for n in range(len(shapes))]
    for before, after in itertools.pairwise(slots):
        assert before.end <= after.start < before.end + ALIGN // itemsize
    for slot, shape in zip(slots, shapes):
        assert slot.start * itemsize % ALIGN == 0 and slot.end - slot.start == shape.numel()
    assert slots[-1].end <= total < slots[-1].end + ALIGN and total * itemsize % ALIGN == 0


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 20))
def test_buckets_keep_the_order_hold_everything_once_and_stay_within_the_limit(sizes, limit):
    named = {str(n): size for n, size in enumerate(sizes)}
    buckets = cut_into_buckets(named, limit)
    assert [name for bucket in buckets for name in bucket] == list(named)
    for bucket in buckets:
        assert bucket and (len(bucket) == 1 or sum(named[name] for name in bucket) <= limit)
    for first, second in itertools.pairwise(buckets):   # no bucket is left with room for the next tensor
        assert sum(named[name] for name in first) + named[second[0]] > limit


def test_nothing_makes_no_bucket():
    assert cut_into_buckets({}, 10) == []


def test_views_are_the_buffers_memory_in_the_shapes_asked_for():
    buffer = FlatBuffer({"w": torch.zeros(3, 5), "b": torch.zeros(()), "none": torch.zeros(0, 4)})
    for name, shape in (("w", (3, 5)), ("b", ()), ("none", (0, 4))):
        assert buffer.views[name].shape == shape
        assert buffer.views[name].untyped_storage().data_ptr() == buffer.flat.untyped_storage().data_ptr()
    buffer.views["w"].fill_(1)
    buffer.views["b"].fill_(2)
    assert buffer.flat.sum() == 17.0   # the gaps are zero


def test_moving_in_keeps_values_and_identity_and_makes_the_tensor_a_view():
    linear = nn.Linear(3, 2)
    named = dict(linear.named_parameters())
    values = {name: param.detach().clone() for name, param in named.items()}
    buffer = FlatBuffer(named)
    move_into(buffer, named)
    for name, param in linear.named_parameters():
        assert param is named[name] and torch.equal(param, values[name]) and param.requires_grad
        assert param.data_ptr() == buffer.views[name].data_ptr()
    buffer.flat.zero_()
    assert not linear.weight.any()


def test_a_tensor_with_gaps_is_laid_out_by_its_values():
    named = {"t": torch.arange(12.0).view(2, 6)[:, ::2].t()}
    buffer = FlatBuffer(named)
    move_into(buffer, named)
    assert buffer.views["t"].tolist() == named["t"].tolist() == [[0, 6], [2, 8], [4, 10]]
    assert sorted(buffer.flat[:6].tolist()) == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(("tensor", "in_memory"), [
    (torch.arange(6.0).view(2, 3).t(), (2, 3)), (torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), (4, 2, 2, 3)),
    (torch.randn(2, 3, 4).transpose(0, 1), (2, 3, 4)), (torch.randn(4, 3, 2), (4, 3, 2)), (torch.tensor(1.0), ())],
    ids=["transposed", "channels last", "one dim in front", "contiguous", "a number"])
def test_a_tensor_that_fills_its_memory_keeps_its_strides(tensor, in_memory):
    """Fused kernels pair a parameter with its gradient and its state by their places in memory."""
    before, named = tensor.clone(), {"other": torch.ones(3), "t": tensor}
    buffer = FlatBuffer(named)
    move_into(buffer, named)
    assert torch.equal(named["t"], before) and torch.equal(buffer.views["t"], before)
    assert named["t"].stride() == before.stride() == torch.zeros_like(named["t"]).stride() and buffer.slots[1].shape_in_memory == in_memory
    slot = buffer.slots[1]
    assert torch.equal(buffer.flat[slot.start:slot.end], before.as_strided((before.numel(),), (1,)))


@pytest.mark.parametrize("names", [["a", "b", "c", "d"], ["d", "c", "b", "a"]])
def test_tensors_are_grouped_by_dtype_in_the_order_given(names):
    dtypes = {"a": torch.float32, "b": torch.float64, "c": torch.float32, "d": torch.bfloat16}
    tensors = {name: torch.zeros(1, dtype=dtype) for name, dtype in dtypes.items()}
    groups = [list(group) for group in by_dtype(tensors, names)]
    assert sorted(map(sorted, groups)) == [["a", "c"], ["b"], ["d"]]
    assert [name for group in groups for name in group if name in "ac"] == [name for name in names if name in "ac"]
