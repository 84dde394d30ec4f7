"""Floor 6: the engine. train/run is the loop around it, which the engine does not know."""
