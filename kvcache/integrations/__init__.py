"""Adapters to other libraries, each imported on demand."""
