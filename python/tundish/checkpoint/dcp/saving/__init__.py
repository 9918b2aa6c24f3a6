"""Saving DCP checkpoints: `dcp_stager`, `save_planner`, `staged_state`, `torch_metadata`."""
