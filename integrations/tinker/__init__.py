"""Tinker, a service that trains and samples a policy's weights. It needs the extra `tinker`."""
