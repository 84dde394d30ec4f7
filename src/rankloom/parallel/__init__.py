"""Floor 4: one technique, one file or folder; each reads as its paper does. Users see data parallel and sharding as data.py, zero.py
and fully_shard.py; gradients/, sections/ and replicas/ do their work.
"""
