"""A pool of processes that is bound to one function and its shared arguments."""

from tundish.shm.pool.shared_pool import SharedPool

__all__ = ["SharedPool"]
