"""Set before anything is imported; pyproject.toml's pytest options close the network."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",  # a model or data set that is not on disk is an error, not a download
    TOKENIZERS_PARALLELISM="false",  # no warning when a test starts a process
    OMP_WAIT_POLICY="PASSIVE",  # idle torch threads sleep: two cores are shared with the test itself
)
