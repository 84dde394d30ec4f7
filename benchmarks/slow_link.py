"""Compressed and hierarchical all-reduce over a real slow link: two hosts joined by 100 Mbit/s and by 1 Gbit/s.

    sudo .venv/bin/python benchmarks/slow_link.py

The hosts are two network namespaces of this machine, joined by a pair of virtual interfaces that `tc tbf` limits at both ends. The
script makes and removes them; it needs root, `ip` and `tc` (Debian: apt install iproute2), and says so where it cannot.

Each variant sums the same fp32 buffer, in turn with the others; shown are medians, ratios taken round by round. Bytes are counted
twice: by the ledger of a host's ranks, and by its interface, which adds headers and acknowledgements.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common import Words, count, counts, keep, machine, median_ratio, show, worker_command

import rankloom as rl
from rankloom.comm.blockwise import Blockwise
from rankloom.comm.choose import in_two_levels
from rankloom.comm.compress import compressed_all_reduce
from rankloom.comm.quantize import INT8
from rankloom.comm.ring import ring_all_reduce
from rankloom.comm.two_levels import TwoLevels, all_reduce_in_pieces
from rankloom.world.agent import LEASH

INTERFACE, PORT = "slow", 29555
BURST = "32kb"          # what may pass at full speed after a pause: a quarter of a millisecond's worth of 1 Gbit/s
SEGMENT = "16384"       # bytes that the kernel hands over at once; a network card cuts them in packets, here nobody need
ADDRESS = "10.77.0.{}"
BARS = {"int8": 3.7, "int4": 7, "1bit": 20, "powersgd": 50, "hierarchical": 1.4,
        "hierarchical, int8 between": 5.5, "hierarchical, int8 between, by rankloom": 5.5}


# ---------------------------------------------------------------------- two hosts and a wire


def run(*command: str) -> str:
    """Run a command; its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def host(number: int, owner: int | None = None) -> str:
    """The name of a namespace: it tells which process made it."""
    return f"rankloom-{os.getpid() if owner is None else owner}-{number}"


def remove(name: str) -> None:
    """Remove a namespace, and with it its interface and what was mounted over /etc for it."""
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def remove_left_overs() -> None:
    """Remove what earlier runs left behind that were killed."""
    for name in run("ip", "netns", "list").split():
        parts = name.split("-")
        if len(parts) == 3 and parts[0] == "rankloom" and parts[1].isdigit() and not Path("/proc", parts[1]).exists():
            remove(name)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Two namespaces, joined. They are gone afterwards, also after Ctrl-C, SIGTERM or an exception."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    remove_left_overs()
    try:
        for number in (0, 1):
            run("ip", "netns", "add", host(number))
            # Ranks meet by host name, so in each namespace the name must stand for its own address.
            hosts = Path("/etc/netns") / host(number) / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS.format(number + 1)} {os.uname().nodename}\n")
        run("ip", "link", "add", INTERFACE, "netns", host(0), "type", "veth", "peer", "name", INTERFACE, "netns", host(1))
        for number in (0, 1):
            run("ip", "-n", host(number), "addr", "add", f"{ADDRESS.format(number + 1)}/24", "dev", INTERFACE)
            run("ip", "-n", host(number), "link", "set", INTERFACE, "gso_max_size", SEGMENT)
            for device in ("lo", INTERFACE):
                run("ip", "-n", host(number), "link", "set", device, "up")
        yield
    finally:
        for number in (0, 1):
            remove(host(number))


def limit(rate: str) -> None:
    """Limit both ends of the wire, replacing an earlier limit."""
    for number in (0, 1):
        run("tc", "-n", host(number), "qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst", BURST, "latency", "50ms")


def launch(script: str, ranks_per_host: int, args: argparse.Namespace, /, **changed: object) -> dict:
    """Run the worker of a script on both hosts, as `common.run_ranks` does; what rank 0 found. All are ended when one fails."""
    size = 2 * ranks_per_host
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        started = []
        for rank in range(size):
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % ranks_per_host, "LOCAL_WORLD_SIZE": ranks_per_host,
                     "GROUP_RANK": rank // ranks_per_host, "MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
            # On a leash, so that a killed benchmark leaves no ranks behind that would keep the namespaces.
            inside = [sys.executable, str(LEASH), str(os.getpid()), "ip", "netns", "exec", host(rank // ranks_per_host)]
            command = [*inside, sys.executable, *worker_command(script, args, **changed, out=str(out))]
            started.append(subprocess.Popen(command, env=os.environ | {key: str(value) for key, value in place.items()}))
        try:
            while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
                time.sleep(0.2)
            if any(process.poll() for process in started):
                raise SystemExit("a rank failed")
        finally:
            for process in started:
                process.kill()
                process.wait()
        return json.loads(out.read_text())


def why_not() -> str | None:
    """What stands against it on this machine, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    probe = host(9)
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    remove(probe)
    return f"network namespaces are not permitted here: {made.stderr.strip()}" if made.returncode else None


def end_unless_permitted() -> None:
    """Say why, and end here, where this machine cannot make the hosts."""
    if reason := why_not():
        print(f"skipped: {reason}")
        raise SystemExit


# ---------------------------------------------------------------------- what one rank does


def sent_by_interface() -> int:
    """Bytes that this host has put on the wire so far."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def variants(world: rl.World, side: int) -> dict[str, tuple[Callable[[torch.Tensor, rl.World], object], rl.World]]:
    """What is compared, and over which world: gloo's, or that of our backend, whose sums inside a host go through shared memory, and whose
    messages over TCP. The first is the base.
    """
    base = {"gloo, fp32": (lambda x, group: group.all_reduce(x), world)}
    if world.size == 2:
        names = ("bf16", "int8", "int4", "1bit", "topk", "powersgd")
        return base | {name: (compressed_all_reduce(name, [(0, (side, side))]), world) for name in names}
    near = rl.init(backend="rankloom")
    return base | {"fp32, by rankloom": (lambda x, group: group.all_reduce(x), near),
                   "hierarchical": (all_reduce_in_pieces, world), "hierarchical, not in pieces": (in_two_levels(ring_all_reduce), world),
                   "hierarchical, int8 between": (TwoLevels(Blockwise(INT8)), world),
                   "hierarchical, int8 between, by rankloom": (TwoLevels(Blockwise(INT8)), near)}


def worker(args: argparse.Namespace) -> None:
    """One rank: run all variants in turn, on matrices of side x side."""
    world = rl.init(backend="gloo")
    torch.set_num_threads(1)
    source = torch.randn(args.side, args.side, generator=torch.Generator().manual_seed(world.rank))
    ways = variants(world, args.side)
    exact = world.all_reduce(source.clone())
    found: dict[str, dict] = {name: {"seconds": [], "apart": 0.0} for name in ways}
    for turn in range(args.repeat + 1):
        for name in list(ways)[turn % len(ways):] + list(ways)[: turn % len(ways)]:
            x = source.clone()
            world.barrier()
            algorithm, group = ways[name]
            by_ledger, on_wire = group.ledger.bytes, sent_by_interface()
            begin = time.perf_counter()
            algorithm(x, group)
            seconds = time.perf_counter() - begin
            world.barrier()
            numbers = torch.tensor([seconds, group.ledger.bytes - by_ledger, sent_by_interface() - on_wire], dtype=torch.float64)
            everyone = world.all_gather(numbers).view(world.size, 3)
            if turn:   # the first is not counted
                found[name]["seconds"].append(everyone[:, 0].max().item())
            found[name]["ledger"] = everyone[: world.local_size, 1].sum().item()
            found[name]["wire"] = everyone[0, 2].item()
            found[name]["apart"] = ((x - exact).norm() / exact.norm()).item()
    if world.rank == 0:
        Path(args.out).write_text(json.dumps(found))
    world.close()


def rows_of(found: dict[str, dict], rate: str, ranks_per_host: int, mib: int) -> list[dict]:
    """One line for each variant, the base first."""
    base = next(iter(found.values()))["seconds"]
    return [{"link": rate, "ranks": f"2 x {ranks_per_host}", "MiB": mib, "all-reduce": name,
             "median ms": round(sorted(one["seconds"])[len(one["seconds"]) // 2] * 1e3, 1),
             "times gloo": round(median_ratio(base, one["seconds"]), 2), "at least": BARS.get(name, ""),
             "MB by ledger": round(one["ledger"] / 1e6, 3), "MB on the wire": round(one["wire"] / 1e6, 3),
             "off by": f"{one['apart']:.1e}"} for name, one in found.items()]


def main() -> None:
    """Measure at each rate, print the table, keep it."""
    parser = Words(__doc__, worker)
    parser.add_argument("--rates", default="100mbit,1gbit")
    parser.add_argument("--side", type=count, default=4096, help="the buffer is a matrix of side x side fp32 numbers")
    parser.add_argument("--repeat", type=count, default=5)
    parser.add_argument("--ranks-per-host", type=counts, default="1,2")
    parser.add_argument("--keep", default="slow_link", help="name of the files in benchmarks/results")
    args = parser.read()
    end_unless_permitted()
    where = machine()
    rows = []
    with two_hosts():
        for rate in args.rates.split(","):
            limit(rate)
            for ranks in args.ranks_per_host:
                found = launch(__file__, ranks, args)
                rows += rows_of(found, rate, ranks, args.side**2 * 4 >> 20)
                print(show(rows[-len(found):]), flush=True)
    keep(args.keep, where, rows)


if __name__ == "__main__":
    main()
