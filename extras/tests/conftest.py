"""The hooks of the course's tests serve here, too: marks, --device, pools of ranks, a time limit."""

from tests.conftest import (  # noqa: F401
    limit,
    pools,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_pyfunc_call,
    pytest_sessionfinish,
)
