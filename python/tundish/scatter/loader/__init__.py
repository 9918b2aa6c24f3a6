"""The parts of `DispatchLoader`: reading batches, prefetching them, and the state to resume from."""
