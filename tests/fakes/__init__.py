"""Pretend vendor libraries: real shared objects that the real Python bindings load, driven by a text file."""
