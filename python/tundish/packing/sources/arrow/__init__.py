"""Sources that pyarrow reads: tables, datasets of Hugging Face, Arrow files and Parquet files."""
