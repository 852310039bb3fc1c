"""Says what peers exchange and how it is signed and checked; pure, without input or output."""
