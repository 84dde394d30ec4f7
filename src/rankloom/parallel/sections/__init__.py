"""A sharded model as sections, modules that are gathered when they are called. Start with section.py, then sharding.py; order:
call_order.py and reduction_order.py; cut by wrapping.py.
"""
