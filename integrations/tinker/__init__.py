"""Tinker, where a policy's weights are trained and sampled by a service: it needs the extra `tinker`."""
