"""The torch backend "rankloom": ranks of one host exchange tensors through memory that all of them map.

    _shared.c         the collectives and messages themselves, on pointers
    fallback.py       the same in Python, for where there is no compiler, and to read; with fallback_peers.py and fallback_messages.py
    codes.py          the numbers by which kernels are told what to do, and tell why they could not
    meet.py           who is here now, who shares a host; the segment of memory they share; nothing of it has a name
    free_memory.py    how much of it may be taken
    channel.py        one rank's end: calls, background calls, and what went wrong in words
    buffers.py        memory that all ranks map, to reduce in place
    operands.py       any tensor -> contiguous bytes and a number type, and back
    process_group.py  all of torch's ProcessGroup on a channel
    router.py         CPU and CUDA tensors in one process group; CUDA tensors of ranks that share a GPU, in its memory:
                      device_group.py, rounds.py, parcels.py, arithmetic.py on what device.py asks of a device and cuda.py is
    backend.py        the registration with torch
"""
