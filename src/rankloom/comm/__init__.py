"""Floor 2: collectives from send and receive. One algorithm is one file: its code and its bill."""
