"""The copy worker's contract, as tests/integration/worker states it for a memfd and for the fake driver, here
on the real one: the same tests, imported, with memory that this process cannot look at directly."""
