"""Hugging Face exports: planned (`export_plan`), staged (`stager`, `gather`), written (`staged_export`, `sidecars`)."""
