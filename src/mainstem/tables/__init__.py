"""Tables: a prompt for every row, answers in new columns (docs/tables.md).

formats.py  which format a file has
text.py     CSV, TSV and JSON lines, in and out
arrow.py    Parquet, Arrow files and tables in memory; needs the extra `tables`
cells.py    what a cell is as text
prompts.py  prompts with columns in them
fields.py   the order of the columns that {row} lists
asking.py   what is asked of every row, and what becomes of the answer
rows.py     a table as the lines of a batch job
results.py  the answers of a batch job, by row
"""
