"""`torch.pretended`: what the project asks of `torch.cuda`, for the device of device.cpp; and what NCCL does with its tensors.

Imported by the copy of the project that run.py makes, in every process.
"""

import contextlib
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, os.environ["PRETENDED_BUILD"])
import pretended_device as device_c  # compiled by run.py

NAME = "pretended"
aten = torch.ops.aten


def index_of(device: Any = None) -> int:
    """The number of a device; of the current one, if it has none."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return device_c.current_device() if index is None else index


class Stream:
    """As torch.cuda.Stream."""

    def __new__(cls, device: Any = None, **options: Any) -> torch.Stream:
        return torch.Stream(device=torch.device(NAME, index_of(device)))


class Event:
    """As torch.cuda.Event."""

    def __new__(cls, **options: Any) -> torch.Event:
        return torch.Event(device=NAME)


def current_stream(device: Any = None) -> torch.Stream:
    """The stream of this thread."""
    return torch.accelerator.current_stream(torch.device(NAME, index_of(device)))


def _as_a_module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    properties = types.SimpleNamespace(major=9, minor=0, total_memory=80 << 30, name="a pretended GPU")
    draw = torch.default_generator
    vars(module).update({
        "is_available": lambda: True, "is_initialized": lambda: True, "_is_in_bad_fork": lambda: False, "_lazy_init": lambda: None,
        "device_count": device_c.device_count, "current_device": device_c.current_device,
        "set_device": lambda device: device_c.set_device(index_of(device)),
        "Stream": Stream, "Event": Event, "current_stream": current_stream, "stream": lambda stream: stream or contextlib.nullcontext(),
        "synchronize": lambda device=None: torch.accelerator.synchronize(torch.device(NAME, index_of(device))), "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: device_c.allocated(), "max_memory_allocated": lambda device=None: device_c.peak(),
        "reset_peak_memory_stats": lambda device=None: device_c.reset_peak(), "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0), "set_per_process_memory_fraction": lambda part, device=None: None,
        "get_device_properties": lambda device=None: types.SimpleNamespace(**vars(properties), uuid=f"GPU {index_of(device)}"),
        "cudart": lambda: types.SimpleNamespace(cudaHostRegister=lambda at, size, flags: 0, cudaHostUnregister=lambda at: 0),
        "check_error": lambda code: None,
        "set_sync_debug_mode": lambda mode: device_c.set_may_wait(mode != "error"),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16], "default_generators": (draw,), "manual_seed": draw.manual_seed,
        "manual_seed_all": draw.manual_seed, "get_rng_state": lambda device=None: draw.get_state(),
        "set_rng_state": lambda state, device=None: draw.set_state(state)})
    return module


def _move_in_place() -> None:
    """`module.to` keeps tied parameters tied, as it does for CUDA; for other devices torch must be asked to."""
    plain, lock = torch.nn.Module.to, threading.Lock()

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        with lock:   # ranks are threads, and the flag is everybody's
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                return plain(self, *args, **kwargs)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)

    torch.nn.Module.to = to   # type: ignore[assignment]


# ---------------------------------------------------------------- kernels that a CPU lacks, with what CUDA demands of their arguments


def attention(query, key, value, dropout=0.0, causal=False, debug=False, *, scale=None):
    """Flash attention, by the CPU's."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*(device_c.on_cpu(t) for t in (query, key, value)), 0.0, causal)
    unused = torch.empty(0, dtype=torch.int64, device=query.device)
    return out.to(query.device), lse.to(query.device), unused, unused, query.shape[2], key.shape[2], unused, unused, unused


def attention_backward(grad, query, key, value, out, lse, starts_q, starts_k, longest_q, longest_k, dropout, causal, seed, offset, *,
                       scale=None):
    """Its backward."""
    here = (device_c.on_cpu(t).contiguous() for t in (grad, query, key, value, out, lse))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*here, 0.0, causal)
    return tuple(each.to(query.device) for each in grads)


def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    """Products in eight bits: rows times columns, in steps of 16."""
    assert a.stride(1) == 1 and b.stride(0) == 1, f"strides {a.stride()} and {b.stride()}"
    assert a.shape[1] % 16 == b.shape[1] % 16 == 0, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    assert not a.dtype == b.dtype == torch.float8_e5m2, "one of them must be E4M3"
    assert scale_a.dtype == scale_b.dtype == torch.float32 and a.device == b.device == scale_a.device == scale_b.device
    by_row = scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1]) and out_dtype == torch.bfloat16
    assert by_row or scale_a.numel() == scale_b.numel() == 1, f"scales {tuple(scale_a.shape)} and {tuple(scale_b.shape)} to {out_dtype}"
    out = (a.float() * scale_a) @ (b.float() * scale_b)
    return (out if bias is None else out + bias).to(out_dtype or a.dtype)


def grouped_mm(a, b, offs=None, bias=None, out_dtype=None):
    """Products of groups: of the rows of `a` with matrices of their own, or of its columns with as many rows of `b`."""
    assert a.dtype == b.dtype == torch.bfloat16 and offs.dtype == torch.int32 and a.device == b.device == offs.device and a.dim() == 2
    for x in (a, b):
        assert 1 in x.stride()[-2:] and max(x.stride()[-2:]) % 8 == 0, f"strides {x.stride()}: rows or columns of whole 16 bytes"
    assert b.dim() == 3 or (a.stride(0) == 1 and b.stride(1) == 1), "each group must begin at whole 16 bytes"
    a, b, ends = (device_c.on_cpu(t) for t in (a, b, offs))
    spans = [slice(start, end) for start, end in itertools.pairwise([0, *ends.tolist()])]
    if b.dim() == 3:
        out = torch.cat([a[span] @ matrix for span, matrix in zip(spans, b, strict=True)])
    else:
        out = torch.stack([a[:, span] @ b[span] for span in spans])
    return out.to(offs.device, non_blocking=True)


# ---------------------------------------------------------------- NCCL

NUMBERS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
IN_PAIRS = ("all-reduce", "broadcast")   # what torch gives NCCL of complex numbers as pairs of real ones; NCCL knows none


class Done:
    """A call of NCCL: done on a stream of its own, for which `wait` lets the current one wait. Until it is over `held` has its tensors."""

    def __init__(self, event: torch.Event, tensors: Sequence[torch.Tensor], work: Any, held: dict[torch.Event, Sequence[torch.Tensor]]):
        self.event, self.work, self.device, self.held = event, work, tensors[0].device, held
        held[event] = tensors

    def wait(self, timeout: Any = None) -> bool:
        """Also until the bytes are there, for they come by gloo."""
        if self.work is not None:
            self.work.wait()
        current_stream(self.device).wait_event(self.event)
        self.work = None
        self.held.pop(self.event, None)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work is None


class NcclLike(dist.ProcessGroup):
    """A group over gloo that takes tensors of the pretended device as NCCL takes CUDA's: contiguous, by stream, without tags.

    meeting: a group of its own, in which ranks wait for all others before their first call but of a single message
    """

    def __init__(self, gloo: dist.ProcessGroup, meeting: dist.ProcessGroup, rank: int, size: int):
        super().__init__(rank, size)
        self.gloo, self._rank, self._size = gloo, rank, size
        self._meeting: dist.ProcessGroup | None = meeting
        self._stream: torch.Stream | None = None
        self._together: list[Done] | None = None
        self._lock = threading.Lock()
        self._held: dict[torch.Event, Sequence[torch.Tensor]] = {}

    def shutdown(self) -> None:
        """Nobody waits for what is under way: its tensors go when it is over."""
        for event in self._held:
            event.synchronize()
        self._held.clear()

    def rank(self) -> int:
        """In the group."""
        return self._rank

    def size(self) -> int:
        """Of the group."""
        return self._size

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device(NAME)]

    def _get_backend(self, device: torch.device) -> Any:
        return types.SimpleNamespace(name=lambda: "nccl" if torch.device(device).type == NAME else "gloo")

    def _call(self, op: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], start: Callable) -> Any:
        tensors = [*reads, *writes]
        if {t.device.type for t in tensors} == {"cpu"}:
            return start(lambda t: t)
        for t in tensors:
            assert t.device.type == NAME and t.is_contiguous(), f"{op}: {t.device}, strides {t.stride()}"
            assert t.dtype in NUMBERS or (t.is_complex() and op in IN_PAIRS), f"{op}: NCCL has no {t.dtype}"
        if op not in ("send", "receive"):
            self._connect_all()
        with self._lock:
            self._stream = self._stream or Stream(tensors[0].device)
        self._stream.wait_stream(current_stream(tensors[0].device))
        with self._stream:
            for t in reads:
                device_c.touch(t, False, f"NCCL's {op}")
            for t in writes:
                device_c.touch(t, True, f"NCCL's {op}")
            event = self._stream.record_event()
        done = Done(event, tensors, start(device_c.on_cpu), self._held)
        if self._together is not None:
            self._together.append(done)
        return done

    def _connect_all(self) -> None:
        if self._meeting is not None:
            self._meeting.barrier().wait()
            self._meeting = None

    def allreduce(self, tensors, opts=None):
        """In place."""
        return self._call("all-reduce", tensors, tensors, lambda cpu: self.gloo.allreduce([cpu(t) for t in tensors], opts))

    def broadcast(self, tensors, opts=None):
        """In place."""
        return self._call("broadcast", tensors, tensors, lambda cpu: self.gloo.broadcast([cpu(t) for t in tensors], opts))

    def _allgather_base(self, out, mine, opts=None):
        parts = list(out.view(-1).split(mine.numel())) if mine.numel() else [out]
        if mine.numel() and parts[self._rank].data_ptr() == mine.data_ptr():
            del parts[self._rank]   # in place: this rank's part is not written
        return self._call("all-gather", [mine], parts, lambda cpu: self.gloo._allgather_base(cpu(out), cpu(mine).clone(), opts))

    def _reduce_scatter_base(self, mine, whole, opts=None):
        return self._call("reduce-scatter", [whole], [mine],
                          lambda cpu: self.gloo._reduce_scatter_base(cpu(mine), cpu(whole).clone(), opts))

    def alltoall_base(self, out, given, out_rows, given_rows, opts=None):
        """Rows dealt."""
        return self._call("all-to-all", [given], [out],
                          lambda cpu: self.gloo.alltoall_base(cpu(out), cpu(given), out_rows, given_rows, opts))

    def send(self, tensors, to, tag=0):
        """Tags mean something on the CPU only."""
        tag = tag if tensors[0].device.type == "cpu" else 0
        return self._call("send", tensors, [], lambda cpu: self.gloo.send([cpu(t) for t in tensors], to, tag))

    def recv(self, tensors, frm, tag=0):
        """Tags mean something on the CPU only."""
        tag = tag if tensors[0].device.type == "cpu" else 0
        return self._call("receive", [], tensors, lambda cpu: self.gloo.recv([cpu(t) for t in tensors], frm, tag))

    def _start_coalescing(self, device: torch.device) -> None:
        self._connect_all()
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Any:
        calls, self._together = self._together or [], None
        return types.SimpleNamespace(wait=lambda timeout=None: [call.wait() for call in calls])


def as_nccl(connect: Callable) -> Callable:
    """`connect` of world/connect.py, for ranks with a pretended GPU of their own."""
    def joined(store, rank, size, device, *, own_gpu, **how):
        gloo = connect(store, rank, size, torch.device("cpu"), own_gpu=False, **how)
        if device.type != NAME:
            return gloo
        meeting = connect(dist.PrefixStore("meeting", store), rank, size, torch.device("cpu"), own_gpu=False, **how)
        return NcclLike(gloo, meeting, rank, size)
    return joined


def gpu_of(rank: int) -> torch.device:
    """That of a simulated rank, which is this thread's from here on."""
    device_c.set_device(rank)
    return torch.device(NAME, rank)


def on_cpu(give: Callable) -> Callable:
    """`full_state_dict`, with all tensors on the CPU, where tests compare them."""
    def given(self: Any, rank: int | None = None) -> Any:
        return torch.utils._pytree.tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, give(self, rank))
    return given


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _as_a_module())
sys.modules[f"torch.{NAME}"] = getattr(torch, NAME)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
_move_in_place()
LIBRARY = torch.library.Library("aten", "IMPL")
for _name, _kernel in {"_scaled_dot_product_flash_attention": attention, "_scaled_dot_product_flash_attention_backward": attention_backward,
                       "_scaled_mm": scaled_mm, "_grouped_mm": grouped_mm}.items():
    LIBRARY.impl(_name, _kernel, "PrivateUse1")
