"""Tensor and sequence parallel: the matrices of a model cut over ranks. Begin with apply.py."""

from rankloom.parallel.tensor.apply import tensor_parallel as tensor_parallel
