"""What the server imports that forks the processes of tests: one list, since a test run has one such server."""

from cpgen.verify import pool

PRELOADED = [
    *pool.PRELOADED,
    "diffusers.models.controlnets",
    "numpy.random",
    "peft",
    "tests.runtime.crash_cases",
    "torch._dynamo",  # the first optimizer imports it
]
