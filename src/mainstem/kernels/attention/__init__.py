"""Attention of a step's tokens over spans of pages: planner (numpy), kernels, reference.

`ops.py` and `merge.py` are the operations. They need Triton, as do the folders `triton` (kernels
for any card) and `hopper`; the planner, `reference.py` and `cpu` do not. In all these folders,
`import triton` imports the library, not a folder.
"""
