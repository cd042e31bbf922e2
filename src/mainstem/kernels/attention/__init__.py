"""Attention of a step's tokens over spans of pages: planner (numpy), kernels, reference.

`ops.py` and `merge.py` are the operations, and need Triton; so do the folders `triton` (kernels for
any card) and `hopper`. The planner, `reference.py` and `cpu` do without. Inside these folders, too,
`import triton` is the library.
"""
