"""The loop that joins scheduler and runner."""
