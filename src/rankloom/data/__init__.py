"""Text, tokens, and the order of samples.

text.py (documents) -> tokenizer.py -> corpus.py (tokens on disk) -> order.py (a pure function) -> loader.py (batches);
ngram.py is the baseline that a model should beat.
"""
