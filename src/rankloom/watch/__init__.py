"""Show a run: progress line, history, plots. Reads events and run folders, nothing else."""
