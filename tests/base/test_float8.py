"""Floats of eight bits: which neighbour a value is rounded to, what scales do, and that a product is the sum it says."""

from contextlib import contextmanager

import pytest
import torch

from rankloom.base import float8, float8_kernel
from rankloom.base.errors import ShapeMismatch
from rankloom.base.float8 import E4M3, E5M2, Float8, apart, cast, cast_twice, magnitude, magnitudes, scaled_product, scales_of

FORMATS = [E4M3, E5M2]
UNIT = 2.0**-24    # half a step of fp32: what one rounding loses at most, relative


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of a format, ascending, zero once."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    return codes[codes.isfinite()].unique()


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """Values of many magnitudes."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made) * torch.exp(spread * torch.randn(*shape, generator=made))


def in_float8(x: torch.Tensor, dtype: torch.dtype = E4M3, dim: int | None = None) -> Float8:
    return cast(x, dtype, magnitude(x, dim))


def nearest(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The definition: the nearest value of the format times scale; between two, the one with the even code."""
    table = every_value(dtype).double() * scale
    above = torch.searchsorted(table, x.double()).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    even_above = (torch.arange(len(table)) - len(table) // 2)[above] % 2 == 0     # zero, in the middle, is even; codes alternate
    up = (high - x < x - low) | ((high - x == x - low) & even_above)
    return torch.where(up, high, low)


# ---------------------------------------------------------------------- casting


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shift", [-90, -3, 0, 5, 90])
def test_a_value_of_the_format_is_cast_to_itself_at_any_power_of_two(dtype, shift):
    x = every_value(dtype)[None] * 2.0**shift
    eight = in_float8(x, dtype)
    assert eight.scale.item() == 2.0**shift
    assert torch.equal(eight.values(), x)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_value_goes_to_its_nearest_neighbour_and_ties_go_to_the_even_one(dtype, given):
    values = every_value(dtype)
    between = (values[1:] + values[:-1]) / 2                     # all the ties there are
    x = torch.cat((normal(4000, spread=3.0), between, torch.tensor([0.0]))).to(given)[None]
    eight = in_float8(x, dtype)
    assert torch.equal(eight.values().double(), nearest(x, dtype, eight.scale.item()))


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_scale_is_the_smallest_power_of_two_at_which_the_largest_value_fits(dtype):
    limit = torch.finfo(dtype).max
    exact = [limit * 2.0**k for k in (-90, -9, -1, 0, 1, 7, 50)]
    above = torch.nextafter(torch.tensor(exact), torch.tensor(torch.inf)).tolist()
    for largest in (*exact, *above, 1.0, 3.14159, 1e-20, torch.finfo(torch.float32).max):
        x = torch.tensor([[largest, -largest / 3]])
        scale = in_float8(x, dtype).scale.item()
        assert limit * scale / 2 < x[0, 0].item() <= limit * scale, largest
        assert scale == scales_of(x[:, :1], dtype).scale.item() and torch.tensor(scale).frexp().mantissa == 0.5


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_magnitudes_of_many_tensors_are_those_of_each(given):
    tensors = [normal(48, 16 * n, seed=n, spread=2.0).to(given) for n in range(1, 5)]
    tensors[1][1, 1], tensors[2][2, 2], tensors[3][:] = torch.nan, -torch.inf, 0.0
    expected = torch.cat([magnitude(x).view(1) for x in tensors])
    torch.testing.assert_close(magnitudes(tensors), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("through", [lambda f: f, torch.compile(backend="aot_eager", fullgraph=True)], ids=["called", "in a graph"])
@pytest.mark.parametrize("shape", [(5, 32), (1, 16), (48, 1)])
def test_a_matrix_that_is_cast_twice_lies_by_rows_and_by_columns(dtype, through, shape):
    for x in (normal(*shape, spread=2.0), normal(*shape[::-1], spread=2.0).t()):
        given = x.clone()
        by_rows, by_columns = through(lambda x: cast_twice(x, dtype, magnitude(x)))(x)
        assert by_rows.data.is_contiguous() and by_columns.data.t().is_contiguous()
        assert by_rows.data.data_ptr() != by_columns.data.data_ptr() and torch.equal(x, given)
        for found in (by_rows, by_columns):
            assert torch.equal(found.values(), in_float8(x, dtype).values())


def test_scales_that_are_made_together_lie_where_a_matrix_unit_takes_them():
    """At addresses that divide by 16."""
    scales = apart(torch.arange(7.0))
    assert [scale.tolist() for scale in scales] == [[[float(n)]] for n in range(7)]
    assert all(scale.data_ptr() % 16 == 0 and scale.is_contiguous() for scale in scales)


def test_scales_are_of_the_whole_of_columns_or_of_rows():
    x = normal(48, 32, spread=2.0)
    assert [tuple(in_float8(x, dim=dim).scale.shape) for dim in (None, 0, 1)] == [(1, 1), (1, 32), (48, 1)]
    for dim in (0, 1):
        apart = [in_float8(part, dim=dim) for part in x.split(1, dim=1 - dim)]
        assert torch.equal(in_float8(x, dim=dim).values(), torch.cat([part.values() for part in apart], dim=1 - dim))


@pytest.mark.parametrize("dtype", FORMATS)
def test_how_rows_are_cut_does_not_show_in_values_that_are_not_among_the_smallest(dtype):
    """What a scale that is no power of two would not give."""
    x = normal(64, 32)
    x[0, 0] = 3000.0                                             # the first half has another scale than the second
    whole, halves = in_float8(x, dtype), [in_float8(half, dtype) for half in x.chunk(2)]
    assert halves[0].scale != halves[1].scale
    normally = x.abs() >= torch.finfo(dtype).smallest_normal * whole.scale
    assert normally.float().mean() > 0.8
    assert torch.equal(whole.values()[normally], torch.cat([half.values() for half in halves])[normally])


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_does_not_fit_the_scale_becomes_the_largest_value(dtype):
    limit = torch.finfo(dtype).max
    x = torch.tensor([[1.0, 2.0, 3.9, 1e9, -1e9, 1e30]])
    eight = cast(x, dtype, magnitude(x), reference=torch.tensor([[limit / 8]]))
    assert eight.scale.item() == 1 / 8
    assert eight.values()[0, 3:].tolist() == [limit / 8, -limit / 8, limit / 8] and eight.values()[0, :2].tolist() == [1.0, 2.0]


def test_a_margin_leaves_powers_of_two_free():
    x = torch.tensor([[100.0]])
    with_margin = cast(x, E4M3, magnitude(x), margin=3)
    assert with_margin.scale == in_float8(x).scale * 8 and with_margin.values() == in_float8(x).values()


@pytest.mark.parametrize("x", [torch.zeros(2, 16), torch.full((2, 16), 1e-42), torch.zeros(2, 16).bfloat16(), torch.zeros(2, 16).half()])
def test_nothing_at_all_is_cast_to_zeros_with_a_finite_scale(x):
    eight = in_float8(x)
    assert eight.scale.isfinite().all() and (eight.scale > 0).all() and not eight.values().any()
    assert not scaled_product(eight, in_float8(torch.ones(16, 16)), torch.float32).any()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(dtype, bad):
    x = normal(32, 16)
    x[3, 5] = bad
    other = in_float8(normal(16, 16))
    assert not scaled_product(in_float8(x, dtype), other, torch.bfloat16).isfinite().any()
    by_rows = scaled_product(in_float8(x, dtype, 1), other, torch.bfloat16).isfinite()
    assert not by_rows[3].any() and by_rows[:3].all() and by_rows[4:].all()
    known_before = cast(x, dtype, magnitude(x), reference=torch.ones(1, 1))
    assert not scaled_product(known_before, other, torch.bfloat16).isfinite().any()


def test_the_kernel_is_launched_on_the_device_where_the_matrix_lies(monkeypatch):
    """Triton launches on the thread's current device, which may be another one."""
    current, launched = [], []

    @contextmanager
    def device_of(x):
        current.append(x)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda x, *args, **more: launched.append((x is current[-1], grid))

    monkeypatch.setattr(float8_kernel, "_cast_twice_kernel", Kernel())
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x = normal(130, 32).bfloat16()
    float8_kernel.by_rows_and_columns(x, E4M3, torch.ones(1, 1))
    assert launched == [(True, (2, 1))]


@pytest.mark.parametrize("one", [3, 2, None], ids=["by rows", "by columns", "odd"])
@pytest.mark.parametrize("given", ["bf16", "fp16"])
def test_the_kernel_casts_anew_for_each_of_its_two_stores(one, given, monkeypatch, tmp_path):
    """Of one cast value that went into both, as Triton 3.7 understood it, ptxas 12.8 builds code that reads it before it is made.

    one: which number of the shape and the strides is 1; the others divide by 16. None: no number is known
    """
    kernel = float8_kernel._cast_twice_kernel   # asked for first: where there is no Triton, a new name must not go unnoticed
    compiler, backends = pytest.importorskip("triton.compiler"), pytest.importorskip("triton.backends.compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = tuple("constexpr" if at == one else "i32" for at in range(4))
    signature = {"x": f"*{given}", "inverse": "*fp32", "written": ("*fp8e4nv", "*fp8e4nv"), "shape": numbers,
                 "limit": "constexpr", "tile": "constexpr"}
    fixed = {(4,): 448.0, (5,): float8_kernel.TILE} | ({} if one is None else {(3, one): 1})
    even = [(0,), (1,), (2, 0), (2, 1), *((3, at) for at in range(4) if one not in (None, at))]
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=fixed,
                                attrs={path: [["tt.divisibility", 16]] for path in even})
    built = compiler.compile(source, target=backends.GPUTarget("cuda", 90, 32), options={"num_warps": float8_kernel.WARPS})
    pairs = float8_kernel.TILE**2 // (32 * float8_kernel.WARPS) // 2   # of values, for each thread: one instruction casts two
    assert built.asm["ptx"].count("cvt.rn.satfinite.e4m3x2.f32") == 2 * pairs


# ---------------------------------------------------------------------- products


def in_fp64(a: Float8, b: Float8) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and the sum of magnitudes that its rounding is bounded by."""
    left, right = a.values().double(), b.values().double()
    return left @ right, left.abs() @ right.abs()


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("dims", [(None, None), (1, 0)])
@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 7, 16), (1, 16, 16), (17, 1, 32)])
def test_a_product_is_that_of_the_values_added_up_in_fp32(formats, dims, shape):
    m, k, n = shape
    a, b = in_float8(normal(m, k, seed=1), formats[0], dims[0]), in_float8(normal(k, n, seed=2), formats[1], dims[1])
    exact, size = in_fp64(a, b)
    bound = k * UNIT * size                       # k - 1 additions in any order, each off by UNIT of at most `size`; scaling is exact
    for dtype, rounding in ((torch.float32, 0.0), (torch.float64, 0.0), (torch.bfloat16, 2.0**-8)):
        found = scaled_product(a, b, dtype)
        assert found.dtype == dtype and found.shape == (m, n)
        assert ((found.double() - exact).abs() <= bound * (1 + rounding) + rounding * exact.abs()).all()


def test_operands_may_lie_in_memory_any_way():
    a, b = in_float8(normal(32, 40)), in_float8(normal(40, 16, seed=1))
    expected = scaled_product(a, b, torch.float32)
    turned = Float8(a.data.t().contiguous().t(), a.scale), Float8(b.data.t().contiguous().t(), b.scale)
    assert torch.equal(scaled_product(*turned, torch.float32), expected)


def test_a_last_dim_that_does_not_divide_by_16_is_refused():
    with pytest.raises(ShapeMismatch, match=r"\[2, 16\] @ \[16, 24\]: the last dim must divide by 16; keep this layer in bf16"):
        scaled_product(in_float8(normal(2, 16)), in_float8(normal(16, 24)), torch.float32)


# ---------------------------------------------------------------------- the device's own product


@pytest.fixture
def device_product(monkeypatch):
    """Takes the path of a device that multiplies eight bits; torch's CPU kernel has the same signature."""
    monkeypatch.setattr(float8, "multiplies_float8", lambda device: True)


BY_ROWS = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch's CPU kernel takes one scale only")


@pytest.mark.parametrize("dims", [(None, None), pytest.param((1, 0), marks=BY_ROWS), pytest.param((None, 0), marks=BY_ROWS)])
@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 7, 16), (1, 16, 16)])
def test_the_device_s_product_is_given_the_same_operands(device_product, dims, shape):
    m, k, n = shape
    a, b = in_float8(normal(m, k, seed=1), E5M2, dims[0]), in_float8(normal(k, n, seed=2), E4M3, dims[1])
    exact, size = in_fp64(a, b)
    for dtype, rounding in ((torch.float32, UNIT), (torch.bfloat16, 2.0**-8)):
        found = scaled_product(a, b, dtype)
        assert found.dtype == dtype and found.shape == (m, n)
        assert ((found.double() - exact).abs() <= k * UNIT * size + 2 * rounding * exact.abs()).all()


@pytest.mark.parametrize("dims", [(None, None), (1, 0), (None, 0)])
@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 7, 16), (1, 16, 16)])
@pytest.mark.parametrize("out", [torch.float64, torch.bfloat16])
def test_a_cuda_device_would_accept_the_layout(device_product, monkeypatch, dims, shape, out):
    """torch's own checks of shapes, strides and scales for CUDA, without a device."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    m, k, n = shape
    multiply, calls = torch._scaled_mm, []

    def checked(*operands, **more):
        calls.append((more["out_dtype"], more["use_fast_accum"]))
        with FakeTensorMode():
            pretended = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in operands]
            assert multiply(*pretended, **more).device.type == "cuda"
        return torch.zeros(m, n, dtype=more["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    a, b = in_float8(normal(m, k), E5M2, dims[0]), in_float8(normal(k, n), E4M3, dims[1])
    for left in (a, Float8(a.data.t().contiguous().t(), a.scale)):
        for right in (b, Float8(b.data.t().contiguous().t(), b.scale)):
            assert scaled_product(left, right, out, fast_accum=True).dtype == out
    assert calls == [(torch.bfloat16 if out is torch.bfloat16 else torch.float32, True)] * 4   # no kernel writes float64
