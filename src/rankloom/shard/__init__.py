"""Floor 3: tensors laid out over ranks."""
