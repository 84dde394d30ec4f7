"""`import rankloom.transport` registers the backend "rankloom" with torch.

If rankloom is installed this is not needed: torch does it on its own import, as a plug-in (world/transport/plugin.py). The backend itself
is in world/transport/.
"""

from rankloom.world.transport.backend import create, register

__all__ = ["create", "register"]

register()
