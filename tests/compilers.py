"""The mark of tests that need a C++ compiler for the native engine."""

from __future__ import annotations

import pytest

from device_runner.engines.native.build import find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
