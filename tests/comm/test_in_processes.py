"""The twin of all thread tests: real processes, over sockets and over shared memory, end with the bits that threads end with."""

import pytest
import torch

import rankloom as rl
from rankloom.comm.algorithms import ALGORITHMS, on_nodes

NODES = ((0, 1), (4, 2), (3,))
LONG = 200_000   # fp32 numbers: more than a socket's buffers hold


def run_all(world):
    ways = [(collective, name, way) for table in (ALGORITHMS, on_nodes(NODES)) for collective in table
            for name, way in table[collective].items()]
    results = {}
    for collective, name, way in ways:
        for n in (15, LONG):
            x = torch.randn(n, generator=torch.Generator().manual_seed(world.rank))
            result = way.run(x[: n // 5].clone() if collective == "all_gather" else x, world)
            results[collective, name, n] = result.view(torch.int32).sum().item()   # of the bits, not of the numbers
    return results


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_processes_end_with_the_bits_of_threads(backend):
    assert rl.spawn(5, run_all, backend=backend, timeout=60) == rl.simulate(5, run_all)
