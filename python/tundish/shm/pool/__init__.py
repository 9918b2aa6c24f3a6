"""A pool of processes that binds its data once.

What users see is `SharedPool`; the modules beside it each own one thing it consists of.
"""

from tundish.shm.pool.pool import SharedPool

__all__ = ["SharedPool"]
