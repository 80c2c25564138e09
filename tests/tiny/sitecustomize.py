"""Read by every process that a test starts, before its own code."""

import atexit
import gc

# Its imports are millions of objects that stay. To walk through them took 2 of 9 s of a process that loads a policy.
gc.set_threshold(50_000, *gc.get_threshold()[1:])
atexit.register(gc.freeze)
