"""Floor 6: the engine, and the loop around it."""
