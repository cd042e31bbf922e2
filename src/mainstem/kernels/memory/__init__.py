"""K, V and inputs on their way: written, copied, turned, uploaded."""
