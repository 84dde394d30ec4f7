"""A training state on disk: interval arithmetic over files. It knows no technique, only boxes of tensors."""
