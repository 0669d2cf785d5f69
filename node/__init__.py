"""The machine that learns: engines, trainers, algorithms, environments, the daemon and the command line."""

import os

# Before torch is loaded, by whatever module. On CPUs with bfloat16 units it keeps compiled kernels of the last 1,024
# shapes, in two caches; sampling has a new shape at every turn, so a node held 0.6 GB of them for nothing.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "32")
