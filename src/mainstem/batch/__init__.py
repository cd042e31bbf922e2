"""Parts of a batch job: rows in, answers out; `mainstem.cli.batch` is the command."""
