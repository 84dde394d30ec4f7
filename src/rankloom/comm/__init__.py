"""Floor 2: collectives from send and receive. Each algorithm has one file, with its code and its bill."""
