"""What ranks that hold the same must agree on: how they start, which buffers they keep, that nobody steps without the others."""
