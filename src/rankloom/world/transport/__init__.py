"""The torch backend "rankloom": ranks of one host exchange tensors through memory that all of them map.

    _shared.c         the collectives and messages, on pointers
    fallback.py       the same in Python, for hosts without a compiler, and to read; with fallback_peers.py and fallback_messages.py
    codes.py          the numbers that callers and kernels share: kinds of calls, operations, reasons of failure
    meet.py           which ranks are here now, and which share a host; the segment of memory that these share, which has no name
    free_memory.py    how much memory may be taken
    channel.py        one rank's end: calls, background calls, and the text of errors
    buffers.py        memory that all ranks map, to reduce in place
    operands.py       any tensor -> contiguous bytes and a number type, and back
    process_group.py  torch's whole ProcessGroup interface, on a channel
    router.py         CPU and CUDA tensors in one process group; for CUDA tensors of ranks that share a GPU: device_group.py, with
                      rounds.py, parcels.py and arithmetic.py, on the interface of device.py, which cuda.py implements
    backend.py        the registration with torch
"""
