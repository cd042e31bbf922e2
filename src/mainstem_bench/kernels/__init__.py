"""Single kernels on a card, timed and checked: `python -m mainstem_bench.kernels.NAME`."""
