"""PowerSGD: what has rank r passes whole, what is no matrix passes exactly, C and torch agree, and nothing gets stuck."""

import pytest
import torch

import rankloom as rl
from rankloom.comm import power
from rankloom.comm.power import Matrix, MatrixPlace, PowerSGD, new_matrix, orthonormal

A, B = 60, 50


@pytest.fixture(params=["C", "torch"])
def path(request, monkeypatch):
    """Both ways to compute."""
    if request.param == "C" and not power.NATIVE:
        pytest.skip("the part in C was not built")
    monkeypatch.setattr(power, "NATIVE", request.param == "C")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low(rank: int, seed: int = 0) -> torch.Tensor:
    return noise(A, rank, seed=seed) @ noise(rank, B, seed=seed + 100)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_sum_of_that_rank_passes_whole(path, rank, p):
    """All ranks' matrices share their columns, so the sum has the rank of one."""
    def body(world):
        x = low(rank) * (world.rank + 1)
        return PowerSGD([(0, (A, B))], rank=rank)(x, world)

    exact = low(rank) * p * (p + 1) / 2
    for got in rl.simulate(p, body):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-5 * exact.abs().max().item())   # fp32, and a basis of random directions


@pytest.mark.parametrize("rank", [1, 4, 10])
def test_many_steps_are_those_of_the_paper_on_the_mean_gradient(path, rank):
    """Algorithms 1 and 2 in fp64. There a worker's error is what it misses of the mean; ours of its own part, which adds up to the same."""
    p, steps, gradient = 3, 8, lambda worker, step: noise(A, B, seed=100 * step + worker)

    def body(world):
        reduce = PowerSGD([(0, (A, B))], rank=rank)
        return [reduce(gradient(world.rank, step), world) / p for step in range(steps)]

    q, errors, expected = new_matrix(MatrixPlace(0, A, B), rank, torch.device("cpu")).q.t().double(), [torch.zeros(A, B).double()] * p, []
    for step in range(steps):
        deltas = [gradient(worker, step) + error for worker, error in enumerate(errors)]
        left = torch.linalg.qr(sum(delta @ q for delta in deltas) / p).Q
        q = sum(delta.t() @ left for delta in deltas) / p
        expected.append(left @ q.t())
        errors = [delta - expected[-1] for delta in deltas]
    for seen in rl.simulate(p, body):
        for got, exact in zip(seen, expected):
            # fp32: directions of nearly equal weight turn into each other, so what was rounded grows: by 1.3 in a step here.
            assert (got - exact).norm() < 2**-24 * A**0.5 * B**0.5 * 2**steps * exact.norm()


def test_what_is_no_matrix_is_summed_exactly_gaps_and_small_matrices_too(path):
    parts = [(3, (A, B)), (3005, (7,)), (3012, (5, 6)), (3050, ())]
    x = lambda rank: torch.arange(3060.0) % 97 * (rank + 1)

    def body(world):
        return PowerSGD(parts)(x(world.rank), world)

    exact = x(0) + x(1) + x(2)
    for got in rl.simulate(3, body):
        assert torch.equal(got[:3], exact[:3]) and torch.equal(got[3003:], exact[3003:])
        assert not torch.equal(got[3:3003], exact[3:3003])


@pytest.mark.parametrize(("shape", "rounds"), [((16, 16), 2), ((15, 16), 1)])
def test_a_matrix_goes_by_its_directions_where_they_are_at_most_half_of_it_and_without_one_there_is_no_second_round(shape, rounds):
    def body(world):
        reduce, x = PowerSGD([(0, shape)]), noise(*shape)
        reduce(x, world)
        return world.ledger.messages, rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages) == reduce.bill(x.numel(), world)

    assert rl.simulate(2, body) == [(2 * rounds, True)] * 2


def test_c_and_torch_do_the_same(monkeypatch):
    if not power.NATIVE:
        pytest.skip("the part in C was not built")
    for a, b, rank in ((1, 1, 1), (5, 3, 2), (33, 17, 3), (64, 512, 4), (70, 1040, 4), (9, 600, 5), (40, 40, 16), (70, 90, 20)):
        x, matrices = noise(a, b), []
        for native in (True, False):
            monkeypatch.setattr(power, "NATIVE", native)
            matrix = Matrix(0, noise(a, b, seed=1), noise(a, rank, seed=2), noise(rank, b, seed=3), noise(rank, b, seed=4))
            p = matrix.absorb(x)
            matrix.p = noise(a, rank, seed=5)
            out = torch.empty(a, b)
            matrix.spread(out)
            matrices.append((p, matrix.kept, out, matrix.turn(noise(a, rank, seed=6)).clone()))
        (p, kept, out, own), (p2, kept2, out2, own2) = matrices
        scale = b**0.5 * 16 * 2**-22   # sums of up to b products of numbers of size 1 to 4, in another order
        torch.testing.assert_close(p, p2, rtol=scale, atol=scale * 16)
        torch.testing.assert_close(kept, kept2, rtol=0, atol=16 * 2**-20)
        torch.testing.assert_close(own, own2, rtol=0, atol=a**0.5 * 16 * 2**-20)
        assert torch.equal(out, out2), "what ends on every rank must be equal to the bit"


@pytest.mark.parametrize(("a", "rank"), [(1, 1), (64, 32), (63, 5), (1024, 4), (1025, 33)])
def test_a_basis_has_the_same_bits_on_any_number_of_threads_in_c_and_in_torch(monkeypatch, a, rank):
    """Each rank computes it for itself. torch's QR rounds by the number of threads from rank 32 on, and ranks parted."""
    p, found, threads = noise(a, rank), [], torch.get_num_threads()
    for native in (power.NATIVE, False):
        for count in (1, 2):
            monkeypatch.setattr(power, "NATIVE", native)
            torch.set_num_threads(count)
            found.append(orthonormal(p))
    torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found)
    basis = found[0].double()
    torch.testing.assert_close(basis.t() @ basis, torch.eye(rank).double(), rtol=0, atol=2**-20)
    torch.testing.assert_close(basis @ (basis.t() @ p.double()), p.double(), rtol=0, atol=2**-20 * rank**0.5 * p.abs().max().item())


def test_ranks_with_other_numbers_of_threads_train_the_same_bits():
    first, second = rl.simulate(2, _sum_on_as_many_threads_as_the_rank)
    assert torch.equal(first, second)


def _sum_on_as_many_threads_as_the_rank(world: rl.World) -> torch.Tensor:
    torch.set_num_threads(1 + world.rank)
    reduce = PowerSGD([(0, (1024, 512))], rank=64)
    return torch.stack([reduce(noise(1024, 512, seed=10 * step + world.rank), world).clone() for step in range(2)])


@pytest.mark.parametrize("true", [0, 1, 3])
@pytest.mark.parametrize("alike", [False, True])
def test_columns_that_say_nothing_new_come_to_nothing_and_the_others_are_orthonormal(path, true, alike):
    """What rounding leaves of them points anywhere, along other columns too: those would be delivered twice."""
    p = noise(A, true) @ noise(true, 16, seed=1) if true else torch.zeros(A, 16)
    basis = orthonormal(p[:, :1].expand(A, 16) if alike else p).double()
    lengths = basis.norm(dim=0)
    assert ((lengths < 2**-20) | ((lengths - 1).abs() < 2**-20)).all() and (lengths > 0.5).sum() >= min(true, 1 if alike else true)
    assert ((basis.t() @ basis).fill_diagonal_(0).abs() < 2**-20).all()


def test_a_step_without_gradient_does_not_stop_what_follows(path):
    def body(world):
        reduce = PowerSGD([(0, (A, B))])
        for _ in range(3):
            reduce(torch.zeros(A, B), world)
        return sum(reduce(low(2), world).clone() for _ in range(2))

    got = rl.simulate(2, body)[0]   # the first of them finds the directions, the second delivers what it left
    torch.testing.assert_close(got, 4 * low(2), rtol=0, atol=1e-4 * low(2).abs().max().item())


@pytest.mark.parametrize("size", [1e-18, 1e-6, 1e12, 1e30])
def test_very_small_and_very_large_gradients_pass_too(path, size):
    def body(world):
        reduce = PowerSGD([(0, (A, B))])
        for _ in range(3):
            got = reduce(low(2) * size, world)
        return got

    got = rl.simulate(2, body)[0]
    torch.testing.assert_close(got / size, 2 * low(2), rtol=0, atol=1e-4 * low(2).abs().max().item())


def test_a_sum_that_overflows_is_non_finite_once(path):
    """Every rank's part is finite, and so is the sum of what goes in the first round; the second round's is not."""
    def body(world):
        reduce, x = PowerSGD([(0, (A, B))]), torch.zeros(A, B)
        x[:, 3] = 3e37
        first = reduce(x, world).clone()
        return first, reduce(low(2), world)

    for first, after in rl.simulate(2, body):
        assert not first[:, 3].isfinite().any() and after.isfinite().all()


def test_directions_are_kept_from_step_to_step_so_the_best_ones_are_found(path):
    """One random start finds the largest of many directions only roughly; three steps find them well."""
    spectrum = torch.linalg.qr(noise(A, 12)).Q @ torch.diag(2.0 ** -torch.arange(12.0)) @ torch.linalg.qr(noise(B, 12, seed=1)).Q.t()
    best = spectrum - torch.linalg.svd(spectrum).U[:, :4] @ torch.linalg.svd(spectrum).U[:, :4].t() @ spectrum

    def body(world):
        matrix, apart = new_matrix(MatrixPlace(0, A, B), 4, world.device), []
        for _ in range(4):
            matrix.kept.zero_()   # without error feedback, to see the directions alone
            matrix.own.zero_()
            p = matrix.absorb(spectrum)
            matrix.q = matrix.turn(p).clone()
            out = torch.empty(A, B)
            matrix.spread(out)
            apart.append(((spectrum - out).norm() / best.norm()).item())
        return apart

    first, *_, last = rl.simulate(1, body)[0]
    assert last < 1.01 < first


def test_a_change_of_units_rescales_what_is_remembered(path):
    def body(world, factor):
        reduce = PowerSGD([(0, (A, B))])
        reduce(noise(A, B), world)
        reduce.rescale(factor)
        return reduce(noise(A, B, seed=1) * factor, world) / factor

    plain, scaled = (rl.simulate(2, lambda world, f=f: body(world, f))[0] for f in (1.0, 1024.0))
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("parts", [[(64, 32)], [64, 32], [(0, "ab")]], ids=str)
def test_parts_of_another_form_are_refused_on_any_number_of_ranks(parts):
    with pytest.raises(rl.ConfigError, match=r"expected \[\(first element, shape\), ...\]"):
        PowerSGD(parts)


@pytest.mark.skipif(not power.NATIVE, reason="the part in C was not built")
def test_c_refuses_buffers_of_the_wrong_size_and_unknown_ranks():
    x, p, q = (noise(*shape).numpy() for shape in ((4, 6), (4, 2), (2, 6)))
    for call, text in (
        (lambda: power._lowrank.absorb(x, x, p, q, q, q, 4, 6, 2), "argument 6 has 48 bytes, expected 4 x 2 floats"),
        (lambda: power._lowrank.combine(x, p, p, 4, 6, 2), "argument 3 has 32 bytes, expected 2 x 6 floats"),
        (lambda: power._lowrank.spread(p, q, x, 4, 5, 2), "argument 2 has 48 bytes, expected 2 x 5 floats"),
        (lambda: power._lowrank.combine(b"", b"", q, 1 << 62, 4, 4), f"argument 1 has 0 bytes, expected {1 << 62} x 4 floats"),
        (lambda: power._lowrank.combine(x, p, q, 4, 6, power.IN_C + 1), "rank 17 is not in 1 to 16"),
        (lambda: power._lowrank.absorb(x, x, p, q, q, p, 4, 6, 17), "rank 17 is not in 1 to 16"),
        (lambda: power._lowrank.spread(p, q, x, 4, 6, 0), "rank 0 is not in 1 to"),
        (lambda: power._lowrank.orthonormalise(q, x, 2, 6), "argument 2 has 96 bytes, expected 1 x 6 floats"),
        (lambda: power._lowrank.orthonormalise(q, x[0], -2, 6), "argument 1 has 48 bytes, expected -2 x 6 floats"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
