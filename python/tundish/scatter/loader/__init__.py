"""The parts of `DispatchLoader`: reading batches, prefetching them, and the state to resume from.

A step goes through them in this order:

1. `BatchReader` draws from the user's loader as many batches as the step needs, on the source.
2. `EpochSource` passes them to `ScatterSource.send`, which sends every rank its own. `EpochReceiver` gets the batch of
   its rank from `ScatterReceiver.receive`.
3. `PrefetchedSteps` does 1 and 2 on a thread and queues the steps. `InlineSteps` does them when the caller asks.
4. `EpochIterator` takes a step from the queue. `DispatchLoader` makes its batch, and `LoaderState` counts it.

`EarlyExits` tells the source that a rank has left the loop.
"""
