"""What a run looks like from outside: progress line, history, plots. Reads events and run folders, nothing else."""
