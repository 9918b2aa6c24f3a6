"""A pool of processes that is bound once to a function and its data."""

from tundish.shm.pool.shared_pool import SharedPool

__all__ = ["SharedPool"]
