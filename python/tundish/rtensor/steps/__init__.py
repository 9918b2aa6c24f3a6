"""Steps of one process and of a process group, without a controller."""
