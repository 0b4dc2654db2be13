"""Pretend vendor libraries: real shared objects that the real Python bindings load, driven by a text file."""

import pytest

pytest.register_assert_rewrite("tests.fakes.checks")
