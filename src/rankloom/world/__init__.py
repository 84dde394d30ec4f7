"""Floor 1: who is here. The only floor that talks to torch.distributed and to the environment."""
