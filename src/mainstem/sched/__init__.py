"""Decides what runs next: makes Steps from waiting requests."""
