"""Floor 0: values and pure arithmetic. No communication, no files, no environment."""
