"""`mainstem simulate` and `mainstem capacity`: the policy of the store, or the router over many
replicas, on a trace of requests (docs/simulate.md)."""
