"""Hugging Face exports: plan (`export_plan`), staging (`hf_stager`, `gather`), files (`staged_export`, `sidecars`)."""
