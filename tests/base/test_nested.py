"""Values nested in containers, cast where they stand."""

from collections import UserDict
from dataclasses import dataclass

import torch

from rankloom.base.nested import cast_floats_in
from rankloom.parallel.sections.wrapping import tensors_in


def test_the_users_own_batch_stays_in_its_dtype_when_the_model_gets_it_cast():
    @dataclass
    class Rows:
        x: torch.Tensor

    for given in (UserDict(x=torch.ones(1)), Rows(torch.ones(1)), {"x": torch.ones(1)}):
        cast = cast_floats_in(given, torch.bfloat16)
        assert [x.dtype for batch in (cast, given) for x in tensors_in(getattr(batch, "data", batch))] == [torch.bfloat16, torch.float32]


class Row(list):
    """A list of a class of its own, with a name."""

    name = "row"


class Two(tuple):
    """A tuple of a class of its own, which takes two values."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def test_lists_and_tuples_of_classes_of_their_own_are_cast_too():
    row = Row([torch.ones(1), Two(torch.ones(1), "b"), torch.arange(1)])
    row.name = "first"
    cast = cast_floats_in({"row": row}, torch.bfloat16)["row"]
    assert (type(cast), cast.name, type(cast[1]), cast[1][1]) == (Row, "first", Two, "b")
    assert [x.dtype for x in tensors_in(cast)] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert [x.dtype for x in tensors_in(row)] == [torch.float32, torch.float32, torch.int64]
    same = Row([torch.arange(1), "text"])
    assert cast_floats_in((same,), torch.bfloat16)[0] is same
