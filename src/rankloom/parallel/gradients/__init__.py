"""How ranks that hold the whole model sum its gradients, in buckets, while backward goes on. Begin with bucket.py and reducer.py."""
