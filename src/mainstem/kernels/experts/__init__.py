"""A mixture of experts on a device: who goes where, and the products of all experts at once."""
