"""Refuses torch's `nn.SyncBatchNorm`, batch norm over the rows of all ranks: it needs torch's default process group."""

from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.world.connect import has_default_group


def expect_no_sync_batch_norm(model: nn.Module, ranks: int) -> None:
    """Raise ConfigError for a SyncBatchNorm that would silently see only the rows of its own rank.

    ranks: the number of ranks over which the rows of a batch are distributed
    """
    if ranks == 1 or has_default_group():
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(f"{name or 'the model'} is a SyncBatchNorm. It takes its statistics over torch's default process group, and "
                              f"rankloom makes none: on {ranks} ranks each would normalise by its own rows, as a plain BatchNorm does. "
                              "Use nn.GroupNorm or nn.LayerNorm; or nn.BatchNorm, where each rank's own rows are enough (running "
                              "statistics are averaged after each step)")
