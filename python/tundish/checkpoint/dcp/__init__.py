"""DCP checkpoints: what `torch.distributed.checkpoint` reads and writes, saved while training goes on.

`saver.DcpSaver` is what a checkpointer has of them. The rooms behind it, each knowing only those before: `record`
(the bytes of one tensor), `leaves` (a flat state dict), `outline` and `owners` (which rank saves what), `layout` (a
rank's file), `ranks` (what ranks tell each other), `values` (`extra` as JSON), `writer` (torch's planner and our
writer), `through` (a save that is larger than its budget), `plan` (one save), `reader`, `shares` and `opened` (a
checkpoint that ranks read together), `rankextras`, `load`.
"""
