"""Register the backend: then `dist.init_process_group("rankloom")` works, and `"cpu:rankloom,cuda:nccl"` too.

torch calls `create` once for each new group, and uses the result as the whole group, whatever else its backend string
names; so the group itself decides by the device of each tensor.
This file is imported at every `import torch` where rankloom is installed; the backend itself is imported with the first group.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

NAME, COMPILER = "rankloom", "torch._dynamo"


def register() -> None:
    """Make the backend known to torch; calling it again changes nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
        _keep_the_recorder_out()
        _keep_the_compiler_out()


def _keep_the_recorder_out() -> None:
    """From 2.15 on torch attaches a flight recorder to every group, which fails for a group written in Python: skip it for ours."""
    torchs: Any = dist.distributed_c10d
    attach = getattr(torchs, "_maybe_attach_flight_recorder", None)
    if attach:
        is_ours = lambda group: isinstance(group, import_module("rankloom.world.transport.work").AsBackend)
        torchs._maybe_attach_flight_recorder = lambda group, *rest: None if is_ours(group) else attach(group, *rest)


def _keep_the_compiler_out() -> None:
    """torch.compile steps into functions that are written in Python, and fails where they communicate: it must call them as they are."""
    if COMPILER in sys.modules:
        _call_as_it_is(sys.modules[COMPILER])
    else:
        sys.meta_path.insert(0, _WhenCompilerComes())   # importing it takes a second, and few programs need it


def _call_as_it_is(compiler: Any) -> None:
    compiler.trace_rules.add("rankloom.world")


class _WhenCompilerComes:
    """Acts when the compiler is imported. (Some only ask where it is.)"""

    is_asking = False

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """Called by Python for each import."""
        if name != COMPILER or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = find_spec(name)
        finally:
            self.is_asking = False
        if spec is not None and isinstance(spec.loader, SourceLoader):
            spec.loader.exec_module = partial(_run, spec.loader.exec_module)   # type: ignore[method-assign]
        return spec


def _run(load: Callable[[Any], None], compiler: Any) -> None:
    load(compiler)
    _call_as_it_is(compiler)


def create(where: Any, options: Any) -> dist.ProcessGroup:
    """Called by torch for a new group: `where` holds the store, this rank, the number of ranks and the time-out."""
    router, meet = (import_module(f"rankloom.world.transport.{name}") for name in ("router", "meet"))
    build = import_module("rankloom.world.transport.process_group").build
    ranks, timeout = list(where.global_ranks_in_group) or range(where.group_size), where.timeout.total_seconds()
    # After a restart torch numbers groups from 0 again.
    reunion = meet.Reunion("again", where.store, ranks, lambda: router.gone(dist.GroupMember.WORLD))
    store = meet.start_afresh(reunion, where.group_rank, where.group_size, timeout, ranks=ranks)
    group = build(store, where.group_rank, where.group_size, timeout, ranks=ranks, name=where.group_id or "default")
    return router.with_router(group, timeout)
