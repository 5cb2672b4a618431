"""The course's pytest hooks and pools, for the tests of extras, too."""

from tests.conftest import *  # noqa: F403
