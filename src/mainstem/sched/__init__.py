"""What to run next: waiting requests in, Steps out."""
