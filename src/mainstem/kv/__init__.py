"""Decides which pages are kept, and in which tier. Only kv/bytes uses files and connections."""
