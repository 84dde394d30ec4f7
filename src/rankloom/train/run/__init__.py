"""A whole run: from a config file to weights, samples and a summary."""
