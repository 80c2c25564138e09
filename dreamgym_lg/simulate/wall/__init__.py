"""The wall: processes that the kernel keeps from touching the real world, and the workers that play dreamed episodes there."""
