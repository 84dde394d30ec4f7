"""The torch backend "rankloom": ranks of one host exchange tensors through memory that all of them map; between hosts they use TCP.

    torch's call     process_group.py (forms.py, operands.py, sparse.py, profiled.py) returns work.py (herald.py); if there is CUDA,
                     router.py is in front of it
    one rank's end   channel.py: a link, and the text of its errors; buffers.py: memory that all ranks map
    links            one host: _shared.c, or in Python, to read and for hosts without a compiler, fallback.py (collectives),
                     fallback_messages.py, fallback_peers.py (what the ranks share)
                     several hosts: hosts.py, with levels.py and position.py (collectives), wire.py, lines.py and dial.py (messages),
                     roll.py (which call each rank has begun)
                     codes.py: the numbers that callers and links share
                     the links in Python share call.py (a call as a value; rounds.py has it too) and turns.py (one call after the other)
    one shared GPU   device_group.py, with rounds.py (collectives), parcels.py (messages) and arithmetic.py, on the interface of
                     device.py, which cuda.py implements (cuda_driver.py, cuda_sum.py)
    other GPUs       nccl.py: one for each rank; through_host.py: some ranks share one
    the start        backend.py and plugin.py: the registration with torch; meet.py, ask.py and address.py: which ranks are here, and
                     where; memory.py and free_memory.py: the memory that the ranks of a host share
    the short way    at_once.py: from world/group.py straight to the link
"""
