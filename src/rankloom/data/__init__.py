"""Text and tokens, and which sample comes when.

text.py (documents) -> tokenizer.py -> corpus.py (tokens on disk) -> order.py (a pure function) -> loader.py (batches);
ngram.py is the baseline a model has to beat.
"""
