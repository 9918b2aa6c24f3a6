"""How batches travel between ranks: shared memory, gloo, and from device to device."""
