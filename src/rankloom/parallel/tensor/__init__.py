"""Tensor and sequence parallel: the matrices of a model cut over ranks. Begin with apply.py."""
