"""Tensors that have no memory themselves: what torch wraps is unwrapped, all else is refused by name."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from conformance.ranks import Ranks
from rankloom.base.errors import ShapeMismatch
from rankloom.world.transport.operands import all_untouched, expect_dtype

CALLS = {   # from [4] on each of 2 ranks, which hold 1 and 2, with room for a result
    "all_reduce": (lambda group, x, room: group.allreduce([x]), [3.0] * 4),
    "broadcast": (lambda group, x, room: group.broadcast([x]), [1.0] * 4),
    "all_gather": (lambda group, x, room: group._allgather_base(room(8), x), [1.0] * 4 + [2.0] * 4),
    "all_gather into a list": (lambda group, x, room: group.allgather([[room(4), room(4)]], [x]), [1.0] * 4),
    "reduce_scatter": (lambda group, x, room: group._reduce_scatter_base(room(2), x), [3.0] * 2),
    "all_to_all": (lambda group, x, room: group.alltoall_base(room(4), x, [], []), [1.0, 1.0, 2.0, 2.0]),
    "a message": (lambda group, x, room: group.recv([x], 0) if group.rank() else group.send([x], 1), [1.0] * 4),
}


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(2)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)   # the second has no arithmetic of its own
@pytest.mark.parametrize("name", CALLS)
def test_the_result_of_a_functional_collective_is_the_tensor_that_it_wraps(ranks, name, dtype):
    call, expected = CALLS[name]

    def body(rank):
        work = call(ranks.groups[rank], AsyncCollectiveTensor(torch.full((4,), rank + 1.0).to(dtype)),
                    lambda n: AsyncCollectiveTensor(torch.zeros(n).to(dtype)))
        work.wait()
        return work.result()[0].elem.float().tolist()

    assert ranks.run(body) == [expected] * 2


class Wrapper(torch.Tensor):
    """As DTensor is made: it has a shape, and the memory is another tensor's."""

    @staticmethod
    def __new__(cls, n):
        return torch.Tensor._make_wrapper_subclass(cls, (n,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Wrapper(len(args[0]))


def fake(n):
    with FakeTensorMode():
        return torch.ones(n)


def freed(n):
    """As FSDP does with gathered parameters."""
    x = torch.ones(n)
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("make", "kind"), [(Wrapper, "Wrapper"), (fake, "FakeTensor"), (freed, "Tensor")])
@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_without_memory_is_refused_by_name_where_it_would_be_read_at_address_0(ranks, name, make, kind):
    for rank, group in enumerate(ranks.groups):
        with pytest.raises(ShapeMismatch, match=rf"rank {rank}: .*: a {kind} of shape \(\d,\) has no memory, .* x\.to_local"):
            CALLS[name][0](group, make(4), make)


@pytest.mark.parametrize(("begin", "end", "shares"), [(0, 4, False), (6, 9, False), (3, 5, True), (5, 7, True), (4, 6, True), (0, 9, True)])
def test_an_input_that_shares_any_memory_with_an_output_is_read_from_a_copy(begin, end, shares):
    memory = torch.arange(9.0)
    x = memory[begin:end]
    read, = all_untouched([x], [memory[4:6]])
    assert (read is not x) == shares and torch.equal(read, x)


def test_tensors_of_one_call_lie_in_one_place():
    with pytest.raises(ShapeMismatch, match="here: tensors on cpu and meta; expected one place"):
        expect_dtype(torch.ones(1), [torch.ones(1, device="meta")], "here")
