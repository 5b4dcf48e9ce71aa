"""Lines that the process of the fuzzer prints before and after the output of each target."""

BEGIN, ENDED = "=== target ", "=== ended with status "
