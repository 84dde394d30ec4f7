"""Plain torch models that know nothing of ranks.

config.py (shapes and presets, no torch) -> gpt.py (the model) -> loss.py (its loss) -> generate.py (its text).
"""
