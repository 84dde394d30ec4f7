"""Floor 1: groups of ranks, and how they start. The only floor that uses torch.distributed and the environment."""
