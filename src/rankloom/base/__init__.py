"""Floor 0: values, pure arithmetic and small helpers. No communication, no environment."""
