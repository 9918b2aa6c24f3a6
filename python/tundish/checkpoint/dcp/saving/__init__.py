"""Saving DCP checkpoints, from a state dict to durable files.

The modules in the order of their imports: `state_summary`, `ownership`, `file_layout`, `plan_exchange`,
`rank_comparison`, `torch_planning`, `staged_state`, `dcp_plan`.
"""
