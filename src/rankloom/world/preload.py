"""What every spawned rank needs, imported once: by the server that forks them. Read spawn.py before this file."""

from rankloom.base.garbage import lasting

with lasting():
    import torch
    import torch._dynamo  # the first optimizer would import it

    import rankloom.world.spawn

__all__ = ["rankloom", "torch"]
