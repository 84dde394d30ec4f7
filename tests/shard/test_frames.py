"""Windows: their contents while they are open, one address for life, and no more memory than is open at once."""

import gc
import itertools
import mmap
import sys
from pathlib import Path

import pytest
import torch

import rankloom as rl
from awkward import loss_sum
from blocky import make_blocky, make_turns
from rankloom.shard import frames as module
from rankloom.shard.frames import FRAME, AlwaysOpen, Frames, StaysUnlessViewed, between_steps, memory_lent

pytestmark = pytest.mark.gloo

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="frames move on Linux only")
LARGE = 3 * FRAME // 4 + 100   # elements of four bytes: a little more than three frames


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's memory that are there, by the kernel's own account."""
    first, last = tensor.data_ptr() // mmap.PAGESIZE, (tensor.data_ptr() + tensor.nbytes - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
        table.seek(first * 8)
        entries = table.read((last - first + 1) * 8)
    return sum(entry >> 63 for entry in memoryview(entries).cast("Q")) * mmap.PAGESIZE


@pytest.mark.parametrize("n", [1, 5, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_window_holds_what_is_written_while_it_is_open(n, dtype):
    frames = Frames("cpu")
    windows = [frames.window(n, dtype) for _ in range(2)]
    assert [window.held for window in windows] == [0, 0]
    for turn in range(1, 4):
        for at, window in enumerate(windows):
            window.open()
            window.tensor.fill_(10 * at + turn)
        for at, window in enumerate(windows):
            window.open()   # it is
            assert window.tensor.shape == (n,) and window.tensor.dtype == dtype and bool((window.tensor == 10 * at + turn).all())
            assert window.held == window.tensor.nbytes
            window.close()
            assert window.held == 0


def test_views_mean_the_same_elements_when_their_window_is_open_again():
    frames = Frames("cpu")
    one, other = frames.window(LARGE, torch.float32), frames.window(LARGE, torch.float32)
    one.open()
    view, address = one.tensor[7:17].view(2, 5), one.tensor.data_ptr()
    one.close()
    other.open()
    other.tensor.fill_(1.0)
    other.close()
    one.open()
    one.tensor.copy_(torch.arange(LARGE))
    assert view.tolist() == [[7, 8, 9, 10, 11], [12, 13, 14, 15, 16]]
    assert one.tensor.data_ptr() == address or sys.platform != "linux"


@LINUX
@pytest.mark.parametrize("sizes", [[LARGE] * 8, [LARGE, FRAME, 5 * FRAME, 2 * FRAME] * 2], ids=["equal", "unequal"])
def test_all_windows_together_take_the_memory_that_is_open_at_once(sizes):
    frames = Frames("cpu")
    windows = [frames.window(n, torch.float32) for n in sizes]
    rounded = [-(-4 * n // FRAME) * FRAME for n in sizes]
    for _ in range(3):
        for at, window in enumerate(windows):
            before = windows[at - 1]
            window.open()
            window.tensor.fill_(at)
            if at:
                assert bool((before.tensor == at - 1).all())
                before.close()
        windows[-1].close()
    most = max(one + other for one, other in itertools.pairwise(rounded))
    assert sum(resident(window._memory) for window in windows) <= most


@LINUX
def test_a_frame_that_moves_takes_its_pages_along():
    frames = Frames("cpu")
    one, other = frames.window(FRAME, torch.uint8), frames.window(FRAME, torch.uint8)
    one.open()
    one.tensor.fill_(3)
    one.close()
    other.open()
    assert resident(other.tensor) == FRAME and resident(one.tensor) == 0
    assert bool((other.tensor == 3).all())   # contents are arbitrary by contract: this says that no page was cleared
    other.open()
    one.open()
    assert resident(one.tensor) == 0 and not one.tensor.any()   # the only frame is in use


@LINUX
def test_a_window_that_nobody_has_any_more_leaves_its_spare_frames_to_the_others():
    frames = Frames("cpu")
    for turn in range(5):
        window = frames.window(LARGE, torch.float32)
        window.open()
        window.tensor.fill_(turn)
        assert resident(window.tensor) >= window.tensor.nbytes
        window.close()
        del window
        gc.collect()
    assert len(frames._spare) == 4
    assert sum(resident(memory[at - memory.data_ptr():][:FRAME]) for at, memory in frames._spare.items()) <= 4 * FRAME


@LINUX
def test_where_the_kernel_moves_nothing_pages_are_given_back(monkeypatch):
    _, advise = module._mremap_and_madvise()
    monkeypatch.setattr(module, "_mremap_and_madvise", lambda: ((lambda *_: -1), advise))
    frames = Frames("cpu")
    one, other = frames.window(LARGE, torch.float32), frames.window(LARGE, torch.float32)
    one.open()
    one.tensor.fill_(1.0)
    one.close()
    other.open()
    assert resident(one.tensor) == 0 and not other.tensor.any()
    other.tensor.fill_(2.0)
    assert bool((other.tensor == 2.0).all())


def test_standing_memory_stays():
    window = AlwaysOpen(torch.ones(3))
    window.open()
    window.close()
    assert window.held == 12 and window.tensor.tolist() == [1.0] * 3


@LINUX
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"ahead": 2}, {"reshard_after_forward": False}], ids=str)
def test_training_in_frames_is_training_in_memory_of_its_own_to_the_bit(options, monkeypatch):
    """Units of these tests are smaller than a frame; with frames of one page they move in every step."""
    turns = make_turns()

    def body(world):
        engine = rl.prepare(make_blocky(), loss=loss_sum, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), world=world, stage=3, clip=1.0,
                            **options)
        rows = len(turns[0][0]) // 2
        losses = [engine.step(tuple(t[world.rank * rows:(world.rank + 1) * rows] for t in turn)).loss for turn in turns[:3]]
        return losses, engine.full_state_dict()["model"]

    plain = rl.simulate(2, body)
    moved, move = [], module._move
    monkeypatch.setattr(module, "FRAME", mmap.PAGESIZE)
    monkeypatch.setattr(module, "_move", lambda *where: (moved.append(where), move(*where)))
    for (losses, state), (expected, expected_state) in zip(rl.simulate(2, body), plain):
        assert losses == expected
        assert all(torch.equal(state[name], value) for name, value in expected_state.items())
    assert moved or options.get("reshard_after_forward")


@pytest.mark.parametrize("lent", [False, True])
def test_memory_that_lasts_is_left_to_those_who_hold_a_view_of_it_when_it_is_closed(lent):
    first = torch.zeros(8)
    window, address = StaysUnlessViewed(first, lent=lent), first.data_ptr()
    del first
    window.close()
    assert window.tensor.data_ptr() == address and window.stays and window.held == 32
    guest = window.tensor[2:4].fill_(3.0).detach()
    window.close()
    window.open()
    window.tensor.fill_(5.0)
    assert guest.tolist() == [3.0, 3.0] and window.stays is not lent
    other = window.tensor.data_ptr()
    window.close()
    assert window.tensor.data_ptr() == other
    del guest
    window.close()
    assert window.tensor.data_ptr() == (address if lent else other) and window.stays


def test_memory_between_steps_and_lent_memory_last_on_a_cpu():
    assert isinstance(between_steps(3, torch.float32, torch.device("cpu")), StaysUnlessViewed)
    assert isinstance(memory_lent(torch.zeros(3)), StaysUnlessViewed) and memory_lent(torch.zeros(3)).held == 12
    whole = torch.zeros(8)
    lent, address = memory_lent(whole[4:]), whole[4:].data_ptr()
    del whole
    lent.close()
    assert lent.stays and lent.tensor.data_ptr() == address, "that it is a part of other memory is no view that somebody holds"


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_gradients_of_slices_that_somebody_holds_are_not_written_over_after_the_next_forward(backend):
    def body(world):
        layer = torch.nn.Linear(4, 3).double()
        for param in layer.parameters():
            torch.nn.init.constant_(param, 0.5)   # on all ranks alike
        model, held = rl.fully_shard(layer, world), []
        for step in range(3):
            model.zero_grad()
            model(torch.full((2, 4), step + 1.0, dtype=torch.float64)).sum().backward()
            held.append([param.grad for param in model.parameters() if param.grad is not None])
        return [set(torch.cat(grads).tolist()) for grads in held]

    for held in rl.simulate(2, body, backend=backend):
        for step, values in enumerate(held):
            assert values and values <= {2.0, 2.0 * (step + 1.0)}   # of the bias, and of the weight


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_who_holds_gradients_during_a_forward_in_inference_mode_can_train_on(wrap, backend):
    def body(world):
        layer = torch.nn.Linear(4, 3)
        for param in layer.parameters():
            torch.nn.init.constant_(param, 0.5)   # on all ranks alike
        model, held = wrap(layer, world), []
        for step in range(3):
            model(torch.full((2, 4), step + 1.0)).sum().backward()
            held += [param.grad for param in model.parameters() if param.grad is not None]
            model.zero_grad()
            with torch.inference_mode():
                model(torch.ones(1, 4))
        return set(torch.cat([grad.flatten() for grad in held]).tolist())

    for values in rl.simulate(2, body, backend=backend):
        assert values and values <= {2.0, 4.0, 6.0}   # of the bias, and of the weight
