"""Parts of a batch job: rows in, answers out; `mainstem.apps.batch` is the command."""
