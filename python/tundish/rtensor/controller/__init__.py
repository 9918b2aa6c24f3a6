"""The controller: begins and ends steps on all workers."""
