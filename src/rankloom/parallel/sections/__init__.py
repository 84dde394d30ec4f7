"""A sharded model as sections, modules that are gathered when they are called. Begin with section.py, then read
forward_backward.py, which moves them through a step, and sharding.py, which a training loop sees. wrapping.py cuts a model into them.
"""
