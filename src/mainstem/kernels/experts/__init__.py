"""A mixture of experts on a device: routing, and the products of all experts at once."""
